"""What a surrogate reads, what it predicts, and where the method refuses to run."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compressors import CachedTokens, MethodError, MethodSpec, Rotary, Shape, Surrogate, create
from compressors.kvzap import Perceptron
from compressors.surrogate import token_features
from tests.tensor.compressor_runs import Context, drive, reader, rotary
from tests.tensor.surrogates import gates, perceptron

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


def by_hand(surrogate: Surrogate, layer: int, x: Tensor) -> Tensor:
    """Log scores ``[H]`` of one token with features ``x``, in float64 and one head, query and sink at a time."""
    t = {name: tensor[layer].double() for name, tensor in surrogate.tensors.items()}
    if isinstance(surrogate, Perceptron):
        y = x @ t["weight0"] + t["bias0"]
        return F.gelu(y) @ t["weight1"] + t["bias1"] if "weight1" in t else y
    heads, queries = t["bias"].shape
    width = len(t["key_norm"])

    def norm(v: Tensor, weight: Tensor) -> Tensor:
        return v / (v.square().mean() + 1e-6).sqrt() * weight

    q = (x @ t["query"] + t["query_bias"]).view(heads, queries, width)
    k = (x @ t["key"] + t["key_bias"]).view(heads, width)
    shares = torch.zeros(heads, queries, dtype=torch.float64)
    for h in range(heads):
        for i in range(queries):
            query = norm(q[h, i], t["query_norm"])
            own = (query @ norm(k[h], t["key_norm"]) / width**0.5 + t["bias"][h, i]).exp()
            shares[h, i] = own / (own + (t["sinks"][h] @ query / width**0.5).exp().sum())
    return shares.mean(1).log()


KINDS = [("kvzap", perceptron(SHAPE)), ("kvzap", perceptron(SHAPE, hidden=5)), ("fast_kvzip", gates(SHAPE))]


@pytest.mark.parametrize(("method", "surrogate"), KINDS)
@pytest.mark.parametrize("n", [1, 70, 5000])
def test_scores_are_the_predictions_exponentiated(method: str, surrogate: Surrogate, n: int) -> None:
    """Contexts longer than what is read at a time included."""
    rope = rotary(8, positions=5000)
    shape, context = replace(SHAPE, rotary=rope, surrogates={method: surrogate}), Context.random(SHAPE, n)
    compressor = create(MethodSpec(method, ratio=0.5, sinks=0, recent=1), shape, n)
    for layer in range(2):
        compressor.read(layer, reader(context, layer, torch.float32, []))
    scores = compressor.scorer.scores()
    assert scores.shape == (2, 3, n)
    for layer in range(2):
        for i in (0, n // 2, n - 1):
            at = torch.tensor([i])
            keys = rope.back(context.keys[layer][:, at], at)[:, 0]
            x = torch.cat([keys.flatten(), context.values[layer][:, i].flatten()]).double()
            torch.testing.assert_close(
                scores[layer, :, i].double(), by_hand(surrogate, layer, x).exp(), rtol=1e-3, atol=1e-6
            )


def test_predictions_far_off_stay_finite() -> None:
    wild = Perceptron({name: 1000 * tensor for name, tensor in perceptron(SHAPE).tensors.items()})
    context = Context.random(SHAPE, 60)
    compressor = create(SPEC, replace(SHAPE, rotary=rotary(8), surrogates={"kvzap": wild}), 60)
    drive(compressor, context)
    scores = compressor.scorer.scores()
    assert scores.isfinite().all()
    assert (scores > 0).all()
    compressor.select()


def test_a_model_without_what_it_needs() -> None:
    rope = rotary(8)
    with pytest.raises(MethodError, match=r"kvzap needs a surrogate .* those of: none; set surrogate"):
        create(SPEC, replace(SHAPE, rotary=rope), 50)
    with pytest.raises(MethodError, match="those of: fast_kvzip"):
        create(SPEC, replace(SHAPE, rotary=rope, surrogates={"fast_kvzip": gates(SHAPE)}), 50)
    with pytest.raises(MethodError, match="no single rotary embedding"):
        create(SPEC, replace(SHAPE, surrogates={"kvzap": perceptron(SHAPE)}), 50)


@pytest.mark.parametrize("other", [Shape(3, 3, 6, 8), Shape(2, 1, 6, 8), Shape(2, 3, 6, 16)])
@pytest.mark.parametrize(("method", "make"), [("kvzap", perceptron), ("fast_kvzip", gates)])
def test_weights_of_another_model(method: str, make: Callable[[Shape], Surrogate], other: Shape) -> None:
    with pytest.raises(MethodError, match="weights do not fit this model, 2 layers of 3 KV heads of size 8"):
        create(MethodSpec(method), replace(SHAPE, rotary=rotary(8), surrogates={method: make(other)}), 50)
