"""Ridge regression against numpy's least squares, the network against what only it can fit, ranking against scipy."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from compressors import Shape, Surrogate
from compressors.fast_kvzip import gate
from tests.tensor.compressor_runs import quick
from tests.tensor.surrogates import gates, same
from vericache.surrogate.fitting import Fitting, Sampled
from vericache.surrogate.gate import Gates
from vericache.surrogate.metrics import Agreement, overlap, ranks, spearman
from vericache.surrogate.mlp import MLP
from vericache.surrogate.ridge import Moments, Ridge

# -- ridge -------------------------------------------------------------------------------------------------


def ridge_by_lstsq(x: np.ndarray, y: np.ndarray, strength: float) -> tuple[np.ndarray, np.ndarray]:
    """Ridge as least squares with rows sqrt(strength) I, on standardised features; columns that vary only."""
    mean, scale = x.mean(0), x.std(0)
    vary = scale > 1e-9 * (1 + np.abs(mean))
    z = (x[:, vary] - mean[vary]) / scale[vary]
    rows = np.vstack([z, np.sqrt(strength) * np.eye(z.shape[1])])
    solved = np.linalg.lstsq(rows, np.vstack([y - y.mean(0), np.zeros((z.shape[1], y.shape[1]))]), rcond=None)[0]
    weight = np.zeros((x.shape[1], y.shape[1]))
    weight[vary] = solved / scale[vary, None]
    return weight, y.mean(0) - mean @ weight


@pytest.mark.parametrize("strength", [1e-3, 1.0, 300.0])
@pytest.mark.parametrize("tokens", [5, 40, 300])
def test_ridge_is_least_squares_with_a_penalty(tokens: int, strength: float) -> None:
    """Fewer tokens than features included; features of very different scales, one constant, one far off 0."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(tokens, 12)) * np.logspace(-3, 3, 12) + 5
    x[:, 3], x[:, 7] = 2.5, x[:, 7] + 1e4
    y = x @ rng.normal(size=(12, 2)) + rng.normal(size=(tokens, 2))
    weight, bias = Moments.of(torch.tensor(x), torch.tensor(y)).solve(strength)
    wanted, wanted_bias = ridge_by_lstsq(x, y, strength)
    np.testing.assert_allclose(weight.numpy(), wanted, rtol=1e-4, atol=1e-6 * np.abs(wanted).max())
    np.testing.assert_allclose(x @ weight.numpy() + bias.numpy(), x @ wanted + wanted_bias, rtol=1e-5, atol=1e-3)
    assert not weight[3].any()


