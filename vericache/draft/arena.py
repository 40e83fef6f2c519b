"""The draft arena: a preallocated pool of head pages and what each slot holds of it.

A *head page* is ``page_tokens`` keys and values of one KV head of one layer, in the arena's ``PageFormat``. A slot (one
drafting request) owns

* compressed pages, ragged: as many per (layer, KV head) as the compressor kept there. One pool serves all layers
  and heads, because with a global threshold the heaviest layer holds several times the mean;
* a tail of uncompressed tokens behind the compressed context, grown in strips (one page per layer and head);
* where the format is packed, full pages of tokens that were *folded*: verified, they left the front of the tail.
  Where it is simulated they stay in the tail, rounded.

One rule addresses the tail: the token at ``position`` has tail index ``position - base``, base being the number of
tokens that are compressed or folded. Draft rows append there, verify rows overwrite the same entries with the true
K/V, and a rollback needs no state: entries beyond a row's position are not read. Only verified tokens are folded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compressors import Kept, Shape
from vericache.device import to_device
from vericache.draft.attention import attend_pages, merge
from vericache.draft.formats import PageFormat, Simulated, pages_per_head
from vericache.draft.kept import KeptPages, Origin
from vericache.draft.pool import PagePool
from vericache.draft.rounding import Rounding
from vericache.draft.source import Source
from vericache.draft.tables import ArenaTables


@dataclass
class Slot:
    """Pages of one slot. ``pages`` int32 in order of layer, head, index; ``folded`` and ``tail`` int32
    ``[strips, L, H]``, every folded page full."""

    counts: Tensor  # int32 [L, H], kept tokens
    pages: Tensor
    folded: Tensor
    tail: Tensor
    rounding: Rounding | None = None  # where pages are simulated
    origin: Origin | None = None  # where kept tokens came from, if that was to be remembered


@dataclass(frozen=True)
class WorkList:
    """Pages to attend over in all layers, in layer order; ``bounds[l] .. bounds[l + 1]`` is layer l."""

    bounds: list[int]
    pages: Tensor  # int64 [N]
    segments: Tensor  # int64 [N], row * H + head
    lengths: Tensor  # int64 [N]

    def layer(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        mine = slice(self.bounds[index], self.bounds[index + 1])
        return self.pages[mine], self.segments[mine], self.lengths[mine]


@dataclass(frozen=True)
class Work:
    """The attention work of one step: pages in the arena's format, and pages of tails."""

    compressed: WorkList
    tail: WorkList


Pages = tuple[Tensor, Tensor, Tensor, Tensor]  # layer, page, head and valid tokens of each page


@dataclass(frozen=True)
class TailTokens:
    """Tokens of a batch whose K/V belongs into tails: ``tokens`` int64 ``[m]`` (index in the batch), ``pages``
    int64 ``[m, L, H]`` and ``offsets`` int64 ``[m]`` within the page."""

    tokens: Tensor
    pages: Tensor
    offsets: Tensor


