"""What a batch means to the arena: which tokens are drafts, where K/V goes, and which batches are refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressors import Kept, Shape
from vericache.draft.arena import DraftArena
from vericache.draft.formats import Plain
from vericache.draft.runtime import HostRuntime
from vericache.draft.source import LayerSource
from vericache.draft.step import ArenaRow, DraftStep, build_step

SHAPE = Shape(layers=2, kv_heads=2, query_heads=4, head_dim=8)
PT = 4
CONTEXT = 10


def arena_with(slots: int, pages: int = 400) -> DraftArena:
    """Slots ``0 .. slots - 1``, each keeping another part of a random context of 10 tokens."""
    arena = DraftArena(SHAPE, pages, Plain(PT, SHAPE.head_dim, torch.float32))
    for slot in range(slots):
        rng = torch.Generator().manual_seed(slot)
        keys, values = torch.randn(2, 2, 2, CONTEXT, 8, generator=rng)
        kept = Kept(torch.full((2, 2), slot + 3), torch.arange(slot + 3).repeat(4))
        arena.put(slot, kept, LayerSource(lambda layer, k=keys, v=values: (k[layer], v[layer])))
    return arena


def check_tail(arena: DraftArena, step: DraftStep, expected: list[tuple[int, int, int]]) -> None:
    """``expected``: (batch token, slot, tail index)."""
    if not expected:
        assert step.tail is None
        return
    assert step.tail is not None
    assert step.tail.tokens.tolist() == [token for token, _, _ in expected]
    assert step.tail.offsets.tolist() == [index % PT for _, _, index in expected]
    tables = [arena.slots[slot].tail[index // PT] for _, slot, index in expected]
    assert torch.equal(step.tail.pages, torch.stack(tables).long())


def test_a_mixed_batch() -> None:
    """Plain prefill, draft, verify, plain decode, draft: only slots are touched, tokens keep their batch index."""
    arena = arena_with(3)
    rows = [None, ArenaRow(0, 100, True), ArenaRow(1, 50, False), None, ArenaRow(2, 7, True)]
    positions = [0, 1, 2, 103, 53, 54, 55, 9, 7]
    step = build_step(arena, rows, [0, 3, 4, 7, 8, 9], positions)
    assert step.num_rows == 5
    assert step.arena_rows.tolist() == [1, 4]
    assert step.draft_tokens.tolist() == [3, 8]
    assert step.arena_rows.dtype == step.draft_tokens.dtype == torch.int64
    check_tail(arena, step, [(3, 0, 3), (4, 1, 3), (5, 1, 4), (6, 1, 5), (8, 2, 0)])
    assert [len(arena.slots[slot].tail) for slot in range(3)] == [1, 2, 1]
    # A draft row reads up to and including its own token; the verify row reads nothing of the arena.
    assert step.work is not None
    per_segment = torch.zeros(SHAPE.layers, 2 * SHAPE.kv_heads, dtype=torch.int64)
    for layer in range(SHAPE.layers):
        for part in (step.work.compressed, step.work.tail):
            _, segments, lengths = part.layer(layer)
            per_segment[layer].index_add_(0, segments, lengths)
    assert per_segment.tolist() == [[3 + 4, 3 + 4, 5 + 1, 5 + 1]] * SHAPE.layers


def test_batches_without_drafts_have_no_attention_work() -> None:
    arena = arena_with(1)
    verify = build_step(arena, [ArenaRow(0, 10, False)], [0, 3], [10, 11, 12])
    assert verify.work is None
    assert len(verify.arena_rows) == 0
    check_tail(arena, verify, [(0, 0, 0), (1, 0, 1), (2, 0, 2)])
    plain = build_step(arena, [None, None], [0, 1, 6], [5, 0, 1, 2, 3, 4])
    assert plain.work is None
    assert plain.tail is None
    assert plain.num_rows == 2
    assert len(arena.slots[0].tail) == 1


@pytest.mark.parametrize("draft", [True, False])
def test_tails_grow_as_far_as_the_batch_writes(draft: bool) -> None:
    for index, strips in ((0, 1), (PT - 1, 1), (PT, 2), (2 * PT + 1, 3)):
        arena = arena_with(1)
        build_step(arena, [ArenaRow(0, 30, draft)], [0, 1], [30 + index])
        assert len(arena.slots[0].tail) == strips


def test_a_verify_of_earlier_positions_keeps_the_tail_and_its_pages() -> None:
    """The verify row starts at the request's last true token, behind which drafts have already written."""
    arena = arena_with(1)
    for index in range(PT + 2):
        build_step(arena, [ArenaRow(0, 30, True)], [0, 1], [30 + index])
    tail = arena.slots[0].tail.clone()
    step = build_step(arena, [ArenaRow(0, 30, False)], [0, PT], [30 + i for i in range(PT)])
    assert torch.equal(arena.slots[0].tail, tail)
    check_tail(arena, step, [(i, 0, i) for i in range(PT)])


