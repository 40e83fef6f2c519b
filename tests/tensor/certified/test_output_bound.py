"""The attention's output as what is certified: its promise over thousands of decisions, and what may not decide."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from benchmarks.certified_run import Exact
from compressors.poisson import inclusion
from tests.tensor.certified.instances import drawn, instances, perfect
from vericache.certified.attention import LEVELS, Outcome, Policy, Sampled, certified_attention, padded
from vericache.certified.certificate import Deviation, Numerator, Target, Weights, certificate, denominator_error
from vericache.certified.estimator import shrinkage
from vericache.certified.fetch import plan_fetch
from vericache.certified.sketch import sketch_keys, value_norms
from vericache.errors import CompressionError

HEADS, GROUP, DIM, TOKENS, TAIL, SCALE = 48, 2, 8, 200, 3, 8**-0.5
NEAR = 1 + 1e-12


@dataclass
class Heads:
    """Contexts of many heads, whose probabilities follow their weights; values have something in common, as they do."""

    keys: Tensor
    values: Tensor
    tail: tuple[Tensor, Tensor]
    query: Tensor
    r: Tensor

    @classmethod
    def of(cls, seed: int, share: float = 1 / 3) -> "Heads":
        rng = torch.Generator().manual_seed(seed)
        keys, values, tail_keys, tail_values, query = (
            torch.randn(HEADS, n, DIM, generator=rng) for n in (TOKENS, TOKENS, TAIL, TAIL, GROUP)
        )
        common = torch.randn(HEADS, 1, DIM, generator=rng)
        scores = (query @ keys.mT * SCALE).softmax(-1).amax(1)
        forced = torch.zeros(TOKENS, dtype=torch.bool)
        forced[:2] = forced[-8:] = True
        sizes = torch.full((HEADS,), 10 + (TOKENS - 10) * share, dtype=torch.float64)
        r = inclusion(scores.masked_fill(forced, float("inf")), sizes, forced, 1.0, 1e-3)
        return cls(keys, values + common, (tail_keys, tail_values + common), query, r)

    def sampled(self, seed: int, perfect: bool = True) -> Sampled:
        z = drawn(self.r, 1, seed)[0]
        places = padded(z.sum(-1), z.nonzero()[:, 1], TOKENS)
        at = places.clamp(max=TOKENS - 1)[..., None].expand(-1, -1, DIM)
        sketch = Exact(self.keys, TOKENS) if perfect else sketch_keys(self.keys)
        held = [x.gather(1, at) for x in (self.keys, self.values)]
        return Sampled(sketch, self.r, places, held[0], held[1], value_norms(self.values))

    def attend(self, policy: Policy, seed: int = 0, perfect: bool = True, fetching: bool = True) -> Outcome:
        def fetch(head: int, at: Tensor) -> tuple[Tensor, Tensor]:
            return self.keys[head, at], self.values[head, at]

        return certified_attention(
            self.query, self.sampled(seed, perfect), self.tail, SCALE, policy, fetch if fetching else None
        )

    def errors(self, outcome: Outcome) -> Tensor:
        """True ones, relative, of the output."""
        logits = self.query @ torch.cat([self.keys, self.tail[0]], 1).mT * SCALE
        exact = logits.softmax(-1) @ torch.cat([self.values, self.tail[1]], 1)
        return (outcome.output - exact).norm(dim=-1) / exact.norm(dim=-1)


def policy(eps: float, delta: float = 0.1, z: float = 0.0, max_fetch: float = 1.0) -> Policy:
    return Policy(Target(eps, delta, "output"), z=z, max_fetch=max_fetch)


@pytest.mark.parametrize("eps", [0.05, 0.1, 0.3])
def test_outputs_are_off_by_more_than_epsilon_less_often_than_delta(eps: float) -> None:
    """2,304 decisions of a perfect sketch, 12 samples of each of two worlds; many of them left tokens to chance. The
    samples alone fail where little is allowed."""
    failed, estimated, alone = [], [], []
    for draw in range(24):
        heads = Heads.of(draw % 2)
        outcome = heads.attend(policy(eps), seed=draw)
        assert (outcome.error <= eps).all()
        failed.append(heads.errors(outcome) > max(eps, 1e-5))
        estimated.append(outcome.error > 0)
        alone.append(heads.errors(heads.attend(policy(eps), draw, fetching=False)) > eps)
    assert torch.stack(failed).double().mean() < 0.1
    assert torch.stack(failed).double().mean(0).max() < 0.25  # of one query: 12 samples
    assert torch.stack(estimated).double().mean() > 0.2
    assert torch.stack(alone).double().mean() > 0.1 or eps == 0.3


def test_the_output_takes_more_than_the_denominator() -> None:
    heads = Heads.of(0)
    one, both = heads.attend(Policy(Target(0.1), z=0.0, max_fetch=1.0)), heads.attend(policy(0.1))
    assert (both.fetched >= one.fetched).all()
    assert both.fetched.sum() > one.fetched.sum()
    assert heads.errors(both).mean() < heads.errors(one).mean()


def test_a_certificate_holds_for_a_sketch_within_its_radius() -> None:
    errors, outcomes = [], []
    for draw in range(4):
        heads = Heads.of(3)
        outcomes.append(heads.attend(policy(0.2, z=1.0), draw, perfect=False))
        errors.append(heads.errors(outcomes[-1]))
    assert all((outcome.error <= 0.2).all() for outcome in outcomes)
    assert (torch.stack(errors) > 0.2).double().mean() < 0.1


def test_a_smaller_epsilon_or_delta_fetches_more() -> None:
    heads = Heads.of(1)
    fetched = [int(heads.attend(policy(eps)).fetched.sum()) for eps in (0.5, 0.3, 0.1, 0.05)]
    assert fetched == sorted(set(fetched))
    assert heads.attend(policy(0.3, delta=0.001)).fetched.sum() > fetched[1]


def test_as_epsilon_goes_to_0_it_is_dense_attention() -> None:
    heads = Heads.of(2)
    for eps in (0.0, 1e-9):
        outcome = heads.attend(policy(eps, max_fetch=0.5))
        assert heads.errors(outcome).max() < 1e-5
        assert (outcome.error == 0).all()
        assert outcome.certain.all() or eps > 0


def test_a_sample_only_says_which_of_a_row_of_sets_is_taken() -> None:
    """Whatever the draws, what becomes certain is one of few sets, each a part of the next: the bound covers all."""
    heads = Heads.of(4)
    found = torch.stack([heads.attend(policy(0.3), seed).certain for seed in range(16)])
    several = 0
    for head in range(HEADS):
        sets = found[:, head].unique(dim=0)
        sets = sets[sets.sum(-1).argsort()]
        assert len(sets) <= LEVELS + 1
        assert (sets[1:] | ~sets[:-1]).all()
        several += len(sets) > 1
    assert several


def test_delta_is_shared_by_both_sums_and_all_sets() -> None:
    """With nothing fetched, the certificate is the formula's, for the norm of the estimate."""
    heads = Heads.of(5)
    sampled = heads.sampled(0)
    outcome = certified_attention(heads.query, sampled, heads.tail, SCALE, policy(0.3), None)
    logits = heads.query @ torch.cat([heads.keys, heads.tail[0]], 1).mT * SCALE
    r = torch.nn.functional.pad(heads.r, (0, TAIL), value=1.0)[:, None]
    weights, delta = Weights.of(logits, r), 0.1 / LEVELS / 2
    multipliers = shrinkage(weights.upper, r).multipliers
    norms = torch.nn.functional.pad(value_norms(heads.values), (0, TAIL))[:, None]
    bound = Deviation.of(weights.upper * norms, r, multipliers).bound(delta)
    length = outcome.output.norm(dim=-1) * (outcome.log_total - weights.shift[..., 0]).exp()
    of_n, of_d = bound / (length - bound), denominator_error(weights, r, delta)
    expected = torch.where((bound < length) & (of_d < 1), (of_n + of_d) / (1 - of_d), torch.inf)
    torch.testing.assert_close(outcome.error, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("equal", [True, False])
def test_it_never_grows_when_a_token_becomes_certain(equal: bool) -> None:
    """For values of one length. For others the variance and the largest term never do, and the whole hardly ever."""
    logits, r = instances(20, 60, share=0.2, seed=6)
    rng = torch.Generator().manual_seed(0)
    order = torch.rand(r.shape, generator=rng).argsort(-1)
    norms = torch.ones_like(r) if equal else torch.rand(r.shape, generator=rng, dtype=torch.float64) + 0.5
    weights = perfect(logits, r)
    numerator = Numerator(norms, (weights.upper * norms).sum(-1) * 0.8)
    last, previous = None, torch.full((20,), torch.inf, dtype=torch.float64)
    for k in range(61):
        fewer = r.scatter(-1, order[:, :k], 1.0)
        terms = Deviation.of(weights.upper * norms, fewer, shrinkage(weights.upper, fewer).multipliers)
        error = certificate(weights, fewer, Target(0.1, 0.1, "output"), numerator)
        now = torch.stack([terms.variance, terms.largest])
        assert last is None or (now <= last * NEAR).all()
        assert (error <= previous * (NEAR if equal else 1.05)).all()
        last, previous = now, error
    assert (previous == 0).all()


def test_what_is_fetched_for_the_output_is_enough_and_one_less_is_not() -> None:
    logits, r = instances(40, 150, share=0.4, seed=3, spread=1.0)
    norms = torch.rand(r.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    weights, target = perfect(logits, r), Target(0.3, 0.1, "output")
    numerator = Numerator(norms, (weights.upper * norms).sum(-1) * 0.9)
    fetch = plan_fetch(weights, r, target, numerator=numerator)
    assert (fetch.error <= 0.3).all()
    assert len(fetch.count.unique()) > 3
    later = r.masked_fill(fetch.chosen, 1.0)
    assert torch.equal(fetch.error, certificate(weights, later, target, numerator))
    alone = plan_fetch(weights, r, replace(target, bound="denominator"))
    assert (alone.count <= fetch.count).all()


def test_long_values_are_fetched_first() -> None:
    """Of tokens that differ in nothing else."""
    r = torch.full((40,), 0.2)
    weights = perfect(torch.zeros(40), r)
    norms = torch.where(torch.arange(40) % 4 == 0, 4.0, 1.0)
    numerator = Numerator(norms, norms.double().sum())
    fetch = plan_fetch(weights, r, Target(0.5, 0.1, "output"), numerator=numerator)
    count = int(fetch.count)
    assert 0 < count < 40
    assert fetch.chosen[::4].sum() == min(count, 10)


def test_norms_are_rounded_up() -> None:
    values = torch.randn(3, 500, 16, generator=torch.Generator().manual_seed(0))
    values = values * torch.logspace(-12, 3.5, 500)[:, None]
    values[:, 7] = 0
    norms, exact = value_norms(values), values.double().norm(dim=-1)
    assert norms.dtype == torch.float16
    assert (norms.double() >= exact).all()
    assert (norms.double() <= exact * 1.002 + 1e-7).all()
    assert not norms[:, 7].any()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 7e4])
def test_values_that_have_no_norm(wrong: float) -> None:
    values = torch.zeros(1, 4, 8)
    values[0, 2, 0] = wrong
    with pytest.raises(CompressionError, match="1 of 4 values are not finite or longer than 65504"):
        value_norms(values)
