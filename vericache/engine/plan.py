"""What the coordinator decides for one step."""

from dataclasses import dataclass, field

from vericache.engine.detached import Detached
from vericache.engine.ops import CertifiedRow, DraftRow, Op, ProbeRow, VerifyRow


@dataclass(frozen=True)
class Bounds:
    """Limits of the engine: context length, requests at once, tokens per step, steps in flight, scoring rows per step;
    and whether a request's draft rows are its own batch row, as vLLM's V2 runner wants it."""

    max_model_len: int
    seats: int
    step_tokens: int
    depth: int
    scoring_rows: int
    own_rows: bool


@dataclass(frozen=True)
class Verify:
    """A verify row of one step: ``drafts`` on top of the pending token at position ``context``."""

    record: Detached
    row: VerifyRow
    context: int
    drafts: list[int]


@dataclass(frozen=True)
class Draft:
    """A draft row of one step: its token is at ``position``, ``before`` drafts of the round precede it."""

    record: Detached
    row: DraftRow
    position: int
    before: int


@dataclass(frozen=True)
class Certify:
    """A certified row of one step: the request's pending token at position ``context``."""

    record: Detached
    row: CertifiedRow


@dataclass(frozen=True)
class Probing:
    """A scoring row of one step: ``tokens[start:]`` are computed."""

    record: Detached
    row: ProbeRow
    tokens: list[int]
    start: int


@dataclass
class StepPlan:
    """One step's extra rows and operations, and what to settle when its result is known."""

    drafts: list[Draft] = field(default_factory=list)
    verifies: list[Verify] = field(default_factory=list)
    certified: list[Certify] = field(default_factory=list)
    probes: list[Probing] = field(default_factory=list)
    settling: list[Detached] = field(default_factory=list)  # compressions issued in this step
    folds: list[tuple[int, int]] = field(default_factory=list)  # (arena slot, strips of its tail to pack)
    drops: list[int] = field(default_factory=list)  # arena slots to empty
    ended: list[str] = field(default_factory=list)  # requests that ended, or became plain rows, since the last step
    before: list[Op] = field(default_factory=list)
    after: list[Op] = field(default_factory=list)
    forget: list[str] = field(default_factory=list)  # row ids the workers can drop before this step
    rejoin: list[Detached] = field(default_factory=list)  # plain rows again, KV still in vLLM's blocks
    recompute: list[Detached] = field(default_factory=list)  # plain rows again, KV gone (host store full)

    @property
    def probe_tokens(self) -> int:
        return sum(len(p.tokens) - p.start for p in self.probes)

    @property
    def num_tokens(self) -> int:
        return (
            len(self.drafts) + len(self.certified) + sum(1 + len(v.drafts) for v in self.verifies) + self.probe_tokens
        )
