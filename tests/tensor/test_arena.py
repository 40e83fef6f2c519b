"""Who owns which page of the draft arena, and how many pages a slot needs at most."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compressors import Kept
from tests.tensor.arena_world import PT, SHAPE, Tokens, attend_all, dense, generator, quick, random_kept
from vericache.draft.arena import DraftArena, page_bound
from vericache.draft.formats import Plain, pages_per_head
from vericache.draft.pool import PagePool
from vericache.draft.source import LayerSource
from vericache.errors import ArenaFullError


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
        assert len(owned) <= page_bound(kept_per_head, heads, arena.page_tokens) + heads * known.strips
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
    arena = DraftArena(SHAPE, pages, Plain(PT, SHAPE.head_dim, torch.float32))
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
    arena = DraftArena(SHAPE, 30, Plain(PT, SHAPE.head_dim, torch.float32))
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
    arena = DraftArena(SHAPE, 40, Plain(PT, SHAPE.head_dim, torch.float32))
    source = Tokens.random(SHAPE, 10, 0)

    def read(layer: int) -> tuple[Tensor, Tensor]:
        if layer == failing_layer:
            raise RuntimeError("page read failed")
        return source.read(10).read(layer)

    with pytest.raises(RuntimeError, match="page read failed"):
        arena.put(0, random_kept(SHAPE, 10, 0), LayerSource(read))
    assert not arena.slots
    assert sorted(arena.pool.free) == list(range(40))


def test_dropping_an_empty_slot_does_nothing() -> None:
    arena = DraftArena(SHAPE, 5, Plain(PT, SHAPE.head_dim, torch.float32))
    arena.drop(7)
    assert len(arena.pool.free) == 5


@quick
@given(data=st.data())
def test_the_pool_gives_all_or_nothing(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 12))
    pool = PagePool.of(size, Plain(PT, 3, torch.float32), "cpu")
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
    kept = math.ceil(sum(counts) / heads)
    assert int(pages_per_head(torch.tensor(counts), page_tokens).sum()) <= page_bound(kept, heads, page_tokens)


@pytest.mark.parametrize(("heads", "page_tokens", "kept"), [(1, 4, 5), (3, 4, 2), (3, 4, 5), (4, 3, 3), (2, 1, 6)])
def test_page_bound_is_reached(heads: int, page_tokens: int, kept: int) -> None:
    """No smaller reservation would do: some spread of the tokens over the heads needs every page."""

    def spreads(total: int, parts: int) -> list[list[int]]:
        if parts == 1:
            return [[total]]
        return [[first, *rest] for first in range(total + 1) for rest in spreads(total - first, parts - 1)]

    most = max(sum(math.ceil(c / page_tokens) for c in spread) for spread in spreads(heads * kept, heads))
    assert page_bound(kept, heads, page_tokens) == most
