"""The two measured numbers: the first measurement replaces the guess, later ones are averaged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.throughput import Average, Throughput

positive = st.floats(1e-6, 1e12)


@given(positive, positive)
def test_the_first_measurement_replaces_the_guess(guess: float, sample: float) -> None:
    average = Average(guess)
    average.observe(sample)
    assert average.value == pytest.approx(sample, rel=1e-6, abs=guess * 1e-12)
    assert average.samples == 1


@given(positive, st.lists(positive, min_size=1, max_size=20))
def test_the_average_stays_within_the_samples_and_follows_the_last(guess: float, samples: list[float]) -> None:
    average = Average(guess)
    for sample in samples:
        before = average.value
        average.observe(sample)
        assert abs(average.value - sample) <= abs(before - sample) * (1 + 1e-9) + 1e-9 * guess
    slack = 1e-9 * (guess + max(samples))
    assert min(samples) - slack <= average.value <= max(samples) + slack


def test_the_weight_of_a_later_sample() -> None:
    average = Average(1.0, weight=0.25)
    for sample in (8.0, 16.0):
        average.observe(sample)
    assert average.value == 10.0


def test_the_average_converges() -> None:
    average = Average(1e-3)
    for sample in [5.0] + [2.0] * 60:
        average.observe(sample)
    assert average.value == pytest.approx(2.0, rel=1e-4)


@pytest.mark.parametrize("sample", [0.0, -1.0])
def test_a_clock_that_did_not_advance_says_nothing(sample: float) -> None:
    average = Average(3.0)
    average.observe(sample)
    assert (average.value, average.samples) == (3.0, 0)


def test_a_fixed_value_is_never_measured() -> None:
    average = Average(3.0, fixed=True)
    average.observe(9.0)
    assert (average.value, average.samples) == (3.0, 0)


@pytest.mark.parametrize("initial", [0.0, -2.0])
def test_a_rate_must_be_positive(initial: float) -> None:
    with pytest.raises(ValueError, match=f"must be positive, got {initial}"):
        Average(initial)


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
