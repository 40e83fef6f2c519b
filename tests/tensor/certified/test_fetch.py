"""KVFetch: the least that must be fetched, chosen without a look at the sample, and that its decisions hold."""

import inspect
import math

import pytest
import torch
from torch import Tensor

from tests.tensor.certified.instances import drawn, instances, perfect
from vericache.certified.certificate import Target, Weights, denominator_error
from vericache.certified.estimator import estimate, shrinkage
from vericache.certified.fetch import Fetch, fetch_ranks, plan_fetch, united
from vericache.errors import ConfigError


def after(fetch: Fetch, r: Tensor) -> Tensor:
    """Probabilities once the chosen tokens are there."""
    return r.masked_fill(fetch.chosen, 1.0)


@pytest.mark.parametrize("eps", [0.01, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("share", [1 / 8, 1 / 16])
def test_decisions_fail_less_often_than_delta(eps: float, share: float) -> None:
    """10,000 decisions, of 100 queries over heavy-tailed weights; without fetching far more of them would fail."""
    logits, r = instances(100, 400, share=share, seed=17)
    weights, target = perfect(logits, r), Target(eps, 0.1)
    fetch = plan_fetch(weights, r, target)
    assert (fetch.error <= eps).all()
    later, z = after(fetch, r), drawn(r, 100)
    multipliers, none = shrinkage(weights.upper, later).multipliers, torch.zeros(1, 400, 0)

    def failures(chances: Tensor, multipliers: Tensor) -> Tensor:  # of each query
        total = weights.upper.sum(-1)
        d, _ = estimate(weights.upper, none, chances, z | (chances == 1), multipliers)
        return ((d / total - 1).abs() > eps).double().mean(0)

    assert failures(later, multipliers).max() < 0.1
    assert failures(later, multipliers).mean() < 0.02  # Bernstein's slack
    if eps < 0.3:
        assert failures(r, shrinkage(weights.upper, r).multipliers).mean() > 0.2
        assert 0 < fetch.count.double().mean() < 0.9 * 400


@pytest.mark.parametrize("shortlist", [0, 8, 128])
def test_one_token_less_is_not_enough(shortlist: int) -> None:
    logits, r = instances(40, 150, share=0.2, seed=3)
    weights, target = perfect(logits, r), Target(0.1, 0.1)
    fetch = plan_fetch(weights, r, target, shortlist)
    ranks = fetch_ranks(weights.upper, r, shortlist)
    counts = torch.arange(151)
    enough = torch.stack(
        [denominator_error(weights, r.masked_fill(ranks < k, 1.0), target.delta) <= target.eps for k in counts]
    )
    assert torch.equal(enough, counts[:, None] >= fetch.count)
    assert torch.equal(fetch.chosen.sum(-1), fetch.count)
    assert torch.equal(fetch.error, denominator_error(weights, after(fetch, r), target.delta))
    assert (r[fetch.chosen] < 1).all()
    assert len(fetch.count.unique()) > 5


def test_the_best_order_is_no_worse_than_that_of_each_tokens_own_effect() -> None:
    logits, r = instances(10, 80, share=0.3, seed=5)
    weights, target = perfect(logits, r), Target(0.05, 0.1)
    single = torch.stack(
        [denominator_error(weights, r.index_fill(-1, torch.tensor([i]), 1.0), target.delta) for i in range(80)], -1
    )
    effect = denominator_error(weights, r, target.delta)[:, None] - single
    places = effect.masked_fill(r == 1, -1.0).argsort(dim=-1, descending=True, stable=True).argsort(-1)
    for row, count in enumerate(plan_fetch(weights, r, target).count.tolist()):
        best = min(
            k
            for k in range(81)
            if denominator_error(weights, r.masked_fill(places < k, 1.0), target.delta)[row] <= target.eps
        )
        assert count <= 1.1 * best + 1


def test_the_sample_has_no_say_in_what_is_fetched() -> None:
    """Residency is an argument of the estimate alone; another sample changes only what must be copied."""
    assert "resident" in inspect.signature(estimate).parameters
    for function in (Weights.of, shrinkage, denominator_error, fetch_ranks, plan_fetch):
        assert "resident" not in inspect.signature(function).parameters
    logits, r = instances(5, 200, seed=2)
    copied = []
    for seed in range(5):
        z = drawn(r, 1, seed)[0]
        chosen = plan_fetch(perfect(logits, r), r, Target()).chosen
        assert torch.equal(chosen, plan_fetch(perfect(logits, r), r, Target()).chosen)
        copied.append(chosen & ~z)
    assert any(not torch.equal(copied[0], other) for other in copied[1:])


def test_the_shortlist_is_sorted_by_share_and_the_rest_by_weight() -> None:
    logits, r = instances(6, 120, share=0.2, seed=4)
    w = logits.exp()
    multipliers = shrinkage(w, r).multipliers
    share = w * (1 - multipliers) + multipliers * w * ((1 - r) / r).sqrt()
    for row in range(6):
        order = fetch_ranks(w, r, 20)[row].argsort()
        sampled = int((r[row] < 1).sum())
        first, rest, certain = order[:20], order[20:sampled], order[sampled:]
        assert (share[row, first].diff() <= 0).all()
        assert (w[row, rest].diff() <= 0).all()
        assert w[row, first].min() >= w[row, rest].max()
        assert (r[row, certain] == 1).all()
        assert sorted(order.tolist()) == list(range(120))


def test_equal_tokens_are_fetched_in_their_order() -> None:
    r = torch.full((50,), 0.2)
    weights = perfect(torch.zeros(50), r)
    assert torch.equal(fetch_ranks(weights.upper, r, 10), torch.arange(50))
    fetch = plan_fetch(weights, r, Target(0.1))
    assert torch.equal(fetch.chosen, torch.arange(50) < fetch.count)
    assert 0 < int(fetch.count) < 50


def test_nothing_is_fetched_where_the_sample_is_good_enough() -> None:
    r = torch.tensor([1.0, 0.5, 0.5])
    fetch = plan_fetch(perfect(torch.tensor([0.0, -9.0, -9.0]), r), r, Target(0.1))
    assert int(fetch.count) == 0
    assert not fetch.chosen.any()
    assert 0 < float(fetch.error) <= 0.1
    assert not fetch.excessive


def test_a_target_of_zero_fetches_everything() -> None:
    logits, r = instances(3, 30)
    fetch = plan_fetch(perfect(logits, r), r, Target(0.0), max_fetch=0.5)
    assert torch.equal(fetch.chosen, r < 1)
    assert (fetch.error == 0).all()
    assert fetch.excessive.all()


@pytest.mark.parametrize("n", [1, 5])
def test_nothing_is_sampled(n: int) -> None:
    fetch = plan_fetch(perfect(torch.zeros(2, n), torch.ones(n)), torch.ones(n), Target())
    assert not fetch.chosen.any()
    assert (fetch.count == 0).all()
    assert (fetch.error == 0).all()


def test_one_sampled_token() -> None:
    r = torch.tensor([0.5])
    fetch = plan_fetch(perfect(torch.zeros(1), r), r, Target())
    assert fetch.chosen.tolist() == [True]
    assert float(fetch.error) == 0


def test_a_weight_of_zero_is_never_fetched_for_nothing() -> None:
    r = torch.tensor([1.0, 0.5, 0.5])
    fetch = plan_fetch(perfect(torch.tensor([0.0, -1e6, 0.0]), r), r, Target())
    assert fetch.chosen.tolist() == [False, False, True]


def test_decisions_above_the_limit_are_excessive() -> None:
    logits, r = instances(60, 100, seed=6)
    fetch = plan_fetch(perfect(logits, r), r, Target(0.1), max_fetch=0.2)
    least = plan_fetch(perfect(logits, r), r, Target(0.1))
    assert not least.excessive.any()
    assert torch.equal(fetch.excessive, least.count > 20)
    assert len(fetch.excessive.unique()) == 2
    assert torch.equal(fetch.count, torch.where(fetch.excessive, (r < 1).sum(-1), least.count))


def test_queries_of_a_head_share_what_is_fetched() -> None:
    """Three queries with one sample: the union is enough for each, and does not depend on the sample either."""
    logits, _ = instances(6, 100, seed=7)
    r = instances(2, 100, seed=8)[1][:, None]  # [H, 1, n]
    weights = perfect(logits.view(2, 3, 100), r)
    fetch = plan_fetch(weights, r, Target(0.1))
    both = united(fetch.chosen)
    assert both.shape == (2, 1, 100)
    errors = denominator_error(weights, r.masked_fill(both, 1.0), 0.1)
    assert (errors <= fetch.error * (1 + 1e-12)).all()
    assert (both | ~fetch.chosen).all()


def test_a_wider_radius_fetches_more() -> None:
    logits, r = instances(30, 200, seed=9)
    sigma = torch.full_like(r, 0.3)
    counts = [plan_fetch(Weights.of(logits, r, sigma, z), r, Target()).count for z in (0.0, 1.0)]
    assert (counts[0] <= counts[1]).all()
    assert (counts[0] < counts[1]).any()


def test_a_second_call_with_exact_logits_makes_good_what_a_sketch_missed() -> None:
    """What was fetched is exact then; the certificate holds again, and nothing that was fetched is dropped."""
    logits, r = instances(30, 200, seed=10)
    noise = torch.randn(r.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 0.7
    guessed = torch.where(r < 1, logits + noise, logits)
    first = plan_fetch(Weights.of(guessed, r), r, Target())
    later = after(first, r)
    weights = Weights.of(torch.where(later == 1, logits, guessed), later)
    second = plan_fetch(weights, later, Target())
    assert (second.count > 0).any()
    assert not (second.chosen & first.chosen).any()
    assert (denominator_error(weights, after(second, later), 0.1) <= 0.05).all()


@pytest.mark.parametrize("scale", [1e3, 1e6])
def test_huge_logits(scale: float) -> None:
    logits, r = instances(5, 50, seed=11)
    fetch = plan_fetch(perfect(logits * scale, r), r, Target())
    assert (fetch.error <= 0.05).all()
    assert (fetch.count <= 2).all()


@pytest.mark.parametrize(
    ("shortlist", "max_fetch", "error"),
    [(-1, 0.25, "shortlist is -1"), (128, 1.5, "max_fetch is 1.5"), (128, math.nan, "max_fetch is nan")],
)
def test_settings_that_are_none(shortlist: int, max_fetch: float, error: str) -> None:
    with pytest.raises(ConfigError, match=rf"{error}, expected"):
        plan_fetch(perfect(torch.zeros(1), torch.ones(1)), torch.ones(1), Target(), shortlist, max_fetch)
