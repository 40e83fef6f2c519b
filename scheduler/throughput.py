"""Measured iteration time and link bandwidth, the two numbers the rings are denominated in."""


class Average:
    """Exponential moving average, or a fixed value when one is configured."""

    def __init__(self, initial: float, fixed: bool = False, weight: float = 0.2) -> None:
        if initial <= 0:
            raise ValueError(f"a rate or duration must be positive, got {initial}")
        self.value = initial
        self.samples = 0
        self._fixed, self._weight = fixed, weight

    def observe(self, sample: float) -> None:
        """Take one measurement. Non-positive samples (a clock that did not advance) carry no information."""
        if self._fixed or sample <= 0:
            return
        # The initial value is only a guess: the first measurement replaces it.
        weight = self._weight if self.samples else 1.0
        self.value += weight * (sample - self.value)
        self.samples += 1


class Throughput:
    """``iteration`` in seconds (T_iter), ``bandwidth`` in bytes per second (L)."""

    def __init__(self, iteration: float | None = None, bandwidth: float | None = None) -> None:
        self.iteration = Average(0.05 if iteration is None else iteration, fixed=iteration is not None)
        self.bandwidth = Average(10e9 if bandwidth is None else bandwidth, fixed=bandwidth is not None)
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
        if seconds > 0:
            self.bandwidth.observe(num_bytes / seconds)
