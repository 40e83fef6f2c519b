"""H2O against the column sums of the full attention matrix."""

import pytest
import torch
from torch import Tensor

from compressors import METHODS, MethodError, MethodSpec, create, validate
from tests.tensor.compressor_runs import SHAPE, Context, drive, full_attention, group_mean, shape_of


def reference(context: Context, normalize: bool) -> Tensor:
    """float64 ``[L, H, n]``, by ``repeat_kv`` and the whole ``[n, n]`` matrix."""
    n = len(context.tokens)
    received = group_mean(context, full_attention(context).sum(2))
    seen_by = torch.tensor([n - i for i in range(n)])
    return received / seen_by if normalize else received


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (1, 4), (3, 1), (2, 3)])
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("normalize", [0, 1])
def test_scores(kv_heads: int, group: int, dim: int, normalize: int) -> None:
    context = Context.random(shape_of(2, kv_heads, group, dim), 53)
    spec = MethodSpec("h2o", options=(("chunk", 20), ("normalize", normalize)))
    compressor = create(spec, context.shape, 53)
    drive(compressor, context)
    torch.testing.assert_close(
        compressor.scorer.scores().double(), reference(context, bool(normalize)), rtol=1e-4, atol=1e-7
    )


@pytest.mark.parametrize("n", [1, 2, 6, 7, 8, 30])
@pytest.mark.parametrize("chunk", [1, 7, 30, 1024])
def test_rows_tile_the_context(n: int, chunk: int) -> None:
    """However it is cut, every token pays all of its attention once."""
    context = Context.random(SHAPE, n)
    spec = MethodSpec("h2o", options=(("chunk", chunk),))
    probes = METHODS["h2o"].probes(context.tokens, spec, {})
    assert [t for p in probes for t in p.tokens] == context.tokens
    assert [p.start for p in probes] == list(range(0, n, chunk))
    compressor = create(spec, SHAPE, n)
    drive(compressor, context)
    scores = compressor.scorer.scores()
    torch.testing.assert_close(scores.sum(-1), torch.full((SHAPE.layers, SHAPE.kv_heads), float(n)))
    torch.testing.assert_close(scores.double(), reference(context, False), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("chunk", 0, "must be at least 1, got 0"), ("normalize", 2, "must be 0 or 1, got 2")],
)
def test_wrong_options(option: str, value: int, message: str) -> None:
    with pytest.raises(MethodError, match=f"h2o: option '{option}' {message}"):
        validate(MethodSpec("h2o", options=((option, value),)))
