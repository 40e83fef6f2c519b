"""How far a request should draft, from how its rounds went.

A policy is asked for the aim of the next round (x) and told how each round ended. A round in which every draft was
accepted is censored: it says that drafts were right x times, not when the next one would have been wrong.
"""

import math
from typing import Protocol

from scheduler.acceptance import accepted

GRID = (2, 4, 6, 8, 12, 16, 20, 25, 32, 40, 50, 62, 80, 100, 128, 180, 254)  # lengths that are tried
CHANCE = 0.975  # that a draft is right, before any round: KVzip's on SmolLM2-135M at ratio 0.25
TRIALS = 12.0  # what that is worth, in drafts


class DraftLength(Protocol):
    """``cost``: what a round costs beside its drafts, in iterations. ``least`` and ``most`` bound the answer; ``least``
    gives way."""

    @property
    def chance(self) -> float:
        """That a draft is right when those before it were."""

    def aim(self, cost: float, least: int, most: int) -> int: ...

    def observe(self, drafted: int, right: int) -> None:
        """A round verified ``drafted`` drafts, of which the first ``right`` were accepted."""


class Estimate:
    """The chance of a right draft: decayed counts of right ones and of all that were put to the test. After a wrong
    draft the rest of its round was not (a geometric distribution with censoring on the right)."""

    def __init__(self, chance: float = CHANCE, decay: float = 0.85) -> None:
        self._right, self._tried, self._decay = chance * TRIALS, TRIALS, decay

    @property
    def chance(self) -> float:
        return self._right / self._tried

    def observe(self, drafted: int, right: int) -> None:
        if not 0 <= right <= drafted:
            raise ValueError(f"a round of {drafted} drafts has 0 to {drafted} right ones, got {right}")
        if drafted:
            self._right = self._decay * self._right + right
            self._tried = self._decay * self._tried + right + (right < drafted)


class Fixed(Estimate):
    """Always the same length, whoever waits for it."""

    def __init__(self, length: int, chance: float = CHANCE) -> None:
        super().__init__(chance)
        self._length = length

    def aim(self, cost: float, least: int, most: int) -> int:
        return clamp(self._length, 1, most)


class Ema(Estimate):
    """The length with most tokens per iteration by the estimate, one step of the grid at a time."""

    def __init__(self, length: int, chance: float = CHANCE) -> None:
        super().__init__(chance)
        self._length, self._moved = length, False

    def aim(self, cost: float, least: int, most: int) -> int:
        if self._moved:
            self._moved = False
            best = max(GRID, key=lambda x: (rate(self.chance, x, cost), -x))
            if best != self._length:
                between = [x for x in GRID if (self._length < x <= best) or (best <= x < self._length)]
                self._length = min(between, key=lambda x: abs(x - self._length))
        return clamp(self._length, least, most)

    def observe(self, drafted: int, right: int) -> None:
        super().observe(drafted, right)
        self._moved = drafted > 0


class Bandit(Estimate):
    """Discounted upper confidence bounds: every length of the grid is an arm, tokens per iteration its reward. A round
    of x drafts also tells what each shorter round would have yielded, and a longer one when a draft was wrong."""

    def __init__(self, length: int, chance: float = CHANCE, discount: float = 0.9) -> None:
        super().__init__(chance)
        self._first, self._discount = length, discount
        self._plays = dict.fromkeys(GRID, 0.0)
        self._tokens = dict.fromkeys(GRID, 0.0)

    def aim(self, cost: float, least: int, most: int) -> int:
        total = sum(self._plays.values())
        if not total:
            return clamp(self._first, least, most)
        allowed = [x for x in GRID if least <= x <= most] or [clamp(self._first, least, most)]
        scale = max(rate(self.chance, x, cost) for x in allowed)

        def bound(x: int) -> float:
            plays = self._plays.get(x, 0.0)
            if plays < 0.5:  # hardly known: what the estimate says, and no bonus, so that 17 arms need no 17 rounds
                return rate(self.chance, x, cost)
            mean = self._tokens[x] / plays / (x + cost)
            return mean + 0.1 * scale * math.sqrt(math.log(1 + total) / plays)

        return max(allowed, key=lambda x: (bound(x), -x))

    def observe(self, drafted: int, right: int) -> None:
        super().observe(drafted, right)
        if not drafted:
            return
        for x in GRID:
            self._plays[x] *= self._discount
            self._tokens[x] *= self._discount
            if x <= drafted or right < drafted:
                self._plays[x] += 1
                self._tokens[x] += 1 + min(x, right)


POLICIES: dict[str, type[Fixed] | type[Ema] | type[Bandit]] = {"fixed": Fixed, "ema": Ema, "bandit": Bandit}


def fair(rows: float, link: float, memory: float) -> int:
    """The shortest length with which ``rows`` requests that draft all get their rounds. A round takes ``link`` of the
    link's time and ``memory`` of the pages for reloads, in iterations. Who drafts shorter makes others wait."""
    return math.ceil(rows * max(link, memory)) - 1


def rate(chance: float, drafts: int, cost: float) -> float:
    """Tokens per iteration of rounds of ``drafts`` that take ``drafts + cost`` iterations."""
    return (1 + accepted(chance, drafts)) / (drafts + cost)


def clamp(length: int, least: int, most: int) -> int:
    return max(1, min(max(length, least), most))
