"""The arena's page tables on the device, as the attention kernel reads them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compressors import Shape
from vericache.device import to_device


@dataclass(frozen=True)
class ArenaTables:
    """``pool [P, 2, PT, D]``; ``table`` int32 ``[slots, L, H, MAXP]``, kept pages of a head first, its tail pages
    behind them; ``counts`` int32 ``[slots, L, H]``, kept tokens. Entries nobody reads are not cleared."""

    pool: Tensor
    table: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, pool: Tensor, slots: int, shape: Shape, max_tokens: int) -> "ArenaTables":
        """Wide enough for a head that keeps all of ``max_tokens`` tokens, some of them in the tail."""
        width = -(-max_tokens // pool.shape[2]) + 2  # both parts can end in a partly filled page
        heads = (slots, shape.layers, shape.kv_heads)
        counts = torch.zeros(heads, dtype=torch.int32, device=pool.device)
        return cls(pool, torch.zeros(*heads, width, dtype=torch.int32, device=pool.device), counts)

    @property
    def page_tokens(self) -> int:
        return self.pool.shape[2]

    def fill(self, slot: int, counts: Tensor, need: Tensor, pages: Tensor) -> None:
        """A slot's kept pages: ``counts`` and ``need`` int ``[L, H]`` tokens and pages, ``pages`` int32 ``[N]`` in
        order of layer, head, index; all in host memory."""
        width = int(need.max())
        rows = torch.zeros(*need.shape, width, dtype=torch.int32)
        rows[torch.arange(width) < need[..., None]] = pages
        self.table[slot, :, :, :width] = to_device(rows, self.table.device)
        self.counts[slot] = to_device(counts.int(), self.table.device)

    def append(self, slot: int, first: Tensor, strips: Tensor) -> None:
        """Tail pages ``strips`` int32 ``[m, L, H]``, the first of them at entry ``first`` int ``[L, H]`` of its head;
        all in host memory."""
        index = first[..., None] + torch.arange(len(strips))
        entries = to_device(torch.stack([index.int(), strips.permute(1, 2, 0)]), self.table.device)
        self.table[slot].scatter_(2, entries[0].long(), entries[1])
