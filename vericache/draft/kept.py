"""Where the tokens of a slot's compressed context came from, for reloads that fetch only what is not kept."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vericache.device import to_device
from vericache.draft.formats import pages_per_head


@dataclass(frozen=True)
class Origin:
    """``positions`` int32 ``[counts.sum()]`` on the device, by layer, head, position: 4 bytes a kept token of a head,
    1/128 of its keys and values with heads of size 128 in bfloat16. ``before`` int64 ``[blocks + 1]`` in host memory:
    kept tokens, of all heads, in the context's blocks before each, 8 bytes a block."""

    positions: Tensor
    before: Tensor

    @classmethod
    def of(cls, positions: Tensor, context: int, block_tokens: int) -> "Origin":
        """Of a context in blocks of ``block_tokens`` tokens. Waits for the device."""
        blocks = -(-context // block_tokens)
        found = torch.bincount(positions // block_tokens, minlength=blocks).cumsum(0).cpu()
        return cls(positions.int(), torch.nn.functional.pad(found, (1, 0)))

    def tokens(self, first: int, end: int) -> int:
        """Kept tokens, of all heads, in blocks ``first .. end - 1`` of the context."""
        last = len(self.before) - 1
        return max(0, int(self.before[min(end, last)] - self.before[min(first, last)]))

    @property
    def num_bytes(self) -> int:
        return self.positions.nbytes + self.before.nbytes


@dataclass(frozen=True)
class KeptPages:
    """A slot's compressed context: exact copies of keys and values in the head pages ``ids`` (int32 ``[N]``, in order
    of layer, head, index) of ``data [P, 2, page_tokens, D]``. ``ids`` and ``counts`` int32 ``[L, H]`` are in host
    memory."""

    data: Tensor
    ids: Tensor
    counts: Tensor
    origin: Origin

    @property
    def num_bytes(self) -> int:
        """Of the kept keys and values, without what is left of the last page of each head."""
        return self.bytes_of(0, len(self.origin.before))

    def bytes_of(self, first: int, end: int) -> int:
        """Those of the context's blocks ``first .. end - 1``."""
        return self.origin.tokens(first, end) * self.data[0, :, 0].nbytes

    def table(self) -> Tensor:
        """See ``page_table``, of all layers."""
        need = pages_per_head(self.counts, self.data.shape[2])
        return page_table(self.ids, self.counts.long(), need, range(len(need)), self.data)

    def layer(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of one layer, token by token: its head and its position, int64 ``[m]``, keys and values ``[m, D]``."""
        size, counts = self.data.shape[2], self.counts.long()
        need, mine = pages_per_head(counts, size), counts[index]
        head = torch.repeat_interleave(torch.arange(len(mine)), mine)
        rank = torch.arange(len(head)) - (mine.cumsum(0) - mine)[head]
        first = int(need[:index].sum()) + need[index].cumsum(0) - need[index]
        page, offset = self.ids.long()[first[head] + rank // size], rank % size
        start = int(counts[:index].sum())
        positions = self.origin.positions[start : start + len(head)].long()
        return head, positions, self.data[page, 0, offset], self.data[page, 1, offset]


def page_table(ids: Tensor, counts: Tensor, need: Tensor, layers: range, pages: Tensor) -> Tensor:
    """Head pages of ``layers`` as kernels see them, int32 ``[4, N]`` on the device: a page's id, its
    ``layer * H + head``, where its tokens begin among all kept ones, and how many there are. ``counts`` int64 and
    ``need`` ``[L, H]`` are of all layers, ``ids`` int32 of these, all in host memory."""
    heads, size, device = need.shape[1], pages.shape[2], pages.device
    mine = slice(layers.start * heads, layers.stop * heads)
    counts = counts.flatten()
    table = torch.stack([counts[mine], need.flatten()[mine], (counts.cumsum(0) - counts)[mine]])
    counts, need, before = to_device(table, device)
    head = torch.repeat_interleave(torch.arange(len(need), device=device), need, output_size=len(ids))
    rank = torch.arange(len(ids), device=device) - (need.cumsum(0) - need)[head]
    done = rank * size  # tokens in the head's pages before
    length = (counts[head] - done).clamp(max=size)
    place = head + mine.start
    return torch.stack([to_device(ids, device), place.int(), (before[head] + done).int(), length.int()])
