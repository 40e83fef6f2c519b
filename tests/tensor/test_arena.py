"""The draft arena: who owns which page, and attention over what it holds, against a dense softmax."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressors import Kept, Shape
from vericache.draft.arena import DraftArena, PagePool, ReadLayer, page_bound, pages_per_head
from vericache.draft.attention import attend_pages
from vericache.errors import ArenaFullError

SHAPE = Shape(layers=3, kv_heads=2, query_heads=4, head_dim=8)
PT = 4  # tokens of a page
TAILS = [0, 1, PT - 1, PT, PT + 1, 3 * PT]
quick = settings(max_examples=80, deadline=None, derandomize=True)


# -- a context, what is kept of it, and the dense answer ---------------------------------------------------


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_kept(shape: Shape, n: int, seed: int, most: int | None = None) -> Kept:
    """Every head keeps its own random number of random positions, 1 .. ``most``."""
    rng = generator(seed)
    counts = torch.randint(1, (most or n) + 1, (shape.layers, shape.kv_heads), generator=rng)
    rows = [torch.randperm(n, generator=rng)[:count].sort().values for count in counts.flatten().tolist()]
    return Kept(counts, torch.cat(rows))


@dataclass
class Tokens:
    """Keys and values ``[L, H, T, D]`` of a context and of the tokens behind it."""

    keys: Tensor
    values: Tensor

    @classmethod
    def random(cls, shape: Shape, tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> "Tokens":
        size = (shape.layers, shape.kv_heads, tokens, shape.head_dim)
        rng = generator(seed)
        return cls(torch.randn(size, generator=rng).to(dtype), torch.randn(size, generator=rng).to(dtype))

    def read(self, n: int) -> ReadLayer:
        """The first ``n`` tokens, as ``put`` reads them."""
        return lambda layer: (self.keys[layer, :, :n], self.values[layer, :, :n])


def append(arena: DraftArena, slot: int, source: Tokens, base: int, indices: Sequence[int]) -> None:
    """Write tokens ``base + i`` of ``source`` to tail entries ``i`` of a slot, as one batch."""
    arena.grow_tail(slot, max(indices) + 1)
    where = arena.tail_tokens(range(len(indices)), [slot] * len(indices), list(indices))
    rows = [base + i for i in indices]
    for layer in range(arena.shape.layers):
        key, value = (x[layer][:, rows].transpose(0, 1) for x in (source.keys, source.values))
        arena.write_tail(layer, where, key, value)


def dense(shape: Shape, source: Tokens, kept: Kept, n: int, tail: int, query: Tensor, layer: int) -> Tensor:
    """Softmax attention of ``query [Hq, D]`` over the kept positions and ``tail`` tokens behind the context."""
    out = torch.empty(shape.query_heads, shape.head_dim, dtype=torch.float64)
    pieces = torch.split(kept.layer(layer), kept.counts[layer].tolist())
    for a in range(shape.query_heads):
        head = a // shape.group
        positions = torch.cat([pieces[head], torch.arange(n, n + tail)])
        logits = source.keys[layer, head, positions].double() @ query[a].double() * shape.head_dim**-0.5
        out[a] = logits.softmax(0) @ source.values[layer, head, positions].double()
    return out


def attend_all(arena: DraftArena, slots: Sequence[int], tails: Sequence[int], query: Tensor) -> Tensor:
    """Draft attention of every layer: ``query [L, R, Hq, D]`` -> ``[L, R, Hq, D]``."""
    work = arena.work(slots, tails)
    scale = arena.shape.head_dim**-0.5
    return torch.stack([arena.attend(layer, work, query[layer], scale) for layer in range(arena.shape.layers)])


# -- page ownership ----------------------------------------------------------------------------------------


@dataclass
class Held:
    """What the model knows of a slot."""

    counts: Tensor
    strips: int
    source: Tokens
    kept: Kept


def snapshot(arena: DraftArena) -> tuple[list[int], dict[int, list[Tensor]], Tensor]:
    tables = {s: [t.clone() for t in (held.counts, held.pages, held.tail)] for s, held in arena.slots.items()}
    return list(arena.pool.free), tables, arena.pool.data.clone()


def same(before: tuple[list[int], dict[int, list[Tensor]], Tensor], arena: DraftArena) -> bool:
    free, tables, data = snapshot(arena)
    return (
        sorted(before[0]) == sorted(free)
        and before[1].keys() == tables.keys()
        and all(torch.equal(a, b) for s in tables for a, b in zip(before[1][s], tables[s], strict=True))
        and all(torch.equal(before[2][p], data[p]) for t in tables.values() for p in owned_pages(t[1:]))
    )


def owned_pages(tensors: Sequence[Tensor]) -> list[int]:
    return [page for tensor in tensors for page in tensor.flatten().tolist()]


def check_ownership(arena: DraftArena, model: dict[int, Held]) -> None:
    """Every page is owned once or free once, tables have the announced sizes, and the bytes are those held."""
    heads = arena.shape.layers * arena.shape.kv_heads
    assert arena.slots.keys() == model.keys()
    everything, held_bytes = list(arena.pool.free), 0
    page_bytes = arena.pool.data.element_size() * 2 * arena.page_tokens * arena.shape.head_dim
    for slot, known in model.items():
        held = arena.slots[slot]
        assert torch.equal(held.counts.long(), known.counts)
        assert len(held.pages) == sum(math.ceil(c / arena.page_tokens) for c in known.counts.flatten().tolist())
        assert held.tail.shape == (known.strips, arena.shape.layers, arena.shape.kv_heads)
        kept_per_head = math.ceil(int(known.counts.sum()) / heads)
        owned = owned_pages([held.pages, held.tail])
        assert len(owned) <= page_bound(kept_per_head, known.strips * arena.page_tokens, heads, arena.page_tokens)
        everything += owned
        held_bytes += len(owned) * page_bytes + sum(t.nbytes for t in (held.counts, held.pages, held.tail))
    assert sorted(everything) == list(range(len(arena.pool.data)))
    assert arena.bytes_held == held_bytes


operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 3), st.integers(0, 10**6)),
        st.tuples(st.just("drop"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("grow"), st.integers(0, 3), st.integers(0, 4 * PT)),
    ),
    max_size=25,
)


@quick
@given(ops=operations, pages=st.integers(0, 90))
def test_pages_have_one_owner_through_any_sequence(ops: list[tuple[str, int, int]], pages: int) -> None:
    """Failed operations change nothing but the slot that ``put`` empties first; contents of others stay."""
    n = 13
    arena = DraftArena(SHAPE, pages, PT, torch.float32)
    model: dict[int, Held] = {}
    for op, slot, value in ops:
        if op == "put":
            kept, source = random_kept(SHAPE, n, value), Tokens.random(SHAPE, n, value)
            arena.drop(slot)
            model.pop(slot, None)
            before, need = snapshot(arena), int(pages_per_head(kept.counts, PT).sum())
            if need > len(arena.pool.free):
                with pytest.raises(ArenaFullError, match=f"{len(arena.pool.free)} of {pages} head pages free, {need}"):
                    arena.put(slot, kept, source.read(n))
                assert same(before, arena)
            else:
                assert arena.put(slot, kept, source.read(n)) == need
                model[slot] = Held(kept.counts, 0, source, kept)
        elif op == "drop":
            arena.drop(slot)
            model.pop(slot, None)
        elif slot in model:
            strips = max(math.ceil(value / PT), model[slot].strips)
            before, need = snapshot(arena), (strips - model[slot].strips) * SHAPE.layers * SHAPE.kv_heads
            if need > len(arena.pool.free):
                with pytest.raises(ArenaFullError):
                    arena.grow_tail(slot, value)
                assert same(before, arena)
            else:
                arena.grow_tail(slot, value)
                model[slot].strips = strips
        check_ownership(arena, model)
    query = torch.randn(SHAPE.layers, len(model), SHAPE.query_heads, SHAPE.head_dim, generator=generator(1))
    if model:
        got = attend_all(arena, list(model), [0] * len(model), query)
        for row, held in enumerate(model.values()):
            for layer in range(SHAPE.layers):
                wanted = dense(SHAPE, held.source, held.kept, n, 0, query[layer, row], layer)
                torch.testing.assert_close(got[layer, row].double(), wanted, rtol=1e-4, atol=1e-5)
    for slot in list(model):
        arena.drop(slot)
    assert sorted(arena.pool.free) == list(range(pages))
    assert arena.bytes_held == 0


def test_put_over_a_full_slot_frees_it_even_when_it_fails() -> None:
    """A slot that cannot be filled anew must not keep answering with its former owner's tokens."""
    arena = DraftArena(SHAPE, 30, PT, torch.float32)
    source = Tokens.random(SHAPE, 40, 0)
    arena.put(1, random_kept(SHAPE, 40, 0, most=4), source.read(40))
    arena.put(2, random_kept(SHAPE, 40, 1, most=4), source.read(40))
    other = arena.slots[2]
    with pytest.raises(ArenaFullError, match="raise arena_fraction"):
        arena.put(1, Kept(torch.full((3, 2), 40), torch.arange(40).repeat(6)), source.read(40))
    assert list(arena.slots) == [2]
    assert arena.slots[2] is other
    assert len(arena.pool.free) == 30 - len(other.pages)


