"""Arena pages that a compression leaves go back to the pool, and what stays suffices for the next one."""

from dataclasses import dataclass
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from compressors import MethodSpec
from tests.tensor.compressor_runs import quick
from vericache.draft.arena import kept_bound, page_bound
from vericache.engine.reservations import Reservations
from vericache.engine.tails import TailSizes

LAYERS, KV_HEADS, SIZE = 3, 2, 4
HEADS = LAYERS * KV_HEADS
SPEC = MethodSpec("snapkv", ratio=0.5, sinks=1, recent=3)


@dataclass
class Holder:
    """What ``Reservations`` reads of a record."""

    spec: MethodSpec
    arena_units: int
    tail_capacity: int
    context: int
    filled_at: int
    blocks: list[int]


class Blocks:
    """Device blocks that are never short."""

    def take(self, count: int) -> list[int]:
        return list(range(count))


def reservations(pages: int = 10_000) -> Reservations:
    plan = SimpleNamespace(
        arena_pages=pages, host_pages=1, layers=LAYERS, kv_heads=KV_HEADS, block_tokens=16,
        blocks_for=lambda tokens: -(-tokens // 16),
    )  # fmt: skip
    found = Reservations(plan, Blocks(), 1)
    found.tails = TailSizes(SIZE, SIZE, False, 3, 8)
    return found


def holder(pool: Reservations, spec: MethodSpec, context: int, tail: int = 10) -> Holder:
    units = pool.units(spec, context, tail)
    assert pool.arena.take(units)
    return Holder(spec, units, tail, context, context, [])


def pages_of(counts: list[int]) -> int:
    return sum(-(-count // SIZE) for count in counts)


@quick
@given(st.data())
def test_kept_bound_is_the_inverse_of_page_bound(data: st.DataObject) -> None:
    kept, heads, size = data.draw(st.integers(0, 500)), data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    pages = page_bound(kept, heads, size)
    found = kept_bound(pages, heads, size)
    assert found >= kept
    assert page_bound(found, heads, size) <= pages < page_bound(found + 1, heads, size)


@quick
@given(st.data())
def test_a_selection_that_fills_its_budget_leaves_nothing(data: st.DataObject) -> None:
    """However its tokens are spread."""
    pool, context = reservations(), data.draw(st.integers(8, 60))
    record = holder(pool, SPEC, context)
    counts, more = [SPEC.forced] * HEADS, HEADS * (SPEC.budget(context) - SPEC.forced)
    for _ in range(more):
        open_heads = [i for i, count in enumerate(counts) if count < context]
        counts[data.draw(st.sampled_from(open_heads))] += 1
    before = record.arena_units
    pool.trim(record, pages_of(counts))
    assert record.arena_units == before == pool.arena.used


@quick
@given(st.data())
def test_what_a_dynamic_method_leaves_is_given_back(data: st.DataObject) -> None:
    """The rest suffices for the slot, for its tail, and for as many tokens spread otherwise when it is compressed anew
    while the pool is empty."""
    context = data.draw(st.integers(20, 200))
    pool = reservations()
    record = holder(pool, SPEC, context)
    counts = [data.draw(st.integers(SPEC.forced, SPEC.budget(context))) for _ in range(HEADS)]
    used, before = pages_of(counts), record.arena_units
    pool.trim(record, used)
    assert pool.arena.used == record.arena_units <= before
    assert record.arena_units >= used + HEADS * pool.tails.strips(record.tail_capacity)
    assert record.arena_units <= used + HEADS * (1 + pool.tails.strips(record.tail_capacity)) or used == before

    pool.arena.take(pool.arena.free)
    record.context += record.tail_capacity
    assert pool.refit(record, SPEC, None)
    assert pool.units(record.spec, record.context, record.tail_capacity) <= record.arena_units
    assert record.spec.budget(record.context) * HEADS >= sum(counts) - HEADS
    assert record.spec.budget(record.context) <= SPEC.budget(record.context)
