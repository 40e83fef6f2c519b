"""The draft arena: a preallocated pool of head pages and what each slot holds of it.

A *head page* is ``page_tokens`` keys and values of one KV head of one layer. A slot (one drafting request) owns

* compressed pages, ragged: as many per (layer, KV head) as the compressor kept there. One pool serves all layers
  and heads, because with a global threshold the heaviest layer holds several times the mean;
* a tail of uncompressed tokens behind the compressed context, grown in strips (one page per layer and head).

One rule addresses the tail: the token at ``position`` has tail index ``position - base``, base being the context
length when the slot was filled. Draft rows append there, verify rows overwrite the same entries with the true
K/V, and a rollback needs no state: entries beyond a row's position are not read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from compressors import Kept, Shape
from vericache.device import to_device
from vericache.draft.attention import attend_pages
from vericache.draft.tables import ArenaTables
from vericache.errors import ArenaFullError


class Source(Protocol):
    """Where a slot's kept tokens come from."""

    def fill(self, pool: Tensor, kept: Kept, need: Tensor, pages: Tensor) -> None:
        """Write the kept tokens to ``pages`` of ``pool [P, 2, page_tokens, D]``. ``kept.counts``, ``need`` (head pages,
        int64 ``[L, H]``) and ``pages`` (int32 ``[need.sum()]``, in order of layer, head, index) are in host memory."""


