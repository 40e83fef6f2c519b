"""The worker side of VeriCache: executes typed operations and resolves typed rows against the batch."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from compressors import Shape
from vericache.draft.arena import DraftArena
from vericache.draft.runtime import DraftRuntime, Observer
from vericache.draft.step import ArenaRow, build_step
from vericache.engine.compression import CompressionWorker
from vericache.engine.ops import (
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
from vericache.store.transfer import CopyEngine, Direction

logger = logging.getLogger("vllm.vericache")


class KVWorker:
    """Owns the worker's arena and copies; holds no request state. One ``StepReport`` per step."""

    def __init__(
        self, shape: Shape, arena: DraftArena, layout: PageLayout, caches: list[Tensor], copies: CopyEngine
    ) -> None:
        self.arena, self.copies = arena, copies
        self.runtime = DraftRuntime(arena)
        self.compression = CompressionWorker(arena, shape, layout, caches)
        self._report = StepReport()
        self._emptied_for: StepMetadata | None = None
        self._lost: set[str] = set()  # requests whose reload failed in this step

    # -- before the forward pass, from the runner ----------------------------------------------------

    def begin(
        self, metadata: StepMetadata, req_ids: Sequence[str], query_start: Sequence[int], positions: Tensor
    ) -> Tensor:
        """Resolve this batch; called before ``run_before`` in steps that have rows.

        Returns int64 token indices whose K/V must not be written to vLLM's pages: draft rows own none, replayed
        probes own theirs already.
        """
        self._empty_slots(metadata)
        by_id = {row.row_id: row for row in metadata.rows}
        entries: list[ArenaRow | None] = []
        observed: list[tuple[int, int, Observer]] = []
        unwritten: list[int] = []
        for index, req_id in enumerate(req_ids):
            row = by_id.get(req_id)
            lo, hi = query_start[index], query_start[index + 1]
            if isinstance(row, ProbeRow):
                observed.append((lo, hi, self.compression.scoring_row(row)))
            is_draft = isinstance(row, DraftRow)
            if is_draft or (isinstance(row, ProbeRow) and row.replay):
                unwritten.extend(range(lo, hi))
            entries.append(ArenaRow(row.slot, row.base, is_draft) if isinstance(row, DraftRow | VerifyRow) else None)
        step = build_step(self.arena, entries, query_start, positions.tolist()) if any(entries) else None
        self.runtime.begin(step, observed)
        return torch.tensor(unwritten, dtype=torch.int64)

    # -- operations, from the connector ----------------------------------------------------------------

    def run_before(self, metadata: StepMetadata) -> None:
        self._empty_slots(metadata)
        self._lost.clear()
        for op in metadata.before:
            self._run(op)

    def _empty_slots(self, metadata: StepMetadata) -> None:
        """Once per step, before anything else of it: ``begin`` may already start a new pass in an emptied slot."""
        if self._emptied_for is not metadata:
            self._emptied_for = metadata
            for slot in metadata.drops:
                self.compression.drop(slot)

    def run_after(self, metadata: StepMetadata) -> None:
        self.runtime.begin(None, [])
        for op in metadata.after:
            # After a failed reload the blocks hold no KV: the host copy must not be overwritten with them.
            if not (isinstance(op, WriteBack) and op.request_id in self._lost):
                self._run(op)

    def take_report(self) -> StepReport:
        report, self._report = self._report, StepReport()
        report.arena_bytes = self.arena.bytes_held
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
        except Exception as error:
            # Whatever a copy or a compressor raises concerns one request; the scheduler decides what becomes of it.
            name = type(op).__name__
            logger.exception("VeriCache: %s of request %s failed", name, op.request_id)
            self._report.failures.append(Failure(op.request_id, name, f"{type(error).__name__}: {error}"))
            if isinstance(op, Load):
                self._lost.add(op.request_id)

    def _copy(self, op: Offload | WriteBack | Load, direction: Direction) -> None:
        ticket = self.copies.submit(direction, op.blocks, op.pages)
        self.copies.wait(ticket)
        self._report.transfers.append(Transfer(type(op).__name__, ticket.num_bytes, ticket.seconds))
