"""Requests for the simulator: a number that is there at a time, or arrivals from a trace."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class Job:
    """One request: tokens of its prompt and of its output, the chance that a draft is right, when it arrives
    (seconds). Its prompt begins with ``common`` tokens of a ``document`` that others ask about, too."""

    name: str
    prompt: int
    output: int
    chance: float
    arrival: float = 0.0
    common: int = 0
    document: int = 0
    started: float | None = field(default=None, compare=False)
    first: float | None = field(default=None, compare=False)  # its first token
    ended: float | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Shape:
    """What requests look like: means, and how far they spread on both sides of them (0: all the same). Of the prompt
    ``common`` tokens are those of a document, about which ``sharers`` requests ask, one after the other."""

    prompt: int
    output: int
    chance: float
    spread: float = 0.25
    common: int = 0
    sharers: int = 1

    def __post_init__(self) -> None:
        if self.prompt < 1 or self.output < 1 or not 0 <= self.chance <= 1 or not 0 <= self.spread < 1:
            raise ValueError(
                f"expected at least one token of each, a chance in [0, 1] and a spread in [0, 1), got {self}"
            )
        if self.sharers < 1 or not 0 <= self.common <= self.prompt * (1 - self.spread):
            raise ValueError(f"expected sharers, and no more common tokens than the shortest prompt has, got {self}")

    def job(self, number: int, rng: random.Random, arrival: float = 0.0) -> Job:
        def spread(mean: int) -> int:
            return max(1, round(mean * rng.uniform(1 - self.spread, 1 + self.spread)))

        wrong = min(1.0, (1 - self.chance) * rng.uniform(1 - self.spread, 1 + self.spread))
        prompt, output, document = spread(self.prompt), spread(self.output), number // self.sharers
        return Job(f"r{number}", prompt, output, 1 - wrong, arrival, self.common, document)


def poisson(shape: Shape, rate: float, seconds: float, rng: random.Random) -> Iterator[Job]:
    """Arrivals at ``rate`` per second."""
    at = 0.0
    for i in range(10**9):
        at += rng.expovariate(rate)
        if at > seconds:
            return
        yield shape.job(i, rng, at)


def trace(rows: Iterable[Sequence[str]], chance: float) -> list[Job]:
    """From rows of arrival (seconds), prompt tokens, output tokens and, if there is a fourth, chance of a right draft.

    Raises:
        ValueError: a row that is none of these, with its number.
    """
    jobs = []
    for number, row in enumerate(rows, start=1):
        try:
            arrival, prompt, output = float(row[0]), int(row[1]), int(row[2])
            right = float(row[3]) if len(row) > 3 else chance
            if arrival < 0 or prompt < 1 or output < 1 or not 0 <= right <= 1:
                raise ValueError("out of range")
        except (ValueError, IndexError):
            raise ValueError(
                f"row {number} of the trace is {list(row)}, expected arrival (s), prompt tokens, output tokens, and if "
                f"you like the chance of a right draft"
            ) from None
        jobs.append(Job(f"r{number - 1}", prompt, output, right, arrival))
    return sorted(jobs, key=lambda job: job.arrival)
