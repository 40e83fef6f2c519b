"""The worker side of VeriCache: executes typed operations and resolves typed rows against the batch."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from compressors import Shape
from vericache.draft.kept import KeptPages
from vericache.draft.runtime import DraftRuntime, Observed
from vericache.draft.step import ArenaRow
from vericache.engine.certified_rows import CertifiedRows
from vericache.engine.compression import CompressionWorker
from vericache.engine.ops import (
    MEASURED,
    CertifiedRow,
    Compress,
    DraftRow,
    Failure,
    Load,
    Offload,
    Op,
    ProbeRow,
    StepMetadata,
    StepReport,
    Transfer,
    VerifyRow,
    WriteBack,
)
from vericache.engine.pages import PageLayout
from vericache.store.transfer import CopyEngine, Direction, Ticket

logger = logging.getLogger("vllm.vericache")


@dataclass(frozen=True)
class BatchRows:
    """This step's rows in batch order: which belong to an arena slot, whose K/V vLLM's pages must not get (draft rows
    own none, replayed probes own theirs already), and the scoring rows' token ranges."""

    slots: list[ArenaRow | None]
    unwritten: list[bool]
    observed: Observed


class KVWorker:
    """Owns the worker's arena and copies; holds no request state. One ``StepReport`` per step."""

    def __init__(
        self,
        shape: Shape,
        runtime: DraftRuntime,
        layout: PageLayout,
        caches: list[Tensor],
        copies: CopyEngine,
        certified: CertifiedRows | None = None,
    ) -> None:
        self.runtime, self.arena, self.copies = runtime, runtime.arena, copies
        self.certified = certified
        runtime.reader = certified
        self._layout, self._caches = layout, caches
        self.compression = CompressionWorker(self.arena, shape, layout, caches, certified)
        self._report = StepReport()
        self._started: StepMetadata | None = None
        self._lost: set[str] = set()  # requests whose reload failed in this step
        self._loads: dict[str, Ticket] = {}  # reloads that no verify row has waited for
        measured = copies.measure()
        # Copies not yet reported, and bytes that they left out.
        self._running = [(MEASURED, measured, 0)] if measured is not None else []

    # -- before the forward pass, from the runner ----------------------------------------------------

    def start(self, metadata: StepMetadata) -> None:
        """Once per step, before anything else of it: what ended requests held may be used again from here on."""
        if self._started is metadata:
            return
        self._started = metadata
        self.copies.fence()
        for request_id in metadata.ended:
            if (ticket := self._loads.pop(request_id, None)) is not None:
                self.copies.wait(ticket)
        for slot, strips in metadata.folds:
            self.arena.fold(slot, strips)
        for slot in metadata.drops:
            self.compression.drop(slot)

    def match(self, metadata: StepMetadata, req_ids: Sequence[str], query_start: Sequence[int]) -> BatchRows:
        """Find the typed rows in a batch; called before ``run_before`` in steps that have rows."""
        self.start(metadata)
        by_id = {row.row_id: row for row in metadata.rows}
        found = BatchRows([], [], [])
        for index, req_id in enumerate(req_ids):
            row = by_id.get(req_id)
            if isinstance(row, ProbeRow):
                lo, hi = query_start[index], query_start[index + 1]
                found.observed.append((lo, hi, self.compression.scoring_row(row)))
            is_draft = isinstance(row, DraftRow | CertifiedRow)
            found.unwritten.append(is_draft or (isinstance(row, ProbeRow) and row.replay))
            in_slot = row if isinstance(row, DraftRow | VerifyRow | CertifiedRow) else None
            policy = row.policy if isinstance(row, CertifiedRow) else None
            found.slots.append(ArenaRow(in_slot.slot, in_slot.base, is_draft, policy) if in_slot is not None else None)
        return found

    # -- operations, from the connector ----------------------------------------------------------------

    def run_before(self, metadata: StepMetadata) -> None:
        self.start(metadata)
        self._lost.clear()
        for op in metadata.before:
            self._run(op)
        for row in metadata.rows:
            if isinstance(row, VerifyRow) and (ticket := self._loads.pop(row.row_id, None)) is not None:
                self.copies.wait(ticket)

    def run_after(self, metadata: StepMetadata) -> None:
        self.runtime.end()
        for op in metadata.after:
            # After a failed reload the blocks hold no KV: the host copy must not be overwritten with them.
            if not (isinstance(op, WriteBack) and op.request_id in self._lost):
                self._run(op)

    def take_report(self) -> StepReport:
        report, self._report = self._report, StepReport()
        report.arena_bytes = self.arena.bytes_held
        if self.certified is not None:
            report.arena_bytes += self.certified.bytes_held
            report.certified = self.certified.take()
        running, self._running = self._running, []
        for op, ticket, kept in running:
            if (seconds := ticket.seconds) is None:
                self._running.append((op, ticket, kept))
            else:
                report.transfers.append(Transfer(op, ticket.num_bytes, seconds, kept))
        return report

    def _run(self, op: Op) -> None:
        try:
            match op:
                case Offload() | WriteBack():
                    self._copy(op, Direction.TO_HOST)
                case Load():
                    self._copy(op, Direction.TO_DEVICE)
                case Compress():
                    self._report.compressed[op.request_id] = self.compression.compress(op)
                    if (rounding := self.arena.slots[op.slot].rounding) is not None:
                        self._report.simulated[op.request_id] = rounding.packed_bytes
                    if (kept := self.arena.kept(op.slot)) is not None:
                        self._report.kept[op.request_id] = kept.num_bytes
        except Exception as error:
            # Whatever a copy or a compressor raises concerns one request; the scheduler decides what becomes of it.
            name = type(op).__name__
            logger.exception("VeriCache: %s of request %s failed", name, op.request_id)
            self._report.failures.append(Failure(op.request_id, name, f"{type(error).__name__}: {error}"))
            if isinstance(op, Load):
                self._lost.add(op.request_id)

    def _copy(self, op: Offload | WriteBack | Load, direction: Direction) -> None:
        kept = self._kept(op) if isinstance(op, Load) else None
        ticket = self.copies.submit(direction, op.blocks, op.pages, kept)
        self._running.append((type(op).__name__, ticket, 0 if kept is None else kept.num_bytes))
        if isinstance(op, Load):
            self._loads[op.request_id] = ticket

    def _kept(self, op: Load) -> "KeptOfLoad | None":
        """What of a reload its request's arena slot holds."""
        kept = None if op.slot is None else self.arena.kept(op.slot)
        return None if kept is None else KeptOfLoad(op, kept, self._layout, self._caches)


@dataclass(frozen=True)
class KeptOfLoad:
    """``store.transfer.KeptRows`` of a slot's compressed context."""

    op: Load
    pages: KeptPages
    layout: PageLayout
    caches: list[Tensor]

    @property
    def num_bytes(self) -> int:
        first = self.op.first
        return self.pages.bytes_of(first + self.op.whole, first + len(self.op.blocks))

    def place(self, blocks: Tensor) -> Tensor:
        return self.layout.place(self.caches, self.pages, blocks, self.op.first, self.op.whole)