@pytest.mark.parametrize("failing_layer", [0, 2])
def test_a_reader_that_raises_leaves_the_slot_empty_and_all_pages_free(failing_layer: int) -> None:
    arena = DraftArena(SHAPE, 40, PT, torch.float32)
    source = Tokens.random(SHAPE, 10, 0)

    def read(layer: int) -> tuple[Tensor, Tensor]:
        if layer == failing_layer:
            raise RuntimeError("page read failed")
        return source.read(10)(layer)

    with pytest.raises(RuntimeError, match="page read failed"):
        arena.put(0, random_kept(SHAPE, 10, 0), read)
    assert not arena.slots
    assert sorted(arena.pool.free) == list(range(40))


def test_dropping_an_empty_slot_does_nothing() -> None:
    arena = DraftArena(SHAPE, 5, PT, torch.float32)
    arena.drop(7)
    assert len(arena.pool.free) == 5


@quick
@given(data=st.data())
def test_the_pool_gives_all_or_nothing(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 12))
    pool = PagePool(torch.full((size, 2, PT, 3), math.nan))
    held: list[Tensor] = []
    for take in data.draw(st.lists(st.integers(-1, 6), max_size=20)):
        free = list(pool.free)
        if take < 0:
            if held:
                pool.release(held.pop(0))
        elif take > len(free):
            with pytest.raises(ArenaFullError):
                pool.take(take)
            assert pool.free == free
        else:
            ids = pool.take(take)
            assert ids.dtype == torch.int32
            assert len(ids) == take
            held.append(ids)
        assert sorted(pool.free + owned_pages(held)) == list(range(size))


