"""DuoAttention: which heads keep everything, which stream, and that the budget is used up exactly."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressors import Kept, MethodError, MethodSpec, create, validate
from compressors.duo_attention import DuoAttention, _ordered
from tests.tensor.compressor_runs import SHAPE, Context, drive, heads_of, quick, shape_of

CHUNK = ("chunk", 40)


def select(context: Context, spec: MethodSpec) -> tuple[Kept, list[list[float]]]:
    """What is kept, and how much each head retrieves, from KVzip's scores of the same pass."""
    n = len(context.tokens)
    compressor = create(spec, context.shape, n)
    drive(compressor, context)
    looked_at = compressor.scorer._scores[..., spec.sinks : n - spec.recent]
    return compressor.select(), [[sum(head) for head in layer] for layer in looked_at.double().tolist()]


def expected(retrieval: list[list[float]], n: int, spec: MethodSpec, stream: int) -> list[list[list[int]]]:
    """Head by head, token by token, until the total is used up."""
    total = len(retrieval) * len(retrieval[0]) * spec.budget(n)
    ranking = sorted(
        ((a, h) for a in range(len(retrieval)) for h in range(len(retrieval[0]))), key=lambda x: -retrieval[x[0]][x[1]]
    )
    forced = set(range(spec.sinks)) | set(range(n - spec.recent, n))
    kept = {head: set(forced) for head in ranking}
    left = total - len(ranking) * len(forced)
    wanted = [(head, p) for p in range(n - 1, n - 1 - stream, -1) for head in ranking]  # streams, as old as each other
    wanted += [(head, p) for head in ranking for p in range(n - 1, -1, -1)]
    for head, p in wanted:
        if left and p not in kept[head]:
            kept[head].add(p)
            left -= 1
    return [[sorted(kept[(a, h)]) for h in range(len(layer))] for a, layer in enumerate(retrieval)]


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (1, 4), (3, 1), (2, 3)])
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.8])
def test_heads_in_order_of_what_they_retrieve(kv_heads: int, group: int, dim: int, ratio: float) -> None:
    context = Context.random(shape_of(3, kv_heads, group, dim), 150)
    spec = MethodSpec("duo_attention", "per_head", ratio, options=(CHUNK, ("stream", 40)))
    kept, retrieval = select(context, spec)
    assert heads_of(kept) == expected(retrieval, 150, spec, 40)
    others = [c for c in kept.counts.flatten().tolist() if c not in (44, 150)]
    assert len(others) <= 1, "every head but one keeps everything or streams"


@quick
@given(
    n=st.integers(20, 90), stream=st.integers(0, 100), sinks=st.integers(0, 4), ratio=st.floats(0.05, 0.99),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_the_budget_is_used_up_exactly(n: int, stream: int, sinks: int, ratio: float, seed: int) -> None:
    context = Context.random(SHAPE, n, seed)
    spec = MethodSpec("duo_attention", "per_head", ratio, sinks, 8, (CHUNK, ("stream", stream)))
    kept, retrieval = select(context, spec)
    assert int(kept.counts.sum()) == SHAPE.layers * SHAPE.kv_heads * spec.budget(n)
    if spec.budget(n) < n:
        assert heads_of(kept) == expected(retrieval, n, spec, min(stream, n))


def test_a_budget_below_the_streams_is_streaming_llm() -> None:
    context = Context.random(SHAPE, 150)
    kept, _ = select(context, MethodSpec("duo_attention", "per_head", 0.3, options=(CHUNK,)))
    streaming = create(MethodSpec("streaming_llm", ratio=0.3), SHAPE, 150).select()
    assert heads_of(kept) == heads_of(streaming)


def test_a_head_that_is_looked_at_retrieves() -> None:
    """One head whose keys the repetition finds again; the others' are too small to be told apart."""
    context = Context.random(SHAPE, 150)
    context.keys *= 0.01
    context.keys[1, 1] *= 300
    kept, _ = select(context, MethodSpec("duo_attention", "per_head", 0.35, options=(CHUNK, ("stream", 32))))
    assert kept.counts[1, 1] == kept.counts.max() == 36 + 6 * 17  # what 6 heads' budget of 53 leaves beyond 36


def test_orders_beyond_a_float32s_digits_stay_apart() -> None:
    top = (1 << 31) - (1 << 24) - 1
    orders = torch.tensor([0, 1, 2, 1 << 24, (1 << 24) + 1, (1 << 30) + 1, (1 << 30) + 2, top - 1, top])
    numbers = _ordered(orders)
    assert torch.isfinite(numbers).all()
    assert (numbers.diff() > 0).all()


def test_wrong_options() -> None:
    with pytest.raises(MethodError, match="duo_attention: option 'stream' must be at least 0, got -1"):
        validate(MethodSpec("duo_attention", "per_head", options=(("stream", -1),)))
    with pytest.raises(MethodError, match="duo_attention: option 'chunk' must be at least 8, got 7"):
        validate(MethodSpec("duo_attention", "per_head", options=(("chunk", 7),)))
    with pytest.raises(MethodError, match="duo_attention needs scoring rows of at least 72 tokens"):
        DuoAttention.fit(MethodSpec("duo_attention", "per_head"), 71)
