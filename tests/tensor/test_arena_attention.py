"""Draft attention over the pages of the arena, against a dense softmax."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressors import Shape
from tests.tensor.arena_world import PT, SHAPE, Tokens, append, attend_all, dense, generator, quick, random_kept
from vericache.draft.arena import DraftArena
from vericache.draft.attention import attend_pages, merge
from vericache.draft.formats import Plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_tokens", [1, PT, 32])
def test_attention_over_ragged_slots_and_tails(dtype: torch.dtype, page_tokens: int) -> None:
    """Several rows, each with its own counts per (layer, head) and its own tail length. Inputs may be bfloat16;
    logits and softmax are float32, so the dense answer on the same inputs is met as closely."""
    n, tails = 21, [0, 1, page_tokens - 1, page_tokens, page_tokens + 1, 2 * page_tokens + 3]
    arena = DraftArena(SHAPE, 2000, Plain(page_tokens, SHAPE.head_dim, dtype))
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
    arena = DraftArena(shape, 200, Plain(PT, shape.head_dim, torch.float32))
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
    arena = DraftArena(SHAPE, 100, Plain(PT, SHAPE.head_dim, torch.float32))
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
    page, segment, length = (torch.tensor(column) for column in zip(*items, strict=True))
    split = data.draw(st.integers(0, len(items)))  # pages of two kinds, one softmax
    parts = [
        attend_pages(query, *pool[page[part]].unbind(1), segment[part], length[part])
        for part in (slice(0, split), slice(split, None))
    ]
    got = merge(*parts)
    for segment in range(segments):
        mine = [pool[page, :, :length] for page, s, length in items if s == segment]
        keys, values = torch.cat(mine, 1).double()
        wanted = (query[segment].double() @ keys.T).softmax(-1) @ values
        torch.testing.assert_close(got[segment].double(), wanted, rtol=1e-4, atol=1e-5)