@quick
@given(data=st.data())
def test_page_bound_is_an_upper_bound(data: st.DataObject) -> None:
    heads, page_tokens = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 9))
    counts = data.draw(st.lists(st.integers(0, 60), min_size=heads, max_size=heads))
    tail = data.draw(st.integers(0, 60))
    kept = math.ceil(sum(counts) / heads)
    used = int(pages_per_head(torch.tensor(counts), page_tokens).sum()) + heads * math.ceil(tail / page_tokens)
    assert used <= page_bound(kept, tail, heads, page_tokens)


@pytest.mark.parametrize(("heads", "page_tokens", "kept"), [(1, 4, 5), (3, 4, 2), (3, 4, 5), (4, 3, 3), (2, 1, 6)])
def test_page_bound_is_reached(heads: int, page_tokens: int, kept: int) -> None:
    """No smaller reservation would do: some spread of the tokens over the heads needs every page."""

    def spreads(total: int, parts: int) -> list[list[int]]:
        if parts == 1:
            return [[total]]
        return [[first, *rest] for first in range(total + 1) for rest in spreads(total - first, parts - 1)]

    most = max(sum(math.ceil(c / page_tokens) for c in spread) for spread in spreads(heads * kept, heads))
    assert page_bound(kept, 0, heads, page_tokens) == most


