"""The arena's page tables on the device, as the attention kernel reads them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compressors import Shape
from vericache.device import to_device
from vericache.draft.formats import PageFormat
from vericache.draft.pool import PagePool


@dataclass(frozen=True)
class ArenaTables:
    """``table`` int32 ``[slots, L, H, MAXP]``: kept pages of a head first, then ``folded`` int32 ``[slots]`` full
    pages, then its tail pages; ``counts`` int32 ``[slots, L, H]``, kept tokens. Entries nobody reads are not cleared.

    ``turn`` and ``back`` ``[D, D]`` are TurboQuant's rotation without its factor 1 / sqrt(D), so that it is exact in
    the model's dtype, transposed and as it is.
    """

    format: PageFormat
    pool: PagePool
    table: Tensor
    folded: Tensor
    counts: Tensor
    turn: Tensor
    back: Tensor

    @classmethod
    def empty(cls, pages: PageFormat, pool: PagePool, slots: int, shape: Shape, max_tokens: int) -> "ArenaTables":
        """Wide enough for a head that keeps all of ``max_tokens`` tokens, some of them in the tail."""
        device = pool.bytes.device
        width = -(-max_tokens // pages.tail_page_tokens) + 3  # every part can end in a partly filled page
        heads = (slots, shape.layers, shape.kv_heads)
        signs = (pages.turn(torch.eye(pages.head_dim)) * pages.head_dim**0.5).round()
        signs = to_device(signs.to(pages.dtype), device)
        return cls(
            pages,
            pool,
            torch.zeros(*heads, width, dtype=torch.int32, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
            torch.zeros(heads, dtype=torch.int32, device=device),
            signs,
            signs.T.contiguous(),
        )

    def fill(self, slot: int, counts: Tensor, need: Tensor, pages: Tensor) -> None:
        """A slot's kept pages: ``counts`` and ``need`` int ``[L, H]`` tokens and pages, ``pages`` int32 ``[N]`` in
        order of layer, head, index; all in host memory."""
        width = int(need.max())
        rows = torch.zeros(*need.shape, width, dtype=torch.int32)
        rows[torch.arange(width) < need[..., None]] = pages
        self.table[slot, :, :, :width] = to_device(rows, self.table.device)
        self.counts[slot] = to_device(counts.int(), self.table.device)
        self.folded[slot] = 0

    def append(self, slot: int, first: Tensor, strips: Tensor) -> None:
        """Pages ``strips`` int32 ``[m, L, H]``, the first of them at entry ``first`` int ``[L, H]`` of its head; all in
        host memory."""
        index = first[..., None] + torch.arange(len(strips))
        entries = to_device(torch.stack([index.int(), strips.permute(1, 2, 0)]), self.table.device)
        self.table[slot].scatter_(2, entries[0].long(), entries[1])

    def fold(self, slot: int, first: Tensor, folded: Tensor, tail: Tensor) -> None:
        """A slot's folded pages and what is left of its tail, behind its ``first`` kept ones."""
        self.append(slot, first, torch.cat([folded, tail]))
        self.folded[slot] = len(folded)
