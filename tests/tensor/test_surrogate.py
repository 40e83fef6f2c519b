"""What a surrogate reads, what it predicts, and where the method refuses to run."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from compressors import CachedTokens, MethodError, MethodSpec, Rotary, Shape, create
from compressors.surrogate import token_features
from tests.tensor.compressor_runs import Context, drive, rotary
from tests.tensor.surrogates import surrogate

SHAPE = Shape(2, 3, 6, 8)
SPEC = MethodSpec("kvzap", "per_head", sinks=1, recent=2)


@pytest.mark.parametrize("neox", [True, False])
def test_features_are_keys_before_their_rotation_and_values(neox: bool) -> None:
    """One token more or less in front of a text must not change the features of what follows."""
    rng = torch.Generator().manual_seed(0)
    plain, values = torch.randn(3, 40, 8, generator=rng), torch.randn(3, 40, 8, generator=rng)
    rope = Rotary(rotary(8).cos_sin, neox)
    turned = rope.turn(plain, torch.arange(40))
    cached = CachedTokens(lambda p: turned[:, p], lambda p: values[:, p])
    found = token_features(cached, torch.tensor([7, 0, 39]), rope)
    assert found.shape == (3, 48)
    assert found.dtype == torch.float32
    for row, position in enumerate((7, 0, 39)):
        keys, own_values = found[row].view(2, 3, 8)
        torch.testing.assert_close(keys, plain[:, position], rtol=1e-5, atol=1e-5)
        assert torch.equal(own_values, values[:, position])


@pytest.mark.parametrize("hidden", [None, 5])
@pytest.mark.parametrize("n", [1, 70, 5000])
def test_scores_are_the_predictions_exponentiated(hidden: int | None, n: int) -> None:
    """Contexts longer than what is read at a time included."""
    shape = replace(SHAPE, rotary=rotary(8, positions=5000), surrogate=surrogate(SHAPE, hidden=hidden))
    context = replace(Context.random(SHAPE, n), shape=shape)
    compressor = create(replace(SPEC, sinks=0, recent=1, ratio=0.5), shape, n)
    for layer in range(2):
        compressor.read(
            layer, CachedTokens(lambda p, k=context.keys[layer]: k[:, p], lambda p, v=context.values[layer]: v[:, p])
        )
    scores = compressor.scorer.scores()
    assert scores.shape == (2, 3, n)
    for layer in range(2):
        for i in (0, n // 2, n - 1):
            at = torch.tensor([i])
            back = shape.rotary.back(context.keys[layer][:, at], at)[:, 0]
            x = torch.cat([back.flatten(), context.values[layer][:, i].flatten()]).double()
            (w1, b1), *rest = [(w[layer].double(), b[layer].double()) for w, b in shape.surrogate.maps]
            y = x @ w1 + b1
            for w2, b2 in rest:
                y = F.gelu(y) @ w2 + b2
            torch.testing.assert_close(scores[layer, :, i].double(), y.exp(), rtol=1e-3, atol=1e-6)


def test_predictions_far_off_stay_finite_and_ordered() -> None:
    wild = surrogate(SHAPE)
    wild = replace(wild, maps=tuple((1000 * w, b) for w, b in wild.maps))
    context = replace(Context.random(SHAPE, 60), shape=replace(SHAPE, rotary=rotary(8), surrogate=wild))
    compressor = create(SPEC, context.shape, 60)
    drive(compressor, context)
    scores = compressor.scorer.scores()
    assert scores.isfinite().all()
    assert (scores > 0).all()
    compressor.select()


def test_a_model_without_what_it_needs() -> None:
    with pytest.raises(MethodError, match=r"kvzap needs a surrogate .* none is loaded; set surrogate"):
        create(SPEC, replace(SHAPE, rotary=rotary(8)), 50)
    with pytest.raises(MethodError, match="the one loaded is for other"):
        create(SPEC, replace(SHAPE, rotary=rotary(8), surrogate=surrogate(SHAPE, "other")), 50)
    with pytest.raises(MethodError, match="no single rotary embedding"):
        create(SPEC, replace(SHAPE, surrogate=surrogate(SHAPE)), 50)
    for other in (Shape(3, 3, 6, 8), Shape(2, 1, 6, 8), Shape(2, 3, 6, 16)):
        with pytest.raises(MethodError, match=r"was trained for .*, this model has 2 layers of 3 KV heads of size 8"):
            create(SPEC, replace(SHAPE, rotary=rotary(8), surrogate=surrogate(other)), 50)
