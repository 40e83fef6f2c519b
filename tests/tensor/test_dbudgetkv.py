"""DBudgetKV: a head keeps no more than the norm of its attention needs, and never more than the ratio allows."""

import math

import pytest
import torch
from torch import Tensor

from compressors import Compressor, MethodError, MethodSpec, Shape, create, validate
from compressors.snapkv import SnapKV
from tests.tensor.compressor_runs import SHAPE, Context, drive, heads_of

N = 120


def run(loss: int, ratio: float = 0.9, counts: str = "uniform", context: Context | None = None) -> Compressor:
    context = context or Context.random(SHAPE, N, sharpness=4.0)
    spec = MethodSpec("dbudgetkv", counts, ratio, 2, 8, (("loss_percent", loss), ("window", 8)))
    compressor = create(spec, context.shape, N)
    drive(compressor, context)
    return compressor


def norm(context: Context, layer: int, head: int, positions: list[int]) -> float:
    """Of the last query's attention to ``positions``, the mean over the query heads of a KV head."""
    keys, group = context.keys[layer, head], context.shape.group
    queries: Tensor = context.queries[layer, head * group : (head + 1) * group, -1]
    weights = (queries @ keys.T * context.scale).softmax(-1)
    return float(weights[:, positions].square().sum(-1).sqrt().mean())


@pytest.mark.parametrize("loss", [1, 5, 30])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 4), (3, 1), (2, 3)])
def test_a_head_keeps_the_fewest_tokens_that_have_the_norm(loss: int, kv_heads: int, group: int) -> None:
    context = Context.random(Shape(2, kv_heads, kv_heads * group, 16), N, sharpness=4.0)
    compressor = run(loss, 0.95, context=context)
    kept, scores = compressor.select(), compressor.scorer.scores()
    stopped = 0
    for layer, heads in enumerate(heads_of(kept)):
        for head, positions in enumerate(heads):
            if len(positions) == compressor.budget:
                continue
            full = norm(context, layer, head, list(range(N)))
            assert norm(context, layer, head, positions) >= (1 - loss / 100) * full * (1 - 1e-5)
            chosen = [i for i in positions if 2 <= i < N - 8]
            if chosen:
                last = min(chosen, key=lambda i: (float(scores[layer, head, i]), -i))
                fewer = [i for i in positions if i != last]
                assert norm(context, layer, head, fewer) < (1 - loss / 100) * full * (1 + 1e-5)
            stopped += 1
    assert stopped > 0


def test_the_more_may_be_lost_the_less_is_kept() -> None:
    sizes = [int(run(loss).select().counts.sum()) for loss in (0, 1, 10, 100)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[1] > sizes[2] > sizes[3] == SHAPE.layers * SHAPE.kv_heads * 10  # the forced tokens


@pytest.mark.parametrize("counts", ["uniform", "per_head", "within_layer"])
@pytest.mark.parametrize("ratio", [0.1, 0.3])
def test_the_ratio_is_the_most_that_is_kept(counts: str, ratio: float) -> None:
    """What a head does not need goes to no other."""
    compressor = run(1, ratio, counts)
    kept = compressor.select()
    assert int(kept.counts.sum()) <= SHAPE.layers * SHAPE.kv_heads * math.floor(ratio * N + 0.5)
    assert (kept.counts <= compressor.scorer.needed().clamp(min=10)).all()


def test_the_order_is_that_of_snapkv() -> None:
    spec = MethodSpec("snapkv", "uniform", 0.9, 2, 8, (("window", 8),))
    snapkv = create(spec, SHAPE, N)
    drive(snapkv, Context.random(SHAPE, N, sharpness=4.0))
    assert isinstance(snapkv.scorer, SnapKV)
    assert torch.equal(snapkv.scorer.scores(), run(5).scorer.scores())


@pytest.mark.parametrize("loss", [-1, 101])
def test_a_loss_is_a_percentage(loss: int) -> None:
    with pytest.raises(MethodError, match=f"dbudgetkv: option 'loss_percent' must lie in 0..100, got {loss}"):
        validate(MethodSpec("dbudgetkv", options=(("loss_percent", loss),)))


def test_needs_of_a_wrong_shape_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compressor = run(1)
    for needed in (torch.ones(3, 1, dtype=torch.int64), torch.ones(3, 2)):
        monkeypatch.setattr(compressor.scorer, "needed", lambda needed=needed: needed)
        with pytest.raises(MethodError, match=r"dbudgetkv needs counts of shape .*; expected \(3, 2\) and torch.int64"):
            compressor.select()
