"""Which way of serving is worth it: every mode at the given settings, and the best settings there are."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from scheduler import byte_model as model
from scheduler.acceptance import Acceptance
from scheduler.byte_model import Load, Machine, Prediction, Rounds
from scheduler.residency import Mix, Pace

RATIOS = (0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75)
TRIED = 500  # numbers of drafting rows that are compared
DRAFTS = (4, 8, 12, 16, 20, 25, 32, 40, 50, 62)  # 62: the most that the default window holds
ARENAS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7)
WORTH = 1.05  # times plain vLLM's rate: less is within the model's error


@dataclass(frozen=True)
class Workload:
    """``weights`` and one request's ``full`` KV, in bytes; of it ``packed`` is what kept tokens take (1: the model's
    dtype), and ``tail`` bytes follow the compressed context uncompressed. ``batch`` requests are there at a time; None:
    as many as fit and make the engine faster. ``reserve``: bytes of the arena that are set aside for a request beyond
    what it keeps on average; ``drafting``: how many can draft at a time, whose full KV host memory must hold;
    ``residual``: reloads leave out what is kept, which is in the model's dtype."""

    weights: float
    full: float
    acceptance: Acceptance
    packed: float = 1.0
    tail: float = 0.0
    batch: int | None = None
    reserve: float = 0.0
    drafting: int | None = None
    residual: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.packed <= 1 or not 0 <= self.tail < self.full or (self.batch is not None and self.batch < 1):
            raise ValueError(
                f"expected packed in (0, 1], a tail smaller than the full KV and a batch of at least 1, got {self}"
            )

    def load(self, ratio: float) -> Load:
        """With ``ratio`` of the context kept."""
        kept = ratio * (self.full - self.tail)
        return Load(self.weights, self.full, self.packed * kept + self.tail, kept if self.residual else 0.0)

    def rows(self, room: int) -> int:
        return room if self.batch is None else min(room, self.batch)

    def drafters(self, room: int) -> int:
        return room if self.drafting is None else min(room, self.drafting)


@dataclass(frozen=True)
class Choice:
    """A mode and its settings. A plain engine has none."""

    mode: str
    prediction: Prediction
    ratio: float | None = None
    drafts: int | None = None


def baseline(machine: Machine, work: Workload) -> Prediction:
    """Plain vLLM.

    Raises:
        ValueError: not one request fits, and so none can be verified either.
    """
    load = work.load(1.0)
    rows = work.rows(model.room_plain(machine, load))
    if not rows:
        raise ValueError(
            f"weights of {work.weights / 1e9:.1f} GB and the full KV of one request, {work.full / 1e9:.1f} GB, exceed "
            f"the memory of {machine.memory / 1e9:.1f} GB; every verify needs that much"
        )
    return model.plain(machine, load, rows)


def modes(machine: Machine, work: Workload, ratio: float, drafts: int) -> dict[str, Prediction]:
    """Every mode by name, at the same ratio and draft length; without the drafting modes that memory has no room
    for."""
    load = work.load(ratio)
    found = {
        "plain": baseline(machine, work),
        "short": model.short(machine, load, work.rows(model.room_short(machine, load))),
    }
    rounds = Rounds(drafts, work.acceptance.gained(ratio, drafts))
    if rows := work.rows(model.room_lockstep(machine, load)):
        found["lockstep"] = model.lockstep(machine, load, rounds, rows)
    room = model.room_staggered(machine, load, drafts)
    if work.batch is None and (enough := model.rows_in_use(machine, load, drafts)) is not None:
        room = min(room, enough)
    if rows := work.rows(room):
        found["staggered"] = model.staggered(machine, load, rounds, rows)
    return found


def elastic(machine: Machine, work: Workload, ratio: float, drafts: int, arena: float) -> Prediction | None:
    """Mode auto with all the requests it can use: plain rows in what the contexts of rounds and ``arena`` leave of the
    memory beside the weights, of which that is a share; drafting rows in the arena, as many as help. None: no room."""
    load, room = work.load(ratio), machine.memory - work.weights
    rounds = Rounds(drafts, work.acceptance.gained(ratio, drafts))
    pace = Pace(load.weights / machine.bandwidth, 1 / machine.bandwidth, 1 / machine.link)
    best: Prediction | None = None
    most, alone = work.rows(int(room / load.kept)), int((1 - arena) * room / load.full)
    # While all fit as plain rows, nobody drafts.
    slots = min(most, work.drafters(int(arena * room / (load.kept + work.reserve)))) if alone < most else 0
    for drafting in range(0, slots + 1, 1 + slots // TRIED):
        contexts = 1 + math.ceil(drafting / drafts) if drafting else 0
        plain = int(((1 - arena) * room - contexts * load.full) / load.full)
        if plain < 0:
            break
        plain = min(plain, most - drafting)
        read, moved = drafting * (load.kept + load.full / drafts), drafting * load.moved / drafts
        mix = Mix(plain, plain * load.full, drafting * rounds.gained / (drafts + 1), read, moved)
        rate, gpu = mix.rate(pace), (load.weights + plain * load.full + read) / machine.bandwidth
        if rate and (best is None or rate > best.tokens_per_s):
            best = Prediction(
                plain + drafting, rate, max(gpu, moved / machine.link), gpu, moved / machine.link, contexts
            )
    return best


def recommend(
    machine: Machine, work: Workload, ratios: Iterable[float] = RATIOS, drafts: Iterable[int] = DRAFTS
) -> Choice:
    """Staggered drafting with the best of these settings, where it beats plain vLLM by more than the model's error."""
    base, settings = baseline(machine, work), product(ratios, drafts)
    found = [(modes(machine, work, ratio, x).get("staggered"), ratio, x) for ratio, x in settings]
    choices = [Choice("staggered", prediction, ratio, x) for prediction, ratio, x in found if prediction]
    best = max(choices, key=lambda choice: choice.prediction.tokens_per_s, default=None)
    if best is None or best.prediction.tokens_per_s < WORTH * base.tokens_per_s:
        return Choice("plain", base)
    return best