# -- attention -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_tokens", [1, PT, 32])
def test_attention_over_ragged_slots_and_tails(dtype: torch.dtype, page_tokens: int) -> None:
    """Several rows, each with its own counts per (layer, head) and its own tail length. Inputs may be bfloat16;
    logits and softmax are float32, so the dense answer on the same inputs is met as closely."""
    n, tails = 21, [0, 1, page_tokens - 1, page_tokens, page_tokens + 1, 2 * page_tokens + 3]
    arena = DraftArena(SHAPE, 2000, page_tokens, dtype)
    sources = [Tokens.random(SHAPE, n + max(tails), 50 + i, dtype) for i in range(len(tails))]
    kepts = [random_kept(SHAPE, n, 70 + i) for i in range(len(tails))]
    for slot, (source, kept, tail) in enumerate(zip(sources, kepts, tails, strict=True)):
        arena.put(slot, kept, source.read(n))
        if tail:
            append(arena, slot, source, n, range(tail))
    query = torch.randn(SHAPE.layers, len(tails), SHAPE.query_heads, SHAPE.head_dim, generator=generator(3)).to(dtype)
    order = [3, 0, 5, 1, 4, 2]  # rows need not come in the order of their slots
    got = attend_all(arena, order, [tails[s] for s in order], query)
    assert got.dtype == torch.float32
    for layer in range(SHAPE.layers):
        for row, slot in enumerate(order):
            wanted = dense(SHAPE, sources[slot], kepts[slot], n, tails[slot], query[layer, row], layer)
            torch.testing.assert_close(got[layer, row].double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (1, 4), (3, 1), (2, 3)])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_attention_shapes(kv_heads: int, group: int, head_dim: int) -> None:
    shape = Shape(2, kv_heads, kv_heads * group, head_dim)
    arena = DraftArena(shape, 200, PT, torch.float32)
    source, kept = Tokens.random(shape, 16, 1), random_kept(shape, 10, 2)
    arena.put(0, kept, source.read(10))
    append(arena, 0, source, 10, range(6))
    query = torch.randn(2, 1, shape.query_heads, head_dim, generator=generator(4))
    got = attend_all(arena, [0], [6], query)
    for layer in range(2):
        wanted = dense(shape, source, kept, 10, 6, query[layer, 0], layer)
        torch.testing.assert_close(got[layer, 0].double(), wanted, rtol=1e-4, atol=1e-5)


def test_large_logits_do_not_overflow() -> None:
    """Pages are merged by their maxima: a page far below the peak of its head adds nothing, not NaN."""
    arena = DraftArena(SHAPE, 100, PT, torch.float32)
    source, kept = Tokens.random(SHAPE, 12, 5), random_kept(SHAPE, 12, 6)
    source.keys *= 500
    arena.put(0, kept, source.read(12))
    query = torch.randn(SHAPE.layers, 1, SHAPE.query_heads, SHAPE.head_dim, generator=generator(7))
    got = attend_all(arena, [0], [0], query)
    for layer in range(SHAPE.layers):
        wanted = dense(SHAPE, source, kept, 12, 0, query[layer, 0], layer)
        torch.testing.assert_close(got[layer, 0].double(), wanted, rtol=1e-3, atol=1e-3)


@quick
@given(data=st.data())
def test_attend_pages_is_one_softmax_per_segment(data: st.DataObject) -> None:
    """Work items in any order and of any length, empty ones included, as long as a segment has one key."""
    segments, pages = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    rng = generator(data.draw(st.integers(0, 999)))
    pool, query = torch.randn(pages, 2, PT, 8, generator=rng), torch.randn(segments, 3, 8, generator=rng)
    items = [(data.draw(st.integers(0, pages - 1)), s, data.draw(st.integers(1, PT))) for s in range(segments)]
    more = st.tuples(st.integers(0, pages - 1), st.integers(0, segments - 1), st.integers(0, PT))
    items = data.draw(st.permutations(items + data.draw(st.lists(more, max_size=8))))
    got = attend_pages(query, pool, *(torch.tensor(column) for column in zip(*items, strict=True)))
    for segment in range(segments):
        mine = [pool[page, :, :length] for page, s, length in items if s == segment]
        keys, values = torch.cat(mine, 1).double()
        wanted = (query[segment].double() @ keys.T).softmax(-1) @ values
        torch.testing.assert_close(got[segment].double(), wanted, rtol=1e-4, atol=1e-5)


