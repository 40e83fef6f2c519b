"""Typed messages between the scheduler process and the workers: batch rows, KV operations, their results.

The scheduler owns every id (device blocks, host pages, arena slots); a worker only moves bytes between the ids
it is told. Operations run in order, so whatever an earlier step still does with an id is done before a later
operation can give it to somebody else.
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from compressors import MethodSpec
from vericache.certified.attention import Policy
from vericache.certified.certificate import Bound
from vericache.certified.decided import Decided
from vericache.engine.score_parts import ScorePart


@dataclass(frozen=True)
class DraftRow:
    """A one-token decode row of request ``parent_id`` that reads the arena slot instead of vLLM's pages."""

    row_id: str
    parent_id: str
    slot: int
    base: int  # context tokens when the slot was filled: tail index = position - base


@dataclass(frozen=True)
class VerifyRow:
    """The request's own row over its reloaded pages; its K/V also refreshes the slot's tail."""

    row_id: str
    slot: int
    base: int


@dataclass(frozen=True)
class ProbeRow:
    """One row of a scoring pass over the request's device pages ``blocks``."""

    row_id: str
    parent_id: str
    slot: int
    index: int  # which probe of the pass
    context: int
    spec: MethodSpec
    blocks: tuple[int, ...]
    replay: bool  # known positions: K/V must not be written again
    first: bool  # of the rows of its pass


@dataclass(frozen=True)
class CertifiedRow:
    """The request's own one-token row, which reads the arena slot and host pages (``vericache.certified``)."""

    row_id: str
    slot: int
    base: int
    policy: Policy


Row = DraftRow | VerifyRow | ProbeRow | CertifiedRow


@dataclass(frozen=True)
class Offload:
    """Copy device blocks to host pages."""

    request_id: str
    blocks: tuple[int, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True)
class Compress:
    """Select from the scored context in ``blocks`` and fill the arena slot."""

    request_id: str
    slot: int
    blocks: tuple[int, ...]
    context: int
    spec: MethodSpec
    probes: int  # scoring rows that must have been seen
    pages: tuple[int, ...] = ()  # the context's host pages, where decode is certified: absent tokens are fetched there
    known: tuple[ScorePart, ...] = ()  # scores that are held, in place of further rows
    keep: tuple[ScorePart, ...] = ()  # scores to hold from now on
    forget: tuple[int, ...] = ()  # ids of parts not to be held any longer
    bound: Bound = "denominator"  # what is certified, where decode is
    block_tokens: int | None = None  # of a block, where reloads are to leave out what is kept


@dataclass(frozen=True)
class Load:
    """Copy host pages to device blocks, before the forward pass. What arena slot ``slot`` holds of them comes from
    there: ``blocks`` are the request's from its block ``first`` on, of which the ``whole`` leading ones come from the
    host."""

    request_id: str
    pages: tuple[int, ...]
    blocks: tuple[int, ...]
    slot: int | None = None
    first: int = 0
    whole: int = 0


@dataclass(frozen=True)
class WriteBack:
    """Copy the blocks a verify row has written to their host pages, after the forward pass."""

    request_id: str
    blocks: tuple[int, ...]
    pages: tuple[int, ...]


Op = Offload | Compress | Load | WriteBack


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What one step does beyond vLLM's own rows."""

    drops: tuple[int, ...] = ()  # slots to empty before this step's rows are looked at: a row may fill one again
    rows: tuple[Row, ...] = ()
    before: tuple[Op, ...] = ()
    after: tuple[Op, ...] = ()
    folds: tuple[tuple[int, int], ...] = ()  # (slot, strips of its tail to pack), before anything else
    ended: tuple[str, ...] = ()  # requests that left a round: a reload under way must land before its blocks are reused

    @property
    def needs_start(self) -> bool:
        """Something must happen before the forward pass."""
        return bool(
            self.folds or self.drops or self.ended or self.before or any(isinstance(r, VerifyRow) for r in self.rows)
        )


@dataclass(frozen=True)
class Failure:
    """An operation on a request's KV that raised. ``op`` is the operation's class name."""

    request_id: str
    op: str
    message: str


MEASURED = "Measured"  # a Transfer that served nothing but to measure the link at the start


@dataclass(frozen=True)
class Transfer:
    """Bytes moved over the link by one operation, and the time it took (seconds). ``op`` is the operation's class name,
    or ``MEASURED``; ``kept``: bytes that the device held already."""

    op: str
    num_bytes: int
    seconds: float
    kept: int = 0


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """A worker's answer to one ``StepMetadata``."""

    failures: list[Failure] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    compressed: dict[str, int] = field(default_factory=dict)  # request -> head pages used
    simulated: dict[str, int] = field(default_factory=dict)  # where pages are: request -> bytes of packed ones
    arena_bytes: int = 0  # held by slots after this step
    certified: dict[str, Decided] = field(default_factory=dict)  # by request, of its row in this step
    kept: dict[str, int] = field(default_factory=dict)  # where reloads leave them out: request -> bytes of kept tokens

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepReport":
        """Combine the ranks' reports: every failure counts, sizes are the largest rank's. What reloads leave out is the
        smallest: they take as long as the one with the most to fetch."""
        assert isinstance(other, StepReport)

        def largest(mine: dict[str, int], theirs: dict[str, int]) -> dict[str, int]:
            return {k: max(mine.get(k, 0), theirs.get(k, 0)) for k in mine | theirs}

        requests = self.certified | other.certified
        return StepReport(
            self.failures + other.failures,
            max(self.transfers, other.transfers, key=lambda ts: sum(t.seconds for t in ts)),
            largest(self.compressed, other.compressed),
            largest(self.simulated, other.simulated),
            max(self.arena_bytes, other.arena_bytes),
            {k: self.certified.get(k, Decided()) + other.certified.get(k, Decided()) for k in requests},
            {k: min(n, other.kept.get(k, n)) for k, n in (other.kept | self.kept).items()},
        )
