"""What ``scheduler.simulator`` runs on: the machine and the settings, requests, and the tally of what happened."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from scheduler.byte_model import Machine
from scheduler.draft_length import POLICIES, DraftLength
from scheduler.lifecycle import State, Track
from scheduler.workload import Job

PAGE = 16  # tokens
MODES = ("plain", "lockstep", "staggered", "auto")


@dataclass(frozen=True)
class Setup:
    """``mode``: of MODES; ``lockstep`` and ``staggered`` always draft. ``weights`` in bytes, ``token`` bytes of one
    token's KV; ``ratio`` of the context is kept, ``packed`` of a token's bytes in the arena, which has ``arena`` of the
    memory beside the weights. ``shared``: who drafts on one document verifies on one reload of it. ``residual``:
    reloads leave out what is kept, but for a document that others draft on, too."""

    machine: Machine
    mode: str
    weights: float
    token: float
    ratio: float = 0.25
    packed: float = 1.0
    arena: float = 0.5
    draft_length: int = 25
    draft_policy: str = "ema"
    window: int = 64
    verify_tokens: int = 300
    tail_tokens: int = 512
    seats: int = 1024
    shared: bool = True
    residual: bool = False

    def __post_init__(self) -> None:
        if self.residual and self.packed != 1:
            raise ValueError(f"residual reloads need tokens as they are, and packed is {self.packed}")
        if self.mode not in MODES or self.draft_policy not in POLICIES:
            raise ValueError(f"expected a mode of {MODES} and a draft policy of {tuple(POLICIES)}, got {self}")

    @property
    def pages(self) -> int:
        """Pages of full KV."""
        share = 1.0 if self.mode == "plain" else 1 - self.arena
        return int(share * (self.machine.memory - self.weights) / self.page_bytes)

    @property
    def page_bytes(self) -> float:
        return self.token * PAGE


@dataclass
class Row:
    """One request in the engine. ``made`` tokens of output; of a detached one what it keeps, and its drafts."""

    job: Job
    lengths: DraftLength
    made: int = 0
    since: int = -(10**9)
    kept: float = 0.0  # bytes in the arena
    reserved: float = 0.0
    filled: int = 0  # context when it was compressed
    leaves_at: float = 0.0  # when its demotion is done
    loaded_at: float = 0.0
    pages: int = 0  # transient
    shares: bool = False  # of these, the document's are those of others, too
    here: bool = False  # which another one has reloaded
    rounds: int = 0
    returning: bool = False

    @property
    def context(self) -> int:
        return self.job.prompt + self.made

    @property
    def common(self) -> int:
        """Full pages of its document."""
        return self.job.common // PAGE

    @property
    def left(self) -> int:
        return self.job.output - self.made


@dataclass
class Tally:
    """What happened, from ``clear`` on."""

    seconds: float = 0.0
    iterations: int = 0
    tokens: int = 0
    reloads: int = 0
    drafted: int = 0
    right: int = 0
    demotions: int = 0
    promotions: int = 0
    preemptions: int = 0
    held: int = 0  # iterations x requests in which drafting would not have paid
    link: float = 0.0  # seconds the link was busy towards the device
    waited: float = 0.0  # seconds that iterations waited for reloads
    rows: float = 0.0  # plain rows, summed over iterations
    drafting: float = 0.0
    peak_pages: int = 0


def sharers(row: Row, rows: Iterable[Row]) -> list[Row]:
    """Others that have a document in common with it."""
    return [r for r in rows if row.common and r.job.document == row.job.document and r is not row]


def transient(rows: Iterable[Row]) -> int:
    """Pages that rows hold, those of a document once for all who share it."""
    found, here = 0, set[int]()
    for row in rows:
        found += row.pages
        if row.shares:
            found -= row.common if row.job.document in here else 0
            here.add(row.job.document)
    return found


def distinct(rows: Iterable[Row]) -> float:
    """Tokens of the rows' contexts, those of a document once, over all of them."""
    every, once, here = 0, 0, set[int]()
    for row in rows:
        every += row.context
        once += row.context - (row.common * PAGE if row.job.document in here else 0)
        here.add(row.job.document)
    return once / every if every else 1.0


def fetched(setup: Setup, row: Row, rows: Iterable[Row]) -> float:
    """Tokens of a reload that come over the link, were nothing of it there."""
    if not setup.residual:
        return row.context
    whole = row.common * PAGE if setup.shared and row.common and sharers(row, rows) else 0
    return row.context - setup.ratio * max(0, row.filled - whole)


def crossing(setup: Setup, rows: Collection[Row]) -> float:
    """Their share of the rows' contexts; as it is to be expected where there are none."""
    every = sum(row.context for row in rows)
    if not setup.residual or not every:
        return 1 - setup.ratio * setup.residual
    return sum(fetched(setup, row, rows) for row in rows) / every


def pages(tokens: int) -> int:
    return -(-tokens // PAGE)


def letters(
    plain: Iterable[str], tracks: Mapping[str, Track], drafts: Iterable[str], verifies: Iterable[str]
) -> dict[str, str]:
    """One iteration of the picture: a letter per request."""
    found = dict.fromkeys(plain, "R")
    for name, track in tracks.items():
        found[name] = {State.DEMOTING: "C", State.LOADING: "l"}.get(track.state, ".")
    for name in drafts:
        found[name] = "L" if tracks[name].state is State.LOADING else "D"
    return found | dict.fromkeys(verifies, "V")
