"""How far to draft: estimates from censored rounds, bounds, and policies that find the best length."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.draft_length import CHANCE, GRID, POLICIES, Bandit, Ema, Estimate, Fixed, fair, rate

rounds = st.lists(st.integers(0, 60).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))), max_size=40)


@given(
    st.sampled_from(sorted(POLICIES)),
    st.integers(1, 80),
    rounds,
    st.floats(0, 20),
    st.integers(1, 70),
    st.integers(1, 70),
)
def test_a_length_is_within_bounds(
    name: str, first: int, seen: list[tuple[int, int]], cost: float, least: int, most: int
) -> None:
    policy = POLICIES[name](first)
    for drafted, right in seen:
        policy.observe(drafted, right)
        aim = policy.aim(cost, least, most)
        assert 1 <= aim <= max(1, most)
        if name != "fixed":
            assert aim >= min(least, most)
        assert 0 < policy.chance <= 1


def test_a_round_without_a_wrong_draft_is_censored() -> None:
    """25 right of 25 tell more than 25 right and then a wrong one, and never lower the estimate."""
    full, failed = Estimate(0.9), Estimate(0.9)
    full.observe(25, 25)
    failed.observe(26, 25)
    assert 0.9 < failed.chance < full.chance < 1


@given(st.floats(0.3, 0.98))
def test_the_estimate_finds_the_chance(chance: float) -> None:
    rng, estimate = random.Random(0), Estimate(decay=0.99)
    for _ in range(800):
        estimate.observe(12, right_of(12, chance, rng))
    assert estimate.chance == pytest.approx(chance, abs=0.05)


@pytest.mark.parametrize("drafted", [(3, 4), (0, 1), (5, -1)])
def test_impossible_rounds_are_refused(drafted: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="right ones"):
        Estimate().observe(*drafted)


def test_a_bare_verify_says_nothing() -> None:
    policy = Ema(25)
    policy.observe(0, 0)
    assert (policy.chance, policy.aim(1, 1, 62)) == (pytest.approx(CHANCE), 25)


def test_ema_moves_one_step_a_round() -> None:
    policy = Ema(25)
    lengths = [policy.aim(3, 1, 254)]
    for _ in range(12):
        policy.observe(lengths[-1], 0)
        lengths.append(policy.aim(3, 1, 254))
    steps = [x for x in GRID if x <= 25]
    assert lengths[-1] <= 4
    assert all(a == b or steps.index(a) - steps.index(b) == 1 for a, b in pairwise(lengths))
    assert policy.aim(3, 1, 254) == policy.aim(3, 1, 254), "asking is not observing"


@pytest.mark.parametrize("name", ["ema", "bandit"])
@pytest.mark.parametrize(("chance", "cost"), [(0.5, 2.0), (0.9, 5.0), (0.975, 10.0), (0.99, 3.0)])
def test_adapting_comes_near_the_best_length(name: str, chance: float, cost: float) -> None:
    """Tokens per iteration over 300 rounds, against the best fixed length in hindsight."""
    best = max(tokens_per_iteration(Fixed(x), chance, cost) for x in GRID if x <= 62)
    found = tokens_per_iteration(POLICIES[name](25), chance, cost)
    assert found > 0.9 * best


def test_the_bandit_tries_what_the_estimate_does_not_expect() -> None:
    """Runs that all end at the eighth draft are no geometric series: 8 is best, the estimate says otherwise."""
    policy, aims = Bandit(25), []
    for _ in range(60):
        aims.append(policy.aim(1.0, 1, 62))
        policy.observe(aims[-1], min(8, aims[-1]))
    assert max(set(aims[-20:]), key=aims[-20:].count) == 8


@given(st.integers(1, 500), st.floats(0.01, 50), st.floats(0.01, 50))
def test_at_the_fair_length_all_rounds_fit(rows: int, link: float, memory: float) -> None:
    x = fair(rows, link, memory)
    assert rows * max(link, memory) <= (x + 1) * 1.0001
    assert rows * max(link, memory) > x


def right_of(drafted: int, chance: float, rng: random.Random) -> int:
    right = 0
    while right < drafted and rng.random() < chance:
        right += 1
    return right


def tokens_per_iteration(policy: Fixed | Ema | Bandit, chance: float, cost: float) -> float:
    rng, tokens, iterations = random.Random(1), 0, 0.0
    for _ in range(300):
        drafted = policy.aim(cost, 1, 62)
        right = right_of(drafted, chance, rng)
        policy.observe(drafted, right)
        tokens, iterations = tokens + right + 1, iterations + drafted + cost
    assert tokens / iterations <= 1.05 * max(rate(chance, x, cost) for x in range(1, 63))
    return tokens / iterations
