"""Runs of the simulator, and what they tell: one engine or a fleet, one load or many."""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from statistics import mean
from typing import Any

from scheduler.acceptance import Acceptance, accepted
from scheduler.advice import Workload
from scheduler.arena import auto_share, draft_share
from scheduler.simulated import Setup, Tally
from scheduler.simulator import Engine
from scheduler.workload import Job, Shape, poisson

WARM = 1 / 3  # of the simulated time passes before anything is counted
PICTURE = 120  # iterations that the Gantt picture shows


@dataclass(frozen=True)
class Load:
    """``requests`` at a time, each replaced when it ends; or, where it is None, ``jobs`` that arrive."""

    requests: int | None
    jobs: Sequence[Job] = ()


@dataclass(frozen=True)
class Study:
    """``shape`` of the requests, ``seconds`` of simulated time, ``engines`` that requests are dealt out to in turn."""

    setup: Setup
    shape: Shape
    seconds: float
    engines: int = 1
    seed: int = 0

    def run(self, load: Load, tick: Callable[[float], None] = lambda share: None) -> "Outcome":
        """``tick`` is told which share of the time has passed."""
        outcomes = []
        for i in range(self.engines):
            mine = replace(load, jobs=[replace(job) for job in load.jobs[i :: self.engines]])
            if load.requests is not None:
                mine = replace(mine, requests=len(range(i, load.requests, self.engines)))
            outcomes.append(self._one(mine, self.seed + i, lambda share, i=i: tick((i + share) / self.engines)))  # type: ignore[misc]
        return Outcome.of(outcomes)

    def _one(self, load: Load, seed: int, tick: Callable[[float], None]) -> "Outcome":
        rng, new = random.Random(seed), count()
        closed = load.requests is not None
        engine = Engine(
            self.setup, random.Random(seed + 1), (lambda _: self.shape.job(next(new), rng)) if closed else None
        )
        engine.trace = deque(maxlen=PICTURE)
        engine.add(load.jobs)
        if load.requests:
            # In the middle of their outputs, so that they do not all end together.
            first = [self.shape.job(next(new), rng) for _ in range(load.requests)]
            for job in first:
                job.output = max(1, round(job.output * rng.random()))
            engine.add(first)
        warm = self.seconds * WARM if closed else 0.0
        end = warm + self.seconds if closed else float("inf")
        counting = not closed
        while engine.now < end and engine.busy:
            if not counting and engine.now >= warm:
                counting, engine.tally, engine.ended = True, Tally(), []
            engine.step()
            if engine.tally.iterations % 64 == 0:
                tick(min(1.0, engine.now / end) if closed else len(engine.ended) / max(1, len(load.jobs)))
        return Outcome(engine.tally, engine.ended, list(engine.trace), 1)


@dataclass(frozen=True)
class Outcome:
    """Of a fleet: sums over its engines, the picture of the first."""

    tally: Tally
    ended: list[Job]
    trace: list[dict[str, str]]
    engines: int

    @classmethod
    def of(cls, parts: "Sequence[Outcome]") -> "Outcome":
        total = Tally()
        for part in parts:
            for name, value in vars(part.tally).items():
                setattr(total, name, getattr(total, name) + value)
        return cls(total, [job for part in parts for job in part.ended], parts[0].trace, len(parts))

    @property
    def rate(self) -> float:
        """Tokens per second of all engines."""
        return self.tally.tokens / self.tally.seconds * self.engines if self.tally.seconds else 0.0

    def figures(self) -> dict[str, Any]:
        """For JSON and CSV. Seconds, tokens, shares; means over iterations."""
        tally = self.tally
        rounds, turns = max(1, tally.reloads), max(1, tally.iterations)
        waits = [job.first - job.arrival for job in self.ended if job.first is not None]
        lasts = [job.ended - job.arrival for job in self.ended if job.ended is not None]
        return {
            "tokens_per_s": round(self.rate, 3),
            "requests_ended": len(self.ended),
            "first_token_s": round(mean(waits), 4) if waits else None,
            "request_s": round(mean(lasts), 4) if lasts else None,
            "iteration_ms": round(1e3 * tally.seconds / turns, 4),
            "plain_rows": round(tally.rows / turns, 2),
            "drafting_rows": round(tally.drafting / turns, 2),
            "draft_length": round(tally.drafted / rounds, 2),
            "accepted": round(tally.right / rounds, 2),
            "link_busy": round(tally.link / tally.seconds, 4) if tally.seconds else 0.0,
            "waited": round(tally.waited / tally.seconds, 4) if tally.seconds else 0.0,
            "reloads": tally.reloads,
            "demotions": tally.demotions,
            "promotions": tally.promotions,
            "preemptions": tally.preemptions,
            "held": round(tally.held / turns, 2),
            "peak_pages": tally.peak_pages,
        }


def variants(setup: Setup, ablations: bool) -> Iterator[tuple[str, Setup]]:
    """Modes by name; the ablations are of mode auto and of always drafting."""
    yield "plain", replace(setup, mode="plain")
    yield "lockstep", replace(setup, mode="lockstep", draft_policy="fixed")
    yield "staggered", replace(setup, mode="staggered")
    yield "auto", replace(setup, mode="auto")
    if ablations:
        yield "staggered, fixed length", replace(setup, mode="staggered", draft_policy="fixed")
        yield "auto, fixed length", replace(setup, mode="auto", draft_policy="fixed")
        yield "auto, bandit", replace(setup, mode="auto", draft_policy="bandit")
        yield "staggered, own reloads", replace(setup, mode="staggered", shared=False)
        if setup.packed == 1:
            yield "staggered, residual reloads", replace(setup, mode="staggered", residual=True)
            yield "auto, residual reloads", replace(setup, mode="auto", residual=True)


def with_arena(setup: Setup, shape: Shape) -> Setup:
    """With the arena that an engine of this mode would choose (arena_fraction auto) if it knew the load: none for auto
    where drafting does not pay; where all requests draft, one for as many as memory holds."""
    tail = setup.token * shape.output / 2
    # A slot is reserved for its longest tail.
    held = setup.token * (min(setup.tail_tokens, shape.output) + setup.window)
    seen = Acceptance(accepted(shape.chance, setup.draft_length) / setup.draft_length, setup.draft_length, setup.ratio)
    full = setup.token * shape.prompt + tail
    work = Workload(setup.weights, full, seen, setup.packed, tail, reserve=held - tail, residual=setup.residual)
    if setup.mode == "auto":
        share = auto_share(setup.machine, work, setup.ratio, setup.draft_length).fraction
    else:
        share = draft_share(setup.machine, work, setup.ratio, setup.draft_length)
    return replace(setup, arena=share)


def arrivals(shape: Shape, rate: float, seconds: float, seed: int) -> list[Job]:
    return list(poisson(shape, rate, seconds, random.Random(seed)))
