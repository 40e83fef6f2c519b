"""Measured iteration time and link bandwidth, the two numbers the rings are denominated in."""

from collections import deque
from collections.abc import Iterable


class Measured:
    """The median of the last ``size`` measurements of a positive number, weighted by what each is worth, or a fixed
    value when one is configured."""

    def __init__(self, initial: float, fixed: bool = False, size: int = 15) -> None:
        if initial <= 0:
            raise ValueError(f"a rate or duration must be positive, got {initial}")
        self.value = initial  # a guess, until the first measurement
        self.samples = 0
        self._fixed = fixed
        self._recent: deque[tuple[float, float]] = deque(maxlen=size)  # with weights

    def observe(self, sample: float, weight: float = 1.0) -> None:
        """Take one measurement. Non-positive samples (a clock that did not advance) carry no information."""
        if self._fixed or sample <= 0:
            return
        self._recent.append((sample, weight))
        self.value = weighted_median(self._recent)
        self.samples += 1


def weighted_median(samples: Iterable[tuple[float, float]]) -> float:
    """The value with half of the weight on either side; between two values when both may claim it."""
    ordered = sorted(samples)
    half, below = sum(weight for _, weight in ordered) / 2, 0.0
    for (value, weight), (following, _) in zip(ordered, [*ordered[1:], ordered[-1]], strict=True):
        below += weight
        if below > half:
            return value
        if below == half:
            return (value + following) / 2
    return ordered[-1][0]


class Throughput:
    """``iteration`` in seconds (T_iter), ``bandwidth`` in bytes per second (L).

    Medians, because an iteration that waits for a late reload, or computes a prompt, is long: with such iterations in
    an average the next reloads would be planned to be as late.
    """

    def __init__(self, iteration: float | None = None, bandwidth: float | None = None) -> None:
        self.iteration = Measured(0.05 if iteration is None else iteration, fixed=iteration is not None)
        self.bandwidth = Measured(10e9 if bandwidth is None else bandwidth, fixed=bandwidth is not None)
        self._started: float | None = None

    @property
    def iteration_ns(self) -> int:
        return max(1, round(self.iteration.value * 1e9))

    def step(self, now: float, busy: bool) -> None:
        """Call at the start of every iteration with a monotonic clock; ``busy``: the previous one had work."""
        if self._started is not None and busy:
            self.iteration.observe(now - self._started)
        self._started = now

    def transferred(self, num_bytes: int, seconds: float) -> None:
        """A copy. A short one, such as what is left of a shared reload, says little of the link."""
        if seconds > 0:
            self.bandwidth.observe(num_bytes / seconds, num_bytes)
