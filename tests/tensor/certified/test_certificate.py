"""The certificate: its terms exactly, that it covers, that it never grows when a token becomes certain."""

import math

import pytest
import torch
from hypothesis import given
from torch import Tensor

from tests.tensor.certified.instances import all_samples, drawn, instances, perfect, small_queries
from tests.tensor.compressor_runs import quick
from vericache.certified.certificate import Deviation, Target, Weights, denominator_error, numerator_error, output_error
from vericache.certified.estimator import estimate, shrinkage
from vericache.errors import CompressionError, ConfigError

NEAR = 1 + 1e-12


def values_of(n: int, dim: int = 4, seed: int = 0) -> Tensor:
    """Around a common mean, as values are."""
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5


@quick
@given(query=small_queries(most=8))
def test_every_term_is_that_of_all_samples(query: tuple[Tensor, Tensor]) -> None:
    """Mean, variance, largest term and coverage, over every sample; the multipliers are the best, or any others."""
    w, r = query
    z, chance = all_samples(r)
    for multipliers in (shrinkage(w, r).multipliers, (r + 1) / 2):
        deviation = Deviation.of(w, r, multipliers)
        errors = estimate(w, values_of(len(w)), r, z, multipliers)[0] - w.sum()
        assert float(chance @ errors) == pytest.approx(-float(deviation.bias), abs=1e-9)
        assert float(chance @ (errors + deviation.bias).square()) == pytest.approx(float(deviation.variance), rel=1e-6)
        terms = multipliers * (w / r) * (z.double() - r)
        assert float(terms.abs().amax()) == pytest.approx(float(deviation.largest), rel=1e-9)
        for delta in (0.01, 0.1, 0.5, 0.9):
            assert float(chance[errors.abs() > deviation.bound(delta) * NEAR].sum()) <= delta


@quick
@given(query=small_queries(most=8))
def test_the_bound_of_the_numerator_covers(query: tuple[Tensor, Tensor]) -> None:
    """Of vectors, and of the output around itself, over every sample."""
    w, r = query
    values = values_of(len(w))
    z, chance = all_samples(r)
    multipliers = shrinkage(w, r).multipliers
    _, n = estimate(w, values, r, z, multipliers)
    errors = (n - w @ values).norm(dim=-1)
    deviation = Deviation.of(w * values.norm(dim=-1), r, multipliers)
    assert (deviation.bias >= (chance @ n - w @ values).norm() * (1 - 1e-9) - 1e-12).all()
    for delta in (0.1, 0.5, 0.9):
        assert float(chance[errors > deviation.bound(delta) * NEAR + 1e-12].sum()) <= delta
    if w.sum() > 0:
        around = (w @ values) / w.sum()
        _, n = estimate(w, values - around, r, z, multipliers)
        centred = Deviation.of(w * (values - around).norm(dim=-1), r, multipliers)
        assert float(chance[n.norm(dim=-1) > centred.bound(0.5) * NEAR + 1e-12].sum()) <= 0.5


def test_errors_of_many_draws_are_the_deviation() -> None:
    logits, r = instances(8, 400, seed=1)
    w = perfect(logits, r).upper
    found = shrinkage(w, r)
    z = drawn(r, 4000)
    errors = estimate(w, torch.zeros(1, 400, 1), r, z, found.multipliers)[0] - w.sum(-1)
    deviation = Deviation.of(w, r, found.multipliers)
    torch.testing.assert_close(deviation.bias, found.bias, rtol=1e-9, atol=0)
    assert ((errors.mean(0) + found.bias).abs() < 5 * (deviation.variance / 4000).sqrt()).all()
    torch.testing.assert_close(errors.var(0), deviation.variance, rtol=0.2, atol=0)
    bound = denominator_error(perfect(logits, r), r, 0.1)
    assert float((errors.abs() / w.sum(-1) > bound).double().mean()) < 0.1


def test_the_certificate_is_the_formula() -> None:
    """Eq. 7 for one token of w = 1 / 2 and r = 1 / 4 beside a certain one of 1: lambda = r, beta = 3 / 8, V = 3 / 64,
    b = 3 / 8."""
    r = torch.tensor([1.0, 0.25])
    weights = perfect(torch.tensor([1.0, 0.5]).double().log(), r)
    log = math.log(20)
    expected = (3 / 8 + log / 8 + math.sqrt((log / 8) ** 2 + 2 * 3 / 64 * log)) / 1.5
    assert float(denominator_error(weights, r, 0.1)) == pytest.approx(expected)


@pytest.mark.parametrize(("spread", "share"), [(0.0, 0.3), (1.0, 1 / 16), (3.0, 0.2)])
def test_it_never_grows_when_a_token_becomes_certain(spread: float, share: float) -> None:
    """Nor does any of its terms, whatever the order: 20 random ones."""
    logits, r = instances(20, 60, share=share, seed=6, spread=spread)
    order = torch.rand(r.shape, generator=torch.Generator().manual_seed(0)).argsort(-1)
    weights, last = perfect(logits, r), None
    for k in range(61):
        fewer = r.scatter(-1, order[:, :k], 1.0)
        multipliers = shrinkage(weights.upper, fewer).multipliers
        terms = Deviation.of(weights.upper, fewer, multipliers)
        error = denominator_error(weights, fewer, 0.1)
        now = torch.stack([terms.bias, terms.variance, terms.largest, error])
        assert last is None or (now <= last * NEAR).all()
        last = now
    assert last is not None
    assert (last == 0).all()