def random_text(seed: int, tokens: int = 50) -> list[tuple[int, Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    return [(i, torch.randn(tokens, 8, generator=rng), torch.randn(2, tokens, generator=rng)) for i in range(3)]


def test_ridge_does_not_depend_on_how_texts_are_cut() -> None:
    texts = [random_text(seed) for seed in range(4)]
    together, apart = Ridge(1.0), Ridge(1.0)
    for layer in range(3):
        pieces = [text[layer] for text in texts]
        together.add(layer, torch.cat([x for _, x, _ in pieces]), torch.cat([y for _, _, y in pieces], 1))
        for piece in pieces:
            apart.add(*piece)
    once, pieces_of = together.fit(), apart.fit()
    assert once.tensors["weight0"].shape == (3, 8, 2)
    assert once.tensors["weight0"].dtype == torch.float32
    for name, tensor in once.tensors.items():
        torch.testing.assert_close(pieces_of.tensors[name], tensor)


# -- gradient descent ----------------------------------------------------------------------------------------


def error_of(fitting: Fitting, x: Tensor, y: Tensor) -> float:
    """Squared error over the variance of ``y [N, H]``, on what was fitted."""
    fitting.add(0, x, y.T)
    return float((fitting.fit().predict(0, x).T - y).square().mean() / y.var(0).mean())


def uneven(tokens: int) -> Tensor:
    """Features of very different scales, one that is constant."""
    rng = torch.Generator().manual_seed(1)
    return torch.randn(tokens, 6, generator=rng) * torch.tensor([1.0, 100.0, 0.01, 1.0, 1.0, 0.0]) + 3


def test_a_network_fits_what_no_linear_map_can() -> None:
    x = uneven(2000)
    y = torch.stack([(x[:, 0] - 3).abs(), (x[:, 1] - 3).abs() / 100], 1) * 5 - 8
    assert error_of(Ridge(1.0), x, y) > 0.9
    assert error_of(MLP(32, 2000, steps=400), x, y) < 0.1


def test_gates_fit_scores_that_gates_made() -> None:
    x = uneven(2000)
    shape = Shape(1, 2, 4, 2)
    hidden = gates(shape, queries=2, width=4, sinks=3).tensors
    made = gate(
        {name: tensor[0, 2:] if name in ("query", "key") else tensor[0] for name, tensor in hidden.items()},
        (x - 3) / x.std(0).clamp_min(1),
    )
    assert error_of(Gates(2000, steps=400), x, made.T) < 0.2


@pytest.mark.parametrize("make", [lambda: MLP(4, tokens=20, steps=1), lambda: Gates(tokens=20, steps=1)])
def test_descent_is_reproducible_and_sees_a_share_of_each_text(make: Callable[[], Sampled]) -> None:
    def fitted() -> Surrogate:
        fitting = make()
        for text in (random_text(0), random_text(1, tokens=10)):
            for piece in text:
                fitting.add(*piece)
        assert [len(torch.cat(seen)) for seen in fitting._features.values()] == [30, 30, 30]
        return fitting.fit()

    assert same(fitted(), fitted())
    assert all(len(tensor) == 3 for tensor in fitted().tensors.values())
    assert fitted().fits(3, 2, 2)


# -- ranking -------------------------------------------------------------------------------------------------

values = st.lists(st.integers(-5, 5).map(float), min_size=2, max_size=30)


@quick
@given(a=values)
def test_ranks_are_scipys(a: list[float]) -> None:
    assert ranks(torch.tensor(a)).tolist() == stats.rankdata(a).tolist()


@quick
@given(data=st.data(), a=values)
def test_spearman_is_scipys(data: st.DataObject, a: list[float]) -> None:
    b = data.draw(st.lists(st.integers(-3, 3).map(float), min_size=len(a), max_size=len(a)))
    found = float(spearman(torch.tensor(a), torch.tensor(b)))
    if len(set(a)) == 1 or len(set(b)) == 1:
        assert found == 0
    else:
        assert found == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)


@quick
@given(data=st.data(), a=values, share=st.sampled_from([0.1, 0.25, 0.5, 1.0]))
def test_overlap_is_that_of_the_largest(data: st.DataObject, a: list[float], share: float) -> None:
    b = data.draw(st.permutations(a))
    count = max(1, round(share * len(a)))

    def best(scores: list[float]) -> set[int]:
        return set(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count])

    wanted = len(best(a) & best(b)) / count
    assert float(overlap(torch.tensor(a), torch.tensor(b), share)) == wanted


def test_agreement_of_texts() -> None:
    """R2 over all tokens of a head, the ranking figures as means over texts and heads, layer by layer."""
    rng = torch.Generator().manual_seed(2)
    found = Agreement(shares=(0.25,))
    pairs = []
    for tokens in (40, 60):
        target = torch.randn(2, 3, tokens, generator=rng)
        predicted = target + torch.tensor([0.1, 2.0])[:, None, None] * torch.randn(target.shape, generator=rng)
        found.add(predicted, target)
        pairs.append((predicted.double(), target.double()))
    every = torch.cat([p for p, _ in pairs], -1), torch.cat([t for _, t in pairs], -1)
    for layer, row in enumerate(found.layers()):
        error = (every[0] - every[1])[layer].square().sum(-1)
        spread = (every[1][layer] - every[1][layer].mean(-1, keepdim=True)).square().sum(-1)
        assert row["r2"] == pytest.approx(float((1 - error / spread).mean()))
        each = [stats.spearmanr(p[layer, h], t[layer, h]).statistic for p, t in pairs for h in range(3)]
        assert row["spearman"] == pytest.approx(np.mean(each))
        assert row["overlap_0.25"] == pytest.approx(
            np.mean([float(overlap(p[layer], t[layer], 0.25).mean()) for p, t in pairs])
        )
    assert found.layers()[0]["r2"] > 0.9 > found.layers()[1]["r2"]
    assert found.pooled() == {
        "overlap_0.25": pytest.approx(np.mean([float(overlap(p.flatten(), t.flatten(), 0.25)) for p, t in pairs]))
    }
    assert (found.texts, found.tokens) == (2, 100)
