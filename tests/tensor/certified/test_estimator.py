"""The shrinkage estimator: its fixed point against brute force, and that nothing is better (Theorem 1)."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from scipy.optimize import lsq_linear
from torch import Tensor

from tests.tensor.certified.instances import all_samples, drawn, instances, small_queries
from tests.tensor.compressor_runs import quick
from vericache.certified import estimator
from vericache.certified.estimator import estimate, shrinkage
from vericache.errors import CompressionError


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def squared_error(multipliers: Tensor, w: Tensor, r: Tensor) -> Tensor:
    """Mean squared error of the estimate of D, ``[...]``."""
    bias = (w * (1 - multipliers)).sum(-1)
    return bias.square() + (multipliers.square() * w.square() * (1 - r) / r).sum(-1)


def by_bisection(w: list[float], r: list[float]) -> tuple[float, list[float]]:
    """The fixed point, token by token."""

    def clipped(beta: float, wi: float, ri: float) -> float:
        return 1.0 if ri == 1 or beta * ri >= wi * (1 - ri) else max(ri, beta * ri / (wi * (1 - ri)))

    def missing(beta: float) -> float:
        return math.fsum(wi * (1 - clipped(beta, wi, ri)) for wi, ri in zip(w, r, strict=True))

    low, high = 0.0, missing(0.0)
    while low < (middle := (low + high) / 2) < high:  # down to neighbouring numbers
        low, high = (middle, high) if middle < missing(middle) else (low, middle)
    return high, [clipped(high, wi, ri) for wi, ri in zip(w, r, strict=True)]


def by_segments(w: Tensor, r: Tensor) -> float:
    """The fixed point ``[n]`` from the one segment between breakpoints that holds its own root."""
    light, heavy = w * (1 - r), w * (1 - r) / r
    points = torch.cat([light, heavy, numbers(0.0, math.inf)]).unique()
    for low, high in pairwise(points):
        middle = (light <= low) & (high <= heavy) & (light < heavy)
        fixed = light[light >= high].sum() + w[middle].sum()
        root = fixed / (1 + (r / (1 - r))[middle].sum())
        if low * (1 - 1e-13) <= root <= high * (1 + 1e-13):
            return float(root)
    raise AssertionError("no segment holds its root")


def test_the_fixed_point_is_that_of_brute_force() -> None:
    for spread, share in [(0.1, 0.5), (2.0, 1 / 16), (2.0, 0.6), (5.0, 0.1)]:
        logits, r = instances(10, 200, share=share, seed=3, spread=spread)
        w = logits.exp()
        found = shrinkage(w, r)
        for row in range(len(w)):
            bias, multipliers = by_bisection(w[row].tolist(), r[row].tolist())
            assert float(found.bias[row]) == pytest.approx(bias, rel=1e-10)
            assert float(found.bias[row]) == pytest.approx(by_segments(w[row], r[row]), rel=1e-10)
            torch.testing.assert_close(found.multipliers[row], numbers(*multipliers), rtol=1e-10, atol=0)


@quick
@given(query=small_queries())
def test_the_fixed_point_of_odd_cases(query: tuple[Tensor, Tensor]) -> None:
    w, r = query
    found = shrinkage(w, r)
    bias, multipliers = by_bisection(w.tolist(), r.tolist())
    step = float(w.sum()) * 1e-15  # multipliers next to 1 are known to one part in 2^53
    assert float(found.bias) == pytest.approx(bias, rel=1e-10, abs=step)
    torch.testing.assert_close(found.multipliers, numbers(*multipliers), rtol=1e-10, atol=0)
    assert (found.multipliers >= r).all()
    assert (found.multipliers <= 1).all()


def test_a_handful_of_steps_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where probabilities next to 1 make a step of the function whose root is sought."""
    monkeypatch.setattr(estimator, "_STEPS", 16)
    rng = torch.Generator().manual_seed(0)
    for t in range(40):
        u, noise = torch.rand(60, generator=rng, dtype=torch.float64), torch.randn(60, generator=rng)
        w = (noise.double() * (t % 10)).exp()
        r = [u.clamp(min=1e-9), 1 - 10 ** (-15 * u), 10 ** (-8 * u), (w / w.max()).sqrt().clamp(min=1e-4)][t % 4]
        assert float(shrinkage(w, r).bias) == pytest.approx(by_segments(w, r), rel=1e-12)


def test_the_multipliers_are_those_of_a_least_squares_solver() -> None:
    """Which knows no fixed point: the mean squared error is a sum of squares, bounded to the box."""
    logits, r = instances(10, 40, share=0.3, seed=5)
    w = (logits - logits.amax(-1, keepdim=True)).exp()
    found = shrinkage(w, r)
    for row in range(len(w)):
        sampled = r[row] < 1
        mine, chance = w[row, sampled], r[row, sampled]
        rows = torch.cat([mine[None], torch.diag(mine * ((1 - chance) / chance).sqrt())])
        target = torch.cat([mine.sum()[None], torch.zeros_like(mine)])
        best = lsq_linear(rows.numpy(), target.numpy(), (chance.numpy(), 1.0), "bvls", tol=1e-15)
        torch.testing.assert_close(found.multipliers[row, sampled], torch.from_numpy(best.x), rtol=1e-10, atol=1e-10)