@pytest.mark.parametrize(
    ("row", "query_start", "positions", "message"),
    [
        (ArenaRow(0, 20, True), [0, 1], [19], "slot 0 has 1 tokens from tail index -1"),
        (ArenaRow(0, 20, False), [0, 3], [18, 19, 20], "slot 0 has 3 tokens from tail index -2"),
        (ArenaRow(0, 20, True), [0, 2], [20, 21], "slot 0 has 2 tokens from tail index 0"),
    ],
)
def test_impossible_rows_are_refused_before_anything_grows(
    row: ArenaRow, query_start: list[int], positions: list[int], message: str
) -> None:
    arena = arena_with(1)
    free = list(arena.pool.free)
    with pytest.raises(ValueError, match=f"batch row 0 of arena {message}.*report"):
        build_step(arena, [row], query_start, positions)
    assert arena.pool.free == free


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_batch(data: st.DataObject) -> None:
    """Random rows over random slots against a plain loop over the tokens."""
    arena = arena_with(5)
    rows: list[ArenaRow | None] = []
    query_start, positions, drafts, tail = [0], [], [], []
    for slot in data.draw(st.permutations([0, 1, 2, 3, 4, None, None])):
        kind = data.draw(st.sampled_from(["draft", "verify"])) if slot is not None else "plain"
        base, first = data.draw(st.integers(1, 500)), data.draw(st.integers(0, 3 * PT))
        count = 1 if kind == "draft" else data.draw(st.integers(1, 2 * PT))
        start = query_start[-1]
        rows.append(None if slot is None else ArenaRow(slot, base, kind == "draft"))
        positions += range(base + first, base + first + count)
        query_start.append(start + count)
        if kind == "draft":
            drafts.append((len(rows) - 1, start))
        if slot is not None:
            tail += [(start + i, slot, first + i) for i in range(count)]
    step = build_step(arena, rows, query_start, positions)
    assert list(zip(step.arena_rows.tolist(), step.draft_tokens.tolist(), strict=True)) == drafts
    assert (step.work is None) == (not drafts)
    check_tail(arena, step, tail)


def test_the_runtime_overwrites_draft_rows_only() -> None:
    """Tails get every slot's K/V, the stock attention's output of other rows stays as it was."""
    arena = arena_with(2)
    runtime = HostRuntime(arena)
    assert runtime.step is None
    assert not runtime.only_drafts
    runtime.begin([ArenaRow(0, 10, True), ArenaRow(1, 10, False), None], [0, 1, 3, 4], [10, 10, 11, 3], [])
    step = runtime.step
    assert step is not None
    assert step.work is not None
    assert step.arena_rows.tolist() == [0]
    assert not runtime.only_drafts
    rng = torch.Generator().manual_seed(5)
    key, value = torch.randn(2, 4, 2, 8, generator=rng)
    query = torch.randn(4, 4, 8, generator=rng)
    output = torch.full((4, 4, 8), math.pi, dtype=torch.bfloat16)
    runtime.write(1, key, value)
    runtime.attend(1, query, output, 8**-0.5)
    expected = arena.attend(1, step.work, query[:1], 8**-0.5)
    assert torch.equal(output[:1], expected.bfloat16())
    assert (output[1:] == torch.tensor(math.pi, dtype=torch.bfloat16)).all()
    for token, slot, index in ((0, 0, 0), (1, 1, 0), (2, 1, 1)):
        for head in range(2):
            page = arena.pool.data[int(arena.slots[slot].tail[0, 1, head])]
            assert torch.equal(page[0, index], key[token, head])
            assert torch.equal(page[1, index], value[token, head])


def test_a_batch_of_drafts_only_is_recognised() -> None:
    """The stock attention may be skipped then, and only then."""
    arena = arena_with(2)
    runtime = HostRuntime(arena)
    drafts = [ArenaRow(0, 10, True), ArenaRow(1, 10, True)]
    runtime.begin(drafts, [0, 1, 2], [10, 10], [])
    assert runtime.only_drafts
    runtime.begin([*drafts, None], [0, 1, 2, 3], [11, 11, 0], [])
    assert not runtime.only_drafts
    runtime.begin([ArenaRow(0, 10, False), None], [0, 1, 2], [12, 0], [])
    assert not runtime.only_drafts
    runtime.end()
    assert runtime.step is None
