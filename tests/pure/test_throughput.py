"""The two measured numbers are medians; a fixed one is never measured."""

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.throughput import Measured, Throughput, weighted_median

positive = st.floats(1e-6, 1e12)


@given(positive, st.lists(positive, min_size=1, max_size=40))
def test_the_median_of_the_last_measurements_replaces_the_guess(guess: float, samples: list[float]) -> None:
    found = Measured(guess, size=5)
    for sample in samples:
        found.observe(sample)
    assert found.value == median(samples[-5:])
    assert found.samples == len(samples)


@pytest.mark.parametrize("sample", [0.0, -1.0])
def test_a_clock_that_did_not_advance_says_nothing(sample: float) -> None:
    found = Measured(3.0)
    found.observe(sample)
    assert (found.value, found.samples) == (3.0, 0)


def test_a_fixed_value_is_never_measured() -> None:
    found = Measured(3.0, fixed=True)
    found.observe(9.0)
    assert (found.value, found.samples) == (3.0, 0)


@pytest.mark.parametrize("initial", [0.0, -2.0])
def test_a_rate_must_be_positive(initial: float) -> None:
    with pytest.raises(ValueError, match=f"must be positive, got {initial}"):
        Measured(initial)


@pytest.mark.parametrize("kwargs", [{"iteration": 0.0}, {"bandwidth": 0.0}, {"iteration": -1.0}, {"bandwidth": -1.0}])
def test_a_configured_value_that_is_not_positive_is_refused(kwargs: dict[str, float]) -> None:
    """Zero as well: the default must not silently take its place."""
    with pytest.raises(ValueError, match="must be positive"):
        Throughput(**kwargs)


def test_iterations_are_measured_from_start_to_start() -> None:
    throughput = Throughput()
    for now in (10.0, 10.5, 11.0):
        throughput.step(now, busy=True)
    assert throughput.iteration.value == pytest.approx(0.5)
    assert throughput.iteration.samples == 2
    assert throughput.iteration_ns == 500_000_000


def test_an_idle_iteration_is_not_measured_but_restarts_the_clock() -> None:
    throughput = Throughput()
    throughput.step(10.0, busy=True)
    throughput.step(99.0, busy=False)
    assert throughput.iteration.samples == 0
    throughput.step(99.25, busy=True)
    assert throughput.iteration.value == pytest.approx(0.25)


def test_bandwidth_is_measured_from_transfers_that_took_time() -> None:
    throughput = Throughput()
    guess = throughput.bandwidth.value
    throughput.transferred(100, 0.0)
    throughput.transferred(0, 2.0)
    assert throughput.bandwidth.value == guess
    throughput.transferred(3000, 2.0)
    assert throughput.bandwidth.value == pytest.approx(1500.0)


def test_configured_values_stay() -> None:
    throughput = Throughput(iteration=0.02, bandwidth=5e9)
    throughput.step(1.0, busy=True)
    throughput.step(9.0, busy=True)
    throughput.transferred(10, 1.0)
    assert (throughput.iteration.value, throughput.bandwidth.value) == (0.02, 5e9)
    assert throughput.iteration_ns == 20_000_000


def test_an_iteration_is_never_zero_nanoseconds_long() -> None:
    assert Throughput(iteration=1e-12).iteration_ns == 1


def test_iterations_that_wait_for_late_reloads_do_not_count() -> None:
    """Iterations of 10 ms, every third of which waits for 80 ms more."""
    throughput, now = Throughput(), 0.0
    for i in range(30):
        throughput.step(now, busy=True)
        now += 0.09 if i % 3 == 0 else 0.01
    assert throughput.iteration.value == pytest.approx(0.01)


@given(st.lists(st.tuples(positive, st.floats(1, 1e9)), min_size=1, max_size=20))
def test_half_of_the_weight_is_on_either_side(samples: list[tuple[float, float]]) -> None:
    found, whole = weighted_median(samples), sum(weight for _, weight in samples)
    for side in (sum(w for v, w in samples if v < found), sum(w for v, w in samples if v > found)):
        assert side <= whole / 2 * (1 + 1e-9)


def test_short_copies_say_little_of_the_link() -> None:
    """Those behind a shared reload take as long as it takes to start a copy."""
    throughput = Throughput(bandwidth=None)
    for _ in range(3):
        throughput.transferred(4_000_000_000, 0.1)
        for _ in range(4):
            throughput.transferred(2_000_000, 0.001)
    assert throughput.bandwidth.value == 4e10