def test_no_other_multipliers_in_the_box_are_better() -> None:
    """Theorem 1: 10,000 of them, from neighbours to the box's corners."""
    logits, r = instances(5, 200, share=0.2, seed=7)
    w = logits.exp()
    found = shrinkage(w, r)
    least = squared_error(found.multipliers, w, r)
    rng = torch.Generator().manual_seed(0)
    sizes = 10.0 ** (torch.arange(2000) % 7 - 6)
    noise = torch.randn(2000, *w.shape, generator=rng, dtype=torch.float64) * sizes[:, None, None]
    others = (found.multipliers + noise).clamp(max=1).maximum(r)
    assert (squared_error(others, w, r) >= least * (1 - 1e-13)).all()
    plain, weighed = (squared_error(x, w, r) for x in (torch.ones_like(r), r))
    assert (least < 0.9 * plain.minimum(weighed)).all()


def test_the_bias_is_what_the_estimate_lacks_and_its_error_is_the_formula() -> None:
    """Exactly, over every sample of ten tokens."""
    w, r = numbers(1, 0.7, 0.4, 0.2, 0.1, 0.05, 0.6, 0.01, 0.3, 0.9), numbers(*torch.linspace(0.05, 0.95, 10).tolist())
    found = shrinkage(w, r)
    z, chance = all_samples(r)
    values = torch.randn(10, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    d, n = estimate(w, values, r, z, found.multipliers)
    assert float((chance * d).sum()) == pytest.approx(float(w.sum() - found.bias))
    assert float((chance * (d - w.sum()) ** 2).sum()) == pytest.approx(float(squared_error(found.multipliers, w, r)))
    torch.testing.assert_close(chance @ n, (found.multipliers * w) @ values)


def test_batches_over_heads_are_their_rows() -> None:
    logits, r = instances(6, 64, seed=9)
    shaped = logits.view(2, 3, 64).exp()
    batch = shrinkage(shaped, r[:2, None])
    for head in range(2):
        for query in range(3):
            alone = shrinkage(shaped[head, query], r[head])
            torch.testing.assert_close(batch.bias[head, query], alone.bias, rtol=1e-12, atol=0)
            torch.testing.assert_close(batch.multipliers[head, query], alone.multipliers, rtol=1e-12, atol=0)


def test_weights_in_another_unit_have_the_same_multipliers() -> None:
    logits, r = instances(4, 100, seed=2)
    one, other = shrinkage(logits.exp(), r), shrinkage(logits.exp() * 1e-40, r)
    torch.testing.assert_close(one.multipliers, other.multipliers, rtol=1e-10, atol=0)
    torch.testing.assert_close(one.bias * 1e-40, other.bias, rtol=1e-10, atol=0)


@pytest.mark.parametrize("weights", [[0.3], [0.0], [0.0, 0.0], [1.0, 1.0, 1.0]])
def test_nothing_is_sampled(weights: list[float]) -> None:
    found = shrinkage(numbers(*weights), torch.ones(len(weights)))
    assert float(found.bias) == 0
    assert (found.multipliers == 1).all()


def test_one_token() -> None:
    """lambda = r, the box's lower end: it enters with w itself."""
    found = shrinkage(numbers(0.5), numbers(0.25))
    assert float(found.multipliers) == 0.25
    assert float(found.bias) == 0.375


def test_weights_of_zero_have_no_part() -> None:
    w, r = numbers(0.5, 0, 0.2, 0), numbers(0.25, 0.5, 0.5, 1)
    found, alone = shrinkage(w, r), shrinkage(w[[0, 2]], r[[0, 2]])
    assert float(found.bias) == float(alone.bias)
    assert torch.equal(found.multipliers[[0, 2]], alone.multipliers)
    assert float(shrinkage(torch.zeros(3), torch.full((3,), 0.5)).bias) == 0


def test_equal_tokens_get_equal_multipliers() -> None:
    found = shrinkage(torch.ones(50), torch.full((50,), 0.1))
    assert len(found.multipliers.unique()) == 1
    bias, multipliers = by_bisection([1.0] * 50, [float(torch.tensor(0.1))] * 50)
    assert float(found.bias) == pytest.approx(bias, rel=1e-10)
    assert float(found.multipliers[0]) == pytest.approx(multipliers[0], rel=1e-10)


def test_what_is_not_resident_is_not_read() -> None:
    logits, r = instances(3, 32, seed=4)
    z = drawn(r, 1)[0]
    w, values = logits.exp(), torch.randn(3, 32, 5)
    multipliers = shrinkage(w, r).multipliers
    expected = estimate(w, values, r, z, multipliers)
    found = estimate(w.masked_fill(~z, math.nan), values.masked_fill(~z[..., None], math.nan), r, z, multipliers)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_a_certain_token_must_be_there() -> None:
    with pytest.raises(CompressionError, match="1 certain tokens are not resident, expected all; fetch"):
        estimate(torch.ones(2), torch.ones(2, 1), torch.ones(2), torch.tensor([True, False]), torch.ones(2))


@pytest.mark.parametrize("chance", [0.0, -0.1, 1.1, math.nan])
def test_probabilities_that_are_none(chance: float) -> None:
    with pytest.raises(CompressionError, match=r"expected all in \(0, 1\]"):
        shrinkage(torch.ones(2), torch.tensor([0.5, chance]))
