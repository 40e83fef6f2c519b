"""R-KV against its formula with the whole matrix of cosines, and what it is for: repeated text."""

import pytest
import torch
from torch import Tensor

from compressors import MethodError, MethodSpec, create, validate
from tests.tensor.compressor_runs import SHAPE, Context, drive, shape_of


def reference(context: Context, window: int, kernel: int, share: float, similar: float) -> Tensor:
    """float64 ``[L, H, n]``, zero in the window; row by row and column by column."""
    shape, n = context.shape, len(context.tokens)
    out = torch.zeros(shape.layers, shape.kv_heads, n, dtype=torch.float64)
    past = n - window
    for layer in range(shape.layers):
        for head in range(shape.kv_heads):
            k = context.keys[layer, head].double()
            group = context.queries[layer, head * shape.group : (head + 1) * shape.group, past:].double()
            logits = (group @ k[:past].T * context.scale).amax(0)  # the largest over the group, not the mean
            attention = logits.softmax(-1).mean(0)
            importance = [float(attention[max(i - kernel // 2, 0) : i + kernel // 2 + 1].max()) for i in range(past)]
            unit = k / k.norm(dim=-1, keepdim=True)
            cosines = unit @ unit.T
            for i in range(n):
                cosines[i, i] = 0
                alike = [j for j in range(n) if cosines[i, j] > similar]
                if alike:
                    cosines[i, alike[-1]] = 0
            redundancy = cosines.mean(0).softmax(0)
            for i in range(past):
                out[layer, head, i] = share * importance[i] - (1 - share) * redundancy[i]
    return out


def repeating(context: Context) -> Context:
    """Keys that resemble some others: noise around a few directions."""
    rng = torch.Generator().manual_seed(5)
    few = torch.randn(6, context.shape.head_dim, generator=rng)
    context.keys = few[torch.randint(6, context.keys.shape[:3], generator=rng)] + 0.4 * context.keys
    return context


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (1, 4), (3, 1), (2, 3)])
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("logits", [1 << 23, 400])
def test_scores(kv_heads: int, group: int, dim: int, logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and in squares of a few tokens."""
    for module in ("cached", "rkv"):
        monkeypatch.setattr(f"compressors.{module}.LOGITS", logits)
    context = repeating(Context.random(shape_of(2, kv_heads, group, dim), 45, sharpness=1.0))
    compressor = create(MethodSpec("rkv"), context.shape, 45)
    drive(compressor, context)
    wanted = reference(context, 8, 7, 0.1, 0.5)
    torch.testing.assert_close(compressor.scorer.scores().double(), wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("n", [1, 3, 4, 5, 20])
@pytest.mark.parametrize(("share", "similar"), [(0, 50), (100, 50), (30, 0), (30, 100)])
def test_short_contexts_and_other_options(n: int, share: int, similar: int) -> None:
    context = repeating(Context.random(SHAPE, n))
    options = (("importance_percent", share), ("kernel", 3), ("similar_percent", similar), ("window", 4))
    compressor = create(MethodSpec("rkv", options=options), SHAPE, n)
    drive(compressor, context)
    wanted = reference(context, 4, 3, share / 100, similar / 100) if n > 4 else torch.zeros(3, 2, n).double()
    torch.testing.assert_close(compressor.scorer.scores().double(), wanted, rtol=1e-4, atol=1e-7)


def test_of_a_repeated_text_the_last_copy_is_kept() -> None:
    """Three times the same 20 keys: redundancy alone keeps the last ones."""
    context = Context.random(shape_of(2, 2, 3, 80), 60 + 8)  # 80 dimensions: only copies resemble each other
    context.keys[:, :, :60] = context.keys[:, :, :20].repeat(1, 1, 3, 1)
    spec = MethodSpec("rkv", sinks=0, recent=8, options=(("importance_percent", 0),))
    compressor = create(spec, context.shape, 68)
    drive(compressor, context)
    scores = compressor.scorer.scores()[..., :60].unflatten(-1, (3, 20))
    assert (scores[..., 2, :] > scores[..., :2, :].amax(-2)).all()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("window", 33, r"must lie in 1..recent \(32\), got 33"),
        ("kernel", 4, "must be odd and positive, got 4"),
        ("importance_percent", 101, "must lie in 0..100, got 101"),
        ("similar_percent", -1, "must lie in 0..100, got -1"),
    ],
)
def test_wrong_options(option: str, value: int, message: str) -> None:
    with pytest.raises(MethodError, match=f"rkv: option '{option}' {message}"):
        validate(MethodSpec("rkv", options=((option, value),)))
