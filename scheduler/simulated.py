"""What ``scheduler.simulator`` runs on: the machine and the settings, requests, and the tally of what happened."""

from dataclasses import dataclass

from scheduler.byte_model import Machine
from scheduler.draft_length import POLICIES, DraftLength
from scheduler.workload import Job

PAGE = 16  # tokens
MODES = ("plain", "lockstep", "staggered", "auto")


@dataclass(frozen=True)
class Setup:
    """``mode``: of MODES; ``lockstep`` and ``staggered`` always draft. ``weights`` in bytes, ``token`` bytes of one
    token's KV; ``ratio`` of the context is kept, ``packed`` of a token's bytes in the arena, which has ``arena`` of the
    memory beside the weights."""

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

    def __post_init__(self) -> None:
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
    rounds: int = 0
    returning: bool = False

    @property
    def context(self) -> int:
        return self.job.prompt + self.made

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


def pages(tokens: int) -> int:
    return -(-tokens // PAGE)
