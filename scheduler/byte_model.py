"""How many tokens per second each way of serving makes, by counting bytes.

A decode step is as long as memory takes to read the weights and what its rows attend to; a reload is as long as the
link takes to move one full KV cache. Nothing else is counted: no arithmetic, no time of the host, no prefill. All sizes
are bytes, all rates bytes per second, all times seconds. Symbols as in docs/plan.md.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """``memory`` for weights and KV (H), the rate at which it is read (W), the rate of the link to the host (L)."""

    memory: float
    bandwidth: float
    link: float

    def __post_init__(self) -> None:
        _positive("a machine", memory=self.memory, bandwidth=self.bandwidth, link=self.link)

    @property
    def rho(self) -> float:
        return self.bandwidth / self.link


@dataclass(frozen=True)
class Load:
    """``weights`` (M), and of one request the full KV (K) and what it keeps on the device while it drafts (c K).
    ``saved``: of the full KV, what a reload leaves out because it is kept as it is."""

    weights: float
    full: float
    kept: float
    saved: float = 0.0

    def __post_init__(self) -> None:
        _positive("a load", weights=self.weights, full=self.full, kept=self.kept)
        if not 0 <= self.saved < self.full:
            raise ValueError(f"a reload leaves out {self.saved}, expected less than the full KV of {self.full}")

    @property
    def moved(self) -> float:
        """Bytes of a reload."""
        return self.full - self.saved

    @property
    def c(self) -> float:
        return self.kept / self.full


@dataclass(frozen=True)
class Rounds:
    """``drafts`` per verify (x), and the tokens a verify yields (A = accepted + 1), at most x + 1."""

    drafts: int
    gained: float

    def __post_init__(self) -> None:
        if self.drafts < 1 or not 1 <= self.gained <= self.drafts + 1:
            raise ValueError(
                f"a round has at least 1 draft and yields 1 to drafts + 1 tokens, got {self.drafts} and {self.gained}"
            )


@dataclass(frozen=True)
class Prediction:
    """``rows`` requests at a time; ``iteration``: mean time of a step; ``gpu``: time memory needs for it; ``transfer``:
    time the link needs per step; ``contexts``: full KV caches on the device at a time."""

    rows: int
    tokens_per_s: float
    iteration: float
    gpu: float
    transfer: float
    contexts: int

    @property
    def link_busy(self) -> float:
        return self.transfer / self.iteration


def plain(machine: Machine, load: Load, rows: int) -> Prediction:
    """vLLM over full KV."""
    return _decoding(machine, load.weights, load.full, rows, rows)


def short(machine: Machine, load: Load, rows: int) -> Prediction:
    """The lossy cache alone, never verified."""
    return _decoding(machine, load.weights, load.kept, rows, 0)


def staggered(machine: Machine, load: Load, rounds: Rounds, rows: int) -> Prediction:
    """One of x iterations of a request verifies, at another time than other requests' (the paper's equation 3)."""
    x = rounds.drafts
    gpu = (load.weights + rows * (load.kept + load.full / x)) / machine.bandwidth
    transfer = rows * load.moved / (x * machine.link)
    iteration = max(gpu, transfer)
    rate = rows * rounds.gained / ((x + 1) * iteration)
    return Prediction(rows, rate, iteration, gpu, transfer, _in_rounds(rows, x))


def lockstep(machine: Machine, load: Load, rounds: Rounds, rows: int) -> Prediction:
    """All requests verify in the same iteration. The first reload goes on beside drafts, the others after them."""
    x, reload = rounds.drafts, load.moved / machine.link
    draft = (load.weights + rows * load.kept) / machine.bandwidth
    verify = (load.weights + rows * load.full) / machine.bandwidth
    took = max(x * draft, reload) + (rows - 1) * reload + verify
    gpu, transfer = (x * draft + verify) / (x + 1), rows * reload / (x + 1)
    return Prediction(rows, rows * rounds.gained / took, took / (x + 1), gpu, transfer, rows)


def room_plain(machine: Machine, load: Load) -> int:
    """Requests that fit with their full KV."""
    return _room(machine, load, load.full)


def room_short(machine: Machine, load: Load) -> int:
    return _room(machine, load, load.kept)


def room_lockstep(machine: Machine, load: Load) -> int:
    """Requests that fit with both caches, since all are verified at once."""
    return _room(machine, load, load.kept + load.full)


def room_staggered(machine: Machine, load: Load, drafts: int) -> int:
    """Requests that fit beside the full caches of the rounds that end: M + B c K + S K <= H."""
    low, high = 0, room_short(machine, load)
    while low < high:  # the largest number that fits; what is needed grows with it
        middle = (low + high + 1) // 2
        if load.weights + middle * load.kept + _in_rounds(middle, drafts) * load.full <= machine.memory:
            low = middle
        else:
            high = middle - 1
    return low


def rows_in_use(machine: Machine, load: Load, drafts: int) -> int | None:
    """Requests with which the link is always busy: more of them make nothing faster. None: it never is."""
    spare = (_rho(machine, load) - 1) / drafts - load.c
    return math.ceil(load.weights / (load.full * spare)) if spare > 0 else None


def balance(machine: Machine, load: Load, drafts: int, rows: int) -> float:
    """c*: below it the link decides how long an iteration is, above it memory does. Solves T_gpu(c) = T_xfer,
    for reloads of as many bytes as the load's."""
    return (_rho(machine, load) - 1) / drafts - load.weights / (rows * load.full)


def least_drafts(machine: Machine, load: Load, rows: int) -> int:
    """The shortest x at which the link is not what an iteration waits for: T_gpu(x) >= T_xfer(x)."""
    return max(1, math.ceil((_rho(machine, load) - 1) / (load.c + load.weights / (rows * load.full))))


def break_even(prediction: Prediction, drafts: int, rate: float) -> float:
    """Tokens a verify must yield (A) for a drafting mode to make ``rate`` tokens per second. More than x + 1: never."""
    return rate * (drafts + 1) * prediction.iteration / prediction.rows


def link_limit(machine: Machine, load: Load) -> float:
    """Tokens a verify must yield where the link is the limit: rho (1 - M / H), whatever context, batch and ratio are.

    Full memory makes W (1 - M / H) / K tokens per second with full KV, a link that is always busy A L / K; or more,
    where reloads leave something out."""
    return _rho(machine, load) * max(0.0, 1 - load.weights / machine.memory)


def _rho(machine: Machine, load: Load) -> float:
    """Time to reload a request's KV over the time to read it."""
    return machine.rho * load.moved / load.full


def _decoding(machine: Machine, weights: float, each: float, rows: int, contexts: int) -> Prediction:
    step = (weights + rows * each) / machine.bandwidth
    return Prediction(rows, rows / step, step, step, 0.0, contexts)


def _in_rounds(rows: int, drafts: int) -> int:
    """Full KV caches on the device (S): one that is being loaded, and those that verify in the same iteration."""
    return min(rows, 1 + math.ceil(rows / drafts))


def _room(machine: Machine, load: Load, each: float) -> int:
    return max(0, int((machine.memory - load.weights) // each))


def _positive(what: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} of {what} must be positive and finite, got {value}")
