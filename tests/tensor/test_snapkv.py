"""What SnapKV asks to see and how it scores, against an explicit formula."""

import math

import pytest
import torch
from torch import Tensor

from compressors import METHODS, MethodSpec, Shape, create
from tests.tensor.compressor_runs import SHAPE, Context, drive


@pytest.mark.parametrize("n", [1, 31, 32, 33, 100])
def test_snapkv_replays_the_end_of_the_context(n: int) -> None:
    tokens = list(range(n))
    (probe,) = METHODS["snapkv"].probes(tokens, MethodSpec("snapkv"), {})
    assert probe.tokens == tuple(tokens[-32:])
    assert probe.start == max(n - 32, 0)


def snapkv_reference(context: Context, window: int, kernel: int) -> Tensor:
    """Full causal attention of every query head over repeated KV heads, float64; zero outside ``[0, n - window)``."""
    shape, n = context.shape, len(context.tokens)
    out = torch.zeros(shape.layers, shape.kv_heads, n, dtype=torch.float64)
    past = n - window
    for layer in range(shape.layers):
        keys = context.keys[layer].double().repeat_interleave(shape.group, 0)  # repeat_kv: query head a reads a // G
        logits = context.queries[layer].double() @ keys.transpose(1, 2) * context.scale
        logits = logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
        mean = logits.softmax(-1)[:, past:, :past].mean(1)  # [Hq, past]
        for a in range(shape.query_heads):
            for i in range(past):
                near = [float(mean[a, j]) for j in range(i - kernel // 2, i + kernel // 2 + 1) if 0 <= j < past]
                out[layer, a // shape.group, i] += sum(near) / kernel / shape.group
    return out


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (2, 3), (3, 1)])
@pytest.mark.parametrize(("window", "kernel"), [(32, 5), (1, 1), (7, 3), (16, 7), (4, 41)])
def test_snapkv_scores(kv_heads: int, group: int, window: int, kernel: int) -> None:
    context = Context.random(Shape(2, kv_heads, kv_heads * group, 16), 45)
    spec = MethodSpec("snapkv", options=(("kernel", kernel), ("window", window)))
    compressor = create(spec, context.shape, 45)
    (seen,) = drive(compressor, context)
    assert seen.start == 45 - window
    torch.testing.assert_close(
        compressor.scorer.scores().double(), snapkv_reference(context, window, kernel), rtol=1e-4, atol=1e-7
    )


@pytest.mark.parametrize("n", [33, 34, 40])
def test_snapkv_just_behind_its_window(n: int) -> None:
    context = Context.random(SHAPE, n)
    compressor = create(MethodSpec("snapkv"), SHAPE, n)
    drive(compressor, context)
    torch.testing.assert_close(
        compressor.scorer.scores().double(), snapkv_reference(context, 32, 5), rtol=1e-4, atol=1e-7
    )
