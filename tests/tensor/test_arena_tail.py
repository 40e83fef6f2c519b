"""Tokens behind the compressed context: appended, overwritten and rolled back, and what attention then reads."""

import math
from collections.abc import Callable

import pytest
import torch

from compressors import Kept
from tests.tensor.arena_world import PT, SHAPE, Tokens, append, attend_all, dense, generator, random_kept
from vericache.draft.arena import DraftArena
from vericache.draft.formats import Plain

TAILS = [0, 1, PT - 1, PT, PT + 1, 3 * PT]


@pytest.fixture
def filled() -> Callable[[], tuple[DraftArena, Tokens, Kept]]:
    """Arenas with the same slot 0, page for page."""

    def make() -> tuple[DraftArena, Tokens, Kept]:
        arena = DraftArena(SHAPE, 200, Plain(PT, SHAPE.head_dim, torch.float32))
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
    used, fresh = (DraftArena(SHAPE, 60, Plain(PT, SHAPE.head_dim, torch.float32)) for _ in range(2))
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
    arena = DraftArena(SHAPE, 100, Plain(PT, SHAPE.head_dim, torch.bfloat16))
    source, kept = Tokens.random(SHAPE, 25, 20), random_kept(SHAPE, 20, 21)
    arena.put(0, kept, source.read(20))
    append(arena, 0, source, 20, range(3))
    rounded = Tokens(source.keys.bfloat16(), source.values.bfloat16())
    got = attend_all(arena, [0], [3], QUERY)
    for layer in range(SHAPE.layers):
        wanted = dense(SHAPE, rounded, kept, 20, 3, QUERY[layer, 0], layer)
        torch.testing.assert_close(got[layer, 0].double(), wanted, rtol=1e-4, atol=1e-5)