class DraftArena:
    """All compressed KV of a worker. Not thread-safe; used by the model runner's thread only.

    Which page belongs to whom is known in host memory. ``tables`` is a copy of it on the device, for kernels that find
    a row's pages themselves (``with_tables``).
    """

    def __init__(
        self, shape: Shape, num_pages: int, page_format: PageFormat, device: torch.device | str = "cpu"
    ) -> None:
        if isinstance(page_format, Simulated):
            page_format.require(shape)
        self.shape, self.format = shape, page_format
        self.page_tokens, self.tail_page_tokens = page_format.page_tokens, page_format.tail_page_tokens
        self.pool = PagePool.of(num_pages, page_format, device)
        self.slots: dict[int, Slot] = {}
        self.tables: ArenaTables | None = None

    def with_tables(self, slots: int, max_tokens: int) -> ArenaTables:
        """Keep device tables for ``slots`` slots of up to ``max_tokens`` tokens; before any slot is filled."""
        assert not self.slots
        assert self.format.kernel, "refused before an engine starts (engine.support.check_kernels)"
        self.tables = ArenaTables.empty(self.format, self.pool, slots, self.shape, max_tokens)
        return self.tables

    # -- contents ------------------------------------------------------------------------------------

    def put(self, slot: int, kept: Kept, source: Source, context: int = 0, block_tokens: int | None = None) -> int:
        """Fill a slot (freeing what it held) with what is kept of ``context`` tokens (only simulated pages and
        ``block_tokens`` need this number). Returns the head pages used.

        ``block_tokens``: remember which tokens those are, for reloads of a context in blocks of that many tokens.

        Raises:
            ArenaFullError: the slot is empty afterwards, nothing else has changed.
            CompressionError: tokens cannot be packed; the same.
        """
        self.drop(slot)
        kept = replace(kept, counts=kept.counts.cpu())  # waits for the scores
        assert block_tokens is None or self.holds_exact_tokens, "refused at the door (vericache.config)"
        need = pages_per_head(kept.counts, self.page_tokens)
        pages = self.pool.take(int(need.sum()))
        rounding = None
        if isinstance(self.format, Simulated):
            assert context, "positions behind the context depend on its length"
            rounding = Rounding(self.format, self.shape, context, self.format.packed_bytes(kept))
        try:
            self._fill(kept, need, pages, source, rounding)
        except BaseException:
            self.pool.release(pages)
            raise
        none = torch.empty(0, self.shape.layers, self.shape.kv_heads, dtype=torch.int32)
        origin = None if block_tokens is None else Origin.of(kept.positions, context, block_tokens)
        self.slots[slot] = Slot(kept.counts.int(), pages, none, none, rounding, origin)
        if self.tables is not None:
            self.tables.fill(slot, kept.counts, need, pages)
        return len(pages)

    def _fill(self, kept: Kept, need: Tensor, pages: Tensor, source: Source, rounding: Rounding | None) -> None:
        layers, device = self.shape.layers, self.pool.bytes.device
        if not self.format.packed and rounding is None:
            source.fill(self.pool.data, pages, kept, need, range(layers))
            return
        ends = need.sum(1).cumsum(0).tolist()
        for layer, (lo, hi) in enumerate(zip([0, *ends], ends, strict=False)):
            size = (hi - lo, 2, self.page_tokens, self.shape.head_dim)
            exact = torch.zeros(size, dtype=self.format.dtype, device=device)
            source.fill(exact, torch.arange(hi - lo, dtype=torch.int32), kept, need, range(layer, layer + 1))
            heads, lengths = self._lengths(kept.counts[layer])
            where, lengths = to_device(pages[lo:hi].long(), device), to_device(lengths, device)
            if rounding is None:
                self.pool.bytes[where] = self.format.encode(exact[:, 0], exact[:, 1], lengths)
            else:
                self.pool.data[where] = rounding.compress(exact, to_device(heads, device), lengths, kept)

    def drop(self, slot: int) -> None:
        """Free everything a slot holds; an empty slot is left alone."""
        held = self.slots.pop(slot, None)
        if held is not None:
            for pages in (held.pages, held.folded, held.tail):
                self.pool.release(pages)

    def grow_tail(self, slot: int, tokens: int) -> None:
        """Make room for ``tokens`` tail tokens in all."""
        held = self.slots[slot]
        missing = -(-tokens // self.tail_page_tokens) - len(held.tail)
        if missing > 0:
            strips = self._take_strips(missing)
            if self.tables is not None:
                before = pages_per_head(held.counts, self.page_tokens) + len(held.folded) + len(held.tail)
                self.tables.append(slot, before, strips)
            held.tail = torch.cat([held.tail, strips])

    def fold(self, slot: int, strips: int) -> None:
        """Pack the first ``strips * page_tokens`` tail tokens. The caller's base grows by as many. Numbers that are not
        finite become 0: a fold cannot be refused, and only drafts read it.

        Where pages are simulated, the next ``strips`` of the tail are rounded, and the caller's base stays.
        """
        held, per_strip = self.slots[slot], self.page_tokens // self.tail_page_tokens
        if held.rounding is not None:
            held.rounding.fold(self.pool.data, held.tail, strips)
            return
        leaving, held.tail = held.tail[: strips * per_strip], held.tail[strips * per_strip :]
        device = self.pool.data.device
        exact = self.pool.data[to_device(leaving.long(), device)]  # [strips * per_strip, L, H, 2, TT, D]
        exact = exact.unflatten(0, (strips, per_strip)).permute(0, 2, 3, 4, 1, 5, 6)
        exact = exact.reshape(-1, 2, self.page_tokens, self.shape.head_dim).nan_to_num(0.0, 0.0, 0.0)
        self.pool.release(leaving)
        new = self._take_strips(strips)
        full = torch.full((len(exact),), self.page_tokens, device=device)
        self.pool.bytes[to_device(new.flatten().long(), device)] = self.format.encode(exact[:, 0], exact[:, 1], full)
        held.folded = torch.cat([held.folded, new])
        if self.tables is not None:
            self.tables.fold(slot, pages_per_head(held.counts, self.page_tokens), held.folded, held.tail)

    def _take_strips(self, count: int) -> Tensor:
        strips = self.pool.take(count * self.shape.layers * self.shape.kv_heads)
        return strips.view(count, self.shape.layers, self.shape.kv_heads)

    @property
    def holds_exact_tokens(self) -> bool:
        """Pages of compressed contexts hold keys and values bit by bit as vLLM's blocks do."""
        return not self.format.packed and not self.format.simulated

    def kept(self, slot: int) -> KeptPages | None:
        """What a slot holds of its context; None where it is not remembered which tokens those are."""
        held = self.slots.get(slot)
        if held is None or held.origin is None:
            return None
        return KeptPages(self.pool.data, held.pages, held.counts, held.origin)

    @property
    def bytes_held(self) -> int:
        """Bytes of all pages that slots own, with their tables, their counts, what packing fixed, and origins."""
        page, held = self.format.page_bytes, 0
        frozen = self.format.frozen_bytes(self.shape.layers, self.shape.kv_heads)
        for s in self.slots.values():
            tables = (s.pages, s.folded, s.tail)
            held += sum(t.numel() * page + t.nbytes for t in tables) + s.counts.nbytes + frozen
            held += 0 if s.origin is None else s.origin.num_bytes
        return held

    # -- one step ------------------------------------------------------------------------------------

    def tail_tokens(self, tokens: Sequence[int], slots: Sequence[int], indices: Sequence[int]) -> TailTokens:
        """Where the K/V of batch tokens goes: token ``tokens[i]`` is tail token ``indices[i]`` of ``slots[i]``."""
        index = torch.tensor(indices, dtype=torch.int64)
        strips = (index // self.tail_page_tokens).tolist()
        rows = [self.slots[s].tail[strip] for s, strip in zip(slots, strips, strict=True)]
        empty = torch.empty(0, self.shape.layers, self.shape.kv_heads, dtype=torch.int64)
        pages = torch.stack(rows).long() if rows else empty
        return TailTokens(torch.tensor(tokens, dtype=torch.int64), pages, index % self.tail_page_tokens)

    def write_tail(self, layer: int, where: TailTokens, key: Tensor, value: Tensor) -> None:
        """Scatter ``key``/``value`` ``[T, H, D]`` of one layer into the tails."""
        pages, offsets = where.pages[:, layer], where.offsets[:, None]
        self.pool.data[pages, 0, offsets] = key[where.tokens].to(self.pool.data.dtype)
        self.pool.data[pages, 1, offsets] = value[where.tokens].to(self.pool.data.dtype)

    def work(self, slots: Sequence[int], tail_lengths: Sequence[int]) -> Work:
        """The work list of one step: draft row i reads ``slots[i]`` and its first ``tail_lengths[i]`` tail tokens."""
        rows = [self.slots[slot] for slot in slots]
        tails = [self._strips(s.tail, self.tail_page_tokens, n) for s, n in zip(rows, tail_lengths, strict=True)]
        folded = [self._strips(s.folded, self.page_tokens, len(s.folded) * self.page_tokens) for s in rows]
        return Work(
            self._list([(self._kept(s), more) for s, more in zip(rows, folded, strict=True)]),
            self._list([(each,) for each in tails]),
        )

    def _list(self, rows: Sequence[Sequence[Pages]]) -> WorkList:
        """One row's pages after the other's, sorted by layer."""
        parts = [(layer, page, row * self.shape.kv_heads + head, length)
                 for row, pieces in enumerate(rows) for layer, page, head, length in pieces]  # fmt: skip
        layer, *columns = (torch.cat(column) for column in zip(*parts, strict=True))
        order = torch.sort(layer, stable=True).indices
        bounds = torch.bincount(layer, minlength=self.shape.layers).cumsum(0).tolist()
        return WorkList([0, *bounds], *(c[order] for c in columns))

    def _kept(self, held: Slot) -> Pages:
        counts = held.counts.flatten().long()
        where, lengths = self._lengths(counts)
        return where // self.shape.kv_heads, held.pages.long(), where % self.shape.kv_heads, lengths

    def _lengths(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Head and valid tokens of every page of heads that keep ``counts`` int64 ``[N]`` tokens."""
        need = pages_per_head(counts, self.page_tokens)
        where = torch.repeat_interleave(torch.arange(len(need)), need)
        rank = torch.arange(len(where)) - (need.cumsum(0) - need)[where]
        return where, (counts[where] - rank * self.page_tokens).clamp(max=self.page_tokens)

    def _strips(self, strips: Tensor, size: int, tokens: int) -> Pages:
        """Pages of the first ``tokens`` tokens in ``strips`` of ``size`` tokens."""
        grid = strips[: -(-tokens // size)].long()
        index = torch.arange(grid.numel())
        per_strip = self.shape.layers * self.shape.kv_heads
        lengths = (tokens - index // per_strip * size).clamp(max=size)
        return index % per_strip // self.shape.kv_heads, grid.flatten(), index % self.shape.kv_heads, lengths

    def tokens(self, slot: int, layer: int, tail: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a slot of plain pages holds of one layer: keys and values ``[H, m, D]`` of kept tokens, m the most that
        a head keeps (beyond a head's count its last one, again), then keys and values ``[H, tail, D]``."""
        assert not self.format.packed, "packed pages hold no exact tokens"
        held, size = self.slots[slot], self.page_tokens
        need = pages_per_head(held.counts, size)
        counts, mine = held.counts[layer].long(), need[layer].long()
        first = int(need[:layer].sum()) + mine.cumsum(0) - mine
        rank = torch.minimum(torch.arange(int(counts.max())), counts[:, None] - 1)
        pages, offsets = held.pages.long()[first[:, None] + rank // size], rank % size
        strips = held.tail[: -(-tail // self.tail_page_tokens), layer].long()
        behind = self.pool.data[strips.T].transpose(1, 2).flatten(2, 3)[:, :, :tail]  # [H, 2, tail, D]
        return self.pool.data[pages, 0, offsets], self.pool.data[pages, 1, offsets], behind[:, 0], behind[:, 1]

    def attend(self, layer: int, work: Work, query: Tensor, scale: float) -> Tensor:
        """Draft attention of one layer: ``query [R, Hq, D]`` in row order -> float32 ``[R, Hq, D]``."""
        rows, form = query.shape[0], self.format
        q = query.reshape(rows * self.shape.kv_heads, self.shape.group, -1).float() * scale
        pages, *items = work.compressed.layer(layer)
        compressed = attend_pages(form.turn(q), *form.decode(self.pool.bytes[pages]), *items)
        pages, *items = work.tail.layer(layer)
        tail = attend_pages(q, *self.pool.data[pages].float().unbind(1), *items)
        compressed = replace(compressed, mixed=form.back(compressed.mixed))
        return merge(compressed, tail).view(rows, self.shape.query_heads, -1)


def page_bound(kept_per_head: int, heads: int, page_tokens: int) -> int:
    """The most head pages that ``heads * kept_per_head`` kept token-heads can take, however they are spread over the
    ``heads = L * H``. Known before any score is, so that a slot can be reserved all-or-nothing."""
    return (heads * kept_per_head + heads * (page_tokens - 1)) // page_tokens


def kept_bound(pages: int, heads: int, page_tokens: int) -> int:
    """The most kept tokens per head that always fit into ``pages``: the inverse of ``page_bound``."""
    return (page_tokens * (pages + 1) - 1 - heads * (page_tokens - 1)) // heads