def test_a_sketch_within_its_radius_covers_the_true_weights() -> None:
    logits, r = instances(50, 200, seed=8)
    sigma = torch.rand(r.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noise = (torch.rand(r.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 2 - 1) * 1.5 * sigma
    weights = Weights.of(logits + torch.where(r < 1, noise, 0.0), r, sigma, z=1.5)
    multipliers = shrinkage(weights.upper, r).multipliers
    true = weights.exact(logits)
    terms = Deviation.of(true, r, multipliers)
    assert (terms.bound(0.1) / true.sum(-1) <= denominator_error(weights, r, 0.1)).all()
    assert (weights.total <= true.sum(-1) * NEAR).all()
    assert (weights.upper * NEAR >= true).all()
    assert torch.equal(weights.upper[r == 1], true[r == 1])


def test_a_wider_radius_is_a_wider_certificate() -> None:
    logits, r = instances(10, 100, seed=8)
    errors = [denominator_error(Weights.of(logits, r, torch.full_like(r, 0.3), z), r, 0.1) for z in (0.0, 0.5, 1.0)]
    assert (errors[0] < errors[1]).all()
    assert (errors[1] < errors[2]).all()
    assert torch.equal(errors[0], denominator_error(Weights.of(logits, r), r, 0.1))


def test_a_radius_beyond_all_numbers_certifies_nothing() -> None:
    r = torch.tensor([0.5, 0.5])
    weights = Weights.of(torch.zeros(2), r, torch.full((2,), 1e4), z=1.0)
    assert float(denominator_error(weights, r, 0.1)) == math.inf
    assert float(denominator_error(weights, torch.ones(2), 0.1)) == 0


def test_the_output_keeps_the_target_when_both_sums_keep_their_share() -> None:
    share = torch.tensor(0.2 / 2.2)
    assert float(output_error(share, share)) == pytest.approx(0.2)
    assert float(output_error(torch.tensor(0.1), torch.tensor(1.0))) == math.inf


def test_the_output_is_as_exact_as_its_certificate_says() -> None:
    """Of 4,000 decisions, no more than delta are off by more, whether both sums are bounded or the output itself."""
    logits, r = instances(20, 300, share=0.5, seed=11, spread=1.0)
    w, values = perfect(logits, r).upper, values_of(300)
    multipliers = shrinkage(w, r).multipliers
    z = drawn(r, 200)
    d, n = estimate(w, values, r, z, multipliers)
    exact = (w @ values) / w.sum(-1, keepdim=True)
    errors = (n / d[..., None] - exact).norm(dim=-1)
    bound = Deviation.of(w * values.norm(dim=-1), r, multipliers).bound(0.05)
    certified = output_error(numerator_error(bound, n.norm(dim=-1)), denominator_error(perfect(logits, r), r, 0.05))
    assert float(certified.median()) < 2  # it says something
    assert float((errors > certified * exact.norm(dim=-1)).double().mean()) <= 0.1
    around = Deviation.of(w * (values - exact[:, None]).norm(dim=-1), r, multipliers).bound(0.1)
    assert float((errors > around / d).double().mean()) <= 0.1


def test_the_numerator_without_anything_left() -> None:
    errors = numerator_error(torch.tensor([0.0, 0.5, 1.0, 2.0]), torch.tensor([0.0, 1.0, 1.0, 1.0]))
    assert errors.tolist() == [0, 1, math.inf, math.inf]


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e8])
def test_huge_logits(scale: float) -> None:
    """One token has all the weight; in which unit makes no difference."""
    logits = torch.tensor([-scale, 0.0, scale, scale - 40])
    r = torch.tensor([0.5, 0.1, 1.0, 0.2])
    error = denominator_error(perfect(logits, r), r, 0.1)
    assert error.isfinite().all()
    torch.testing.assert_close(error, denominator_error(perfect(logits + 3 * scale, r), r, 0.1), rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("gap", [1e-6, 1e-12, 2.0**-53])
def test_probabilities_next_to_one(gap: float) -> None:
    """The certificate goes to the largest step of Bernstein's bound, w l 2 / 3, since a token may still be missing."""
    r = torch.full((5,), 1 - gap, dtype=torch.float64)
    error = float(denominator_error(perfect(torch.zeros(5), r), r, 0.1))
    assert error == pytest.approx(math.log(20) * 2 / 3 / 5, rel=0.02)
    assert float(denominator_error(perfect(torch.zeros(5), r), torch.ones(5), 0.1)) == 0


@pytest.mark.parametrize("eps", [-0.01, 1.0, math.nan, math.inf])
def test_a_relative_error_that_is_none(eps: float) -> None:
    with pytest.raises(ConfigError, match=r"eps is .*, expected 0 <= eps < 1; 0\.05 is a good choice"):
        Target(eps=eps)


@pytest.mark.parametrize("delta", [0.0, -0.1, 1.0, 2.0, math.nan])
def test_a_probability_of_failure_that_is_none(delta: float) -> None:
    logits, r = instances(1, 20)
    for ask in (lambda: Target(delta=delta), lambda: denominator_error(perfect(logits, r), r, delta)):
        with pytest.raises(ConfigError, match=r"delta is .*, expected a probability 0 < delta < 1; 0\.1 is a good"):
            ask()


@pytest.mark.parametrize("z", [-1.0, math.nan, math.inf])
def test_a_radius_that_is_none(z: float) -> None:
    with pytest.raises(ConfigError, match="expected a finite number of standard deviations"):
        Weights.of(torch.zeros(2), torch.ones(2), torch.ones(2), z)


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
def test_logits_that_are_none(logit: float) -> None:
    with pytest.raises(CompressionError, match="1 of 2 logits are not finite"):
        Weights.of(torch.tensor([0.0, logit]), torch.ones(2))