# -- the tail ------------------------------------------------------------------------------------------------


@pytest.fixture
def filled() -> Callable[[], tuple[DraftArena, Tokens, Kept]]:
    """Arenas with the same slot 0, page for page."""

    def make() -> tuple[DraftArena, Tokens, Kept]:
        arena = DraftArena(SHAPE, 200, PT, torch.float32)
        source, kept = Tokens.random(SHAPE, 60, 11), random_kept(SHAPE, 20, 12)
        arena.put(0, kept, source.read(20))
        return arena, source, kept

    return make


Filled = Callable[[], tuple[DraftArena, Tokens, Kept]]
QUERY = torch.randn(SHAPE.layers, 1, SHAPE.query_heads, SHAPE.head_dim, generator=generator(13))


@pytest.mark.parametrize("tail", TAILS[1:])
def test_a_verify_row_overwrites_what_draft_rows_wrote(filled: Filled, tail: int) -> None:
    """Drafts append approximate K/V one by one; the verify row puts the true K/V into the same entries."""
    arena, true, kept = filled()
    drafted = Tokens.random(SHAPE, 60, 14)
    for index in range(tail):
        append(arena, 0, drafted, 20, [index])
    pages = arena.slots[0].tail.clone()
    append(arena, 0, true, 20, range(tail))
    assert torch.equal(arena.slots[0].tail, pages)
    got = attend_all(arena, [0], [tail], QUERY)
    for layer in range(SHAPE.layers):
        wanted = dense(SHAPE, true, kept, 20, tail, QUERY[layer, 0], layer)
        torch.testing.assert_close(got[layer, 0].double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("surplus", [1, PT, 2 * PT + 1])
def test_rollback_equals_never_having_appended(filled: Filled, tail: int, surplus: int) -> None:
    """Bit for bit, and also when the next draft goes over the rolled-back entries."""
    rolled, true, _ = filled()
    never, _, _ = filled()
    if tail:
        append(rolled, 0, true, 20, range(tail))
        append(never, 0, true, 20, range(tail))
    append(rolled, 0, Tokens.random(SHAPE, 60, 15), 20, range(tail, tail + surplus))
    assert torch.equal(attend_all(rolled, [0], [tail], QUERY), attend_all(never, [0], [tail], QUERY))
    for arena in (rolled, never):
        append(arena, 0, true, 20, [tail])
    assert torch.equal(attend_all(rolled, [0], [tail + 1], QUERY), attend_all(never, [0], [tail + 1], QUERY))


def test_rolled_back_entries_are_not_read_at_all(filled: Filled) -> None:
    """Not even with a weight of zero: what a failed draft left there may be infinite or NaN."""
    rolled, true, _ = filled()
    never, _, _ = filled()
    for arena in (rolled, never):
        append(arena, 0, true, 20, range(2))
    append(rolled, 0, Tokens(*(torch.full((3, 2, 60, 8), math.nan) for _ in range(2))), 20, [2])
    assert torch.equal(attend_all(rolled, [0], [2], QUERY), attend_all(never, [0], [2], QUERY))


@pytest.mark.parametrize("start", [0, 1, PT - 1, PT])
@pytest.mark.parametrize("count", [2, PT, PT + 1, 2 * PT + 2])
def test_many_tokens_at_once_equal_one_by_one(filled: Filled, start: int, count: int) -> None:
    """The kept context has holes; what is behind it must not notice how it was appended."""
    at_once, source, kept = filled()
    one_by_one, _, _ = filled()
    for arena in (at_once, one_by_one):
        if start:
            append(arena, 0, source, 20, range(start))
    append(at_once, 0, source, 20, range(start, start + count))
    for index in range(start, start + count):
        append(one_by_one, 0, source, 20, [index])
    tail = start + count
    got = attend_all(at_once, [0], [tail], QUERY)
    for layer in range(SHAPE.layers):
        wanted = dense(SHAPE, source, kept, 20, tail, QUERY[layer, 0], layer)
        torch.testing.assert_close(got[layer, 0].double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got, attend_all(one_by_one, [0], [tail], QUERY), rtol=1e-6, atol=1e-6)


def test_one_batch_writes_the_tails_of_several_slots(filled: Filled) -> None:
    arena, source, kept = filled()
    other, other_kept = Tokens.random(SHAPE, 60, 16), random_kept(SHAPE, 20, 17)
    arena.put(5, other_kept, other.read(20))
    arena.grow_tail(0, PT + 1)
    arena.grow_tail(5, 2)
    # Batch tokens 1..6: slot 5's entries 0 and 1, then slot 0's entries 1..4; entry 0 of slot 0 was there before.
    append(arena, 0, source, 20, [0])
    where = arena.tail_tokens(range(1, 7), [5, 5, 0, 0, 0, 0], [0, 1, 1, 2, 3, 4])
    for layer in range(SHAPE.layers):
        for_key, for_value = (
            torch.cat(
                [torch.full((1, 2, 8), 9.0), b[layer, :, 20:22].transpose(0, 1), a[layer, :, 21:25].transpose(0, 1)]
            )
            for a, b in ((source.keys, other.keys), (source.values, other.values))
        )
        arena.write_tail(layer, where, for_key, for_value)
    query = QUERY.expand(-1, 2, -1, -1)
    got = attend_all(arena, [5, 0], [2, 5], query)
    for layer in range(SHAPE.layers):
        for row, (seq, chosen, tail) in enumerate(((other, other_kept, 2), (source, kept, 5))):
            wanted = dense(SHAPE, seq, chosen, 20, tail, query[layer, row], layer)
            torch.testing.assert_close(got[layer, row].double(), wanted, rtol=1e-4, atol=1e-5)


def test_stale_nans_of_a_former_owner_do_not_leak() -> None:
    """Unused entries of a page are multiplied by a weight of zero, and zero times NaN would be NaN."""
    poison = Tokens(*(torch.full((3, 2, 30, 8), math.nan) for _ in range(2)))
    used, fresh = (DraftArena(SHAPE, 60, PT, torch.float32) for _ in range(2))
    used.put(9, Kept(torch.full((3, 2), 20), torch.arange(20).repeat(6)), poison.read(20))
    append(used, 9, poison, 20, range(2 * PT))
    assert torch.isnan(used.pool.data).any(dim=(1, 2, 3)).sum() == 42
    used.drop(9)
    source, kept = Tokens.random(SHAPE, 30, 18), random_kept(SHAPE, 20, 19)
    for arena in (used, fresh):
        arena.put(0, kept, source.read(20))
        append(arena, 0, source, 20, range(PT + 1))
    got = attend_all(used, [0], [PT + 1], QUERY)
    assert torch.isfinite(got).all()
    assert torch.equal(got, attend_all(fresh, [0], [PT + 1], QUERY))


def test_model_precision_is_stored_as_the_arenas() -> None:
    """Float32 K/V of a bfloat16 arena are rounded once, on the way in."""
    arena = DraftArena(SHAPE, 100, PT, torch.bfloat16)
    source, kept = Tokens.random(SHAPE, 25, 20), random_kept(SHAPE, 20, 21)
    arena.put(0, kept, source.read(20))
    append(arena, 0, source, 20, range(3))
    rounded = Tokens(source.keys.bfloat16(), source.values.bfloat16())
    got = attend_all(arena, [0], [3], QUERY)
    for layer in range(SHAPE.layers):
        wanted = dense(SHAPE, rounded, kept, 20, 3, QUERY[layer, 0], layer)
        torch.testing.assert_close(got[layer, 0].double(), wanted, rtol=1e-4, atol=1e-5)
