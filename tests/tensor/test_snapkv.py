"""What SnapKV and its relatives ask to see and how they score, against the full attention."""

import pytest
import torch
from torch import Tensor

from compressors import METHODS, MethodError, MethodSpec, create, validate
from tests.tensor.compressor_runs import SHAPE, Context, drive, full_attention, group_mean, shape_of


@pytest.mark.parametrize("n", [1, 31, 32, 33, 100])
def test_snapkv_replays_the_end_of_the_context(n: int) -> None:
    tokens = list(range(n))
    (probe,) = METHODS["snapkv"].probes(tokens, MethodSpec("snapkv"), {})
    assert probe.tokens == tuple(tokens[-32:])
    assert probe.start == max(n - 32, 0)


def reference(context: Context, name: str, window: int, kernel: int) -> Tensor:
    """From the full attention, position by position, float64; zero outside ``[0, n - window)``."""
    past = len(context.tokens) - window
    mean = full_attention(context)[:, :, past:, :past].mean(2)  # [L, Hq, past]
    out = torch.zeros(*mean.shape[:2], len(context.tokens), dtype=torch.float64)
    if name == "rocketkv":
        mean = group_mean(context, mean).repeat_interleave(context.shape.group, 1)  # pooling follows the group's mean
    for i in range(past):
        near = mean[..., max(i - kernel // 2, 0) : i + kernel // 2 + 1]
        out[..., i] = near.amax(-1) if name == "rocketkv" else near.sum(-1) / kernel
    return group_mean(context, out)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (2, 3), (3, 1)])
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize(("window", "kernel"), [(32, 5), (1, 1), (7, 3), (16, 7), (4, 41)])
@pytest.mark.parametrize("name", ["snapkv", "rocketkv"])
def test_scores(name: str, kv_heads: int, group: int, dim: int, window: int, kernel: int) -> None:
    context = Context.random(shape_of(2, kv_heads, group, dim), 45)
    spec = MethodSpec(name, options=(("kernel", kernel), ("window", window)))
    compressor = create(spec, context.shape, 45)
    (seen,) = drive(compressor, context)
    assert seen.start == 45 - window
    torch.testing.assert_close(
        compressor.scorer.scores().double(), reference(context, name, window, kernel), rtol=1e-4, atol=1e-7
    )


@pytest.mark.parametrize("n", [33, 34, 40])
@pytest.mark.parametrize(("name", "kernel"), [("snapkv", 5), ("rocketkv", 63)])
def test_just_behind_the_window(name: str, kernel: int, n: int) -> None:
    context = Context.random(SHAPE, n)
    compressor = create(MethodSpec(name), SHAPE, n)
    drive(compressor, context)
    torch.testing.assert_close(
        compressor.scorer.scores().double(), reference(context, name, 32, kernel), rtol=1e-4, atol=1e-7
    )


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (1, 4), (3, 1), (2, 3)])
@pytest.mark.parametrize("window", [1, 7])
@pytest.mark.parametrize("n", [1, 7, 8, 40])
def test_tova_scores(kv_heads: int, group: int, window: int, n: int) -> None:
    """One attention for all heads of a layer, that of the last tokens to those before them."""
    context = Context.random(shape_of(2, kv_heads, group, 16), n)
    compressor = create(MethodSpec("tova", options=(("window", window),)), context.shape, n)
    drive(compressor, context)
    past = n - window
    wanted = torch.zeros(2, kv_heads, n, dtype=torch.float64)
    if past > 0:
        wanted[..., :past] = full_attention(context)[:, :, past:, :past].mean((1, 2))[:, None]
    torch.testing.assert_close(compressor.scorer.scores().double(), wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["snapkv", "rocketkv", "tova"])
def test_every_method_names_itself(name: str) -> None:
    with pytest.raises(MethodError, match=rf"{name}: option 'window' must lie in 1..recent \(8\), got 9"):
        validate(MethodSpec(name, recent=8, options=(("window", 9),)))