@dataclass(frozen=True)
class LayerSource:
    """``read``: layer -> keys and values of the context, each ``[H, n, D]``."""

    read: Callable[[int], tuple[Tensor, Tensor]]

    def fill(self, pool: Tensor, kept: Kept, need: Tensor, pages: Tensor) -> None:
        heads, page_tokens, device = need.shape[1], pool.shape[2], pool.device
        totals = kept.counts.sum(1).tolist()
        first_page = to_device(need.flatten().cumsum(0) - need.flatten(), device)
        pages, every = to_device(pages.long(), device), to_device(kept.counts, device)
        for layer, total in enumerate(totals):
            counts, positions = every[layer], kept.layer(layer)
            head = torch.repeat_interleave(torch.arange(heads, device=device), counts, output_size=total)
            before = torch.repeat_interleave(counts.cumsum(0) - counts, counts, output_size=total)
            rank = torch.arange(total, device=device) - before
            page = pages[first_page[layer * heads + head] + rank // page_tokens]
            keys, values = self.read(layer)
            pool[page, 0, rank % page_tokens] = keys[head, positions].to(pool.dtype)
            pool[page, 1, rank % page_tokens] = values[head, positions].to(pool.dtype)


@dataclass
class Slot:
    """Pages of one slot. ``pages`` int32 in order of layer, head, index; ``tail`` int32 ``[strips, L, H]``."""

    counts: Tensor  # int32 [L, H], kept tokens
    pages: Tensor
    tail: Tensor


@dataclass(frozen=True)
class Work:
    """The attention work of one step over all layers, in layer order; ``bounds[l] .. bounds[l + 1]`` is layer l."""

    bounds: list[int]
    pages: Tensor  # int64 [N]
    segments: Tensor  # int64 [N], row * H + head
    lengths: Tensor  # int64 [N]


@dataclass(frozen=True)
class TailTokens:
    """Tokens of a batch whose K/V belongs into tails: ``tokens`` int64 ``[m]`` (index in the batch), ``pages``
    int64 ``[m, L, H]`` and ``offsets`` int64 ``[m]`` within the page."""

    tokens: Tensor
    pages: Tensor
    offsets: Tensor


@dataclass
class PagePool:
    """Head pages ``[P, 2, page_tokens, D]`` and the stack of free ones."""

    data: Tensor
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.free = list(range(self.data.shape[0] - 1, -1, -1))

    def take(self, count: int) -> Tensor:
        """int32 ``[count]``, all or nothing."""
        if count > len(self.free):
            raise ArenaFullError(
                f"the draft arena has {len(self.free)} of {self.data.shape[0]} head pages free, {count} are needed; "
                f"raise arena_fraction, lower ratio, or serve fewer requests at once"
            )
        split = len(self.free) - count
        ids = torch.tensor(self.free[split:], dtype=torch.int32)
        del self.free[split:]
        return ids

    def release(self, ids: Tensor) -> None:
        self.free.extend(ids.flatten().tolist())


class DraftArena:
    """All compressed KV of a worker. Not thread-safe; used by the model runner's thread only.

    Which page belongs to whom is known in host memory. ``tables`` is a copy of it on the device, for kernels that find
    a row's pages themselves (``with_tables``).
    """

    def __init__(
        self, shape: Shape, num_pages: int, page_tokens: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.shape, self.page_tokens = shape, page_tokens
        self.pool = PagePool(torch.zeros(num_pages, 2, page_tokens, shape.head_dim, dtype=dtype, device=device))
        self.slots: dict[int, Slot] = {}
        self.tables: ArenaTables | None = None

    def with_tables(self, slots: int, max_tokens: int) -> ArenaTables:
        """Keep device tables for ``slots`` slots of up to ``max_tokens`` tokens; before any slot is filled."""
        assert not self.slots
        self.tables = ArenaTables.empty(self.pool.data, slots, self.shape, max_tokens)
        return self.tables

    # -- contents ------------------------------------------------------------------------------------

    def put(self, slot: int, kept: Kept, source: Source) -> int:
        """Fill a slot (freeing what it held) with the kept tokens. Returns the head pages used.

        Raises:
            ArenaFullError: the slot is empty afterwards, nothing else has changed.
        """
        self.drop(slot)
        kept = Kept(kept.counts.cpu(), kept.positions)  # waits for the scores
        need = pages_per_head(kept.counts, self.page_tokens)
        pages = self.pool.take(int(need.sum()))
        try:
            source.fill(self.pool.data, kept, need, pages)
        except BaseException:
            self.pool.release(pages)
            raise
        no_tail = torch.empty(0, self.shape.layers, self.shape.kv_heads, dtype=torch.int32)
        self.slots[slot] = Slot(kept.counts.int(), pages, no_tail)
        if self.tables is not None:
            self.tables.fill(slot, kept.counts, need, pages)
        return len(pages)

    def drop(self, slot: int) -> None:
        """Free everything a slot holds; an empty slot is left alone."""
        held = self.slots.pop(slot, None)
        if held is not None:
            self.pool.release(held.pages)
            self.pool.release(held.tail)

    def grow_tail(self, slot: int, tokens: int) -> None:
        """Make room for ``tokens`` tail tokens in all."""
        held = self.slots[slot]
        missing = -(-tokens // self.page_tokens) - len(held.tail)
        if missing > 0:
            strips = self.pool.take(missing * self.shape.layers * self.shape.kv_heads)
            strips = strips.view(missing, self.shape.layers, self.shape.kv_heads)
            if self.tables is not None:
                kept_pages = pages_per_head(held.counts, self.page_tokens)
                self.tables.append(slot, kept_pages + len(held.tail), strips)
            held.tail = torch.cat([held.tail, strips])

    @property
    def bytes_held(self) -> int:
        """Bytes of all pages that slots own, with their tables and counts."""
        page = self.pool.data[0].nbytes if len(self.pool.data) else 0
        return sum(
            (s.pages.numel() + s.tail.numel()) * page + s.pages.nbytes + s.tail.nbytes + s.counts.nbytes
            for s in self.slots.values()
        )

    # -- one step ------------------------------------------------------------------------------------

    def tail_tokens(self, tokens: Sequence[int], slots: Sequence[int], indices: Sequence[int]) -> TailTokens:
        """Where the K/V of batch tokens goes: token ``tokens[i]`` is tail token ``indices[i]`` of ``slots[i]``."""
        index = torch.tensor(indices, dtype=torch.int64)
        strips = (index // self.page_tokens).tolist()
        rows = [self.slots[s].tail[strip] for s, strip in zip(slots, strips, strict=True)]
        empty = torch.empty(0, self.shape.layers, self.shape.kv_heads, dtype=torch.int64)
        pages = torch.stack(rows).long() if rows else empty
        return TailTokens(torch.tensor(tokens, dtype=torch.int64), pages, index % self.page_tokens)

    def write_tail(self, layer: int, where: TailTokens, key: Tensor, value: Tensor) -> None:
        """Scatter ``key``/``value`` ``[T, H, D]`` of one layer into the tails."""
        pages, offsets = where.pages[:, layer], where.offsets[:, None]
        self.pool.data[pages, 0, offsets] = key[where.tokens].to(self.pool.data.dtype)
        self.pool.data[pages, 1, offsets] = value[where.tokens].to(self.pool.data.dtype)

    def work(self, slots: Sequence[int], tail_lengths: Sequence[int]) -> Work:
        """The work list of one step: draft row i reads ``slots[i]`` and its first ``tail_lengths[i]`` tail tokens."""
        layers, pages, segments, lengths = [], [], [], []
        for row, (slot, tail) in enumerate(zip(slots, tail_lengths, strict=True)):
            for part in (self._kept_work(self.slots[slot]), self._tail_work(self.slots[slot], tail)):
                layer, page, head, length = part
                layers.append(layer)
                pages.append(page)
                segments.append(row * self.shape.kv_heads + head)
                lengths.append(length)
        layer = torch.cat(layers)
        order = torch.sort(layer, stable=True).indices
        bounds = torch.bincount(layer, minlength=self.shape.layers).cumsum(0).tolist()
        return Work([0, *bounds], *(torch.cat(x)[order] for x in (pages, segments, lengths)))

    def _kept_work(self, held: Slot) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        counts = held.counts.flatten().long()
        need = pages_per_head(counts, self.page_tokens)
        where = torch.repeat_interleave(torch.arange(len(need)), need)  # layer * H + head of each page
        rank = torch.arange(len(where)) - (need.cumsum(0) - need)[where]
        lengths = (counts[where] - rank * self.page_tokens).clamp(max=self.page_tokens)
        return where // self.shape.kv_heads, held.pages.long(), where % self.shape.kv_heads, lengths

    def _tail_work(self, held: Slot, tail: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        strips = -(-tail // self.page_tokens)
        grid = held.tail[:strips].long()
        index = torch.arange(grid.numel())
        per_strip = self.shape.layers * self.shape.kv_heads
        lengths = (tail - index // per_strip * self.page_tokens).clamp(max=self.page_tokens)
        layer = index % per_strip // self.shape.kv_heads
        return layer, grid.flatten(), index % self.shape.kv_heads, lengths

    def attend(self, layer: int, work: Work, query: Tensor, scale: float) -> Tensor:
        """Draft attention of one layer: ``query [R, Hq, D]`` in row order -> float32 ``[R, Hq, D]``."""
        rows = query.shape[0]
        lo, hi = work.bounds[layer], work.bounds[layer + 1]
        q = query.reshape(rows * self.shape.kv_heads, self.shape.group, -1).float() * scale
        out = attend_pages(q, self.pool.data, work.pages[lo:hi], work.segments[lo:hi], work.lengths[lo:hi])
        return out.view(rows, self.shape.query_heads, -1)


def pages_per_head(counts: Tensor, page_tokens: int) -> Tensor:
    """Head pages that ``counts`` kept tokens take, per head."""
    return (counts + page_tokens - 1) // page_tokens


def page_bound(kept_per_head: int, tail_tokens: int, heads: int, page_tokens: int) -> int:
    """The most head pages a slot can hold: ``heads * kept_per_head`` kept token-heads however they are spread over
    the ``heads = L * H``, and a tail of ``tail_tokens``. Known before any score is, so that a slot can be reserved
    all-or-nothing."""
    kept = (heads * kept_per_head + heads * (page_tokens - 1)) // page_tokens
    return kept + heads * -(-tail_tokens // page_tokens)
