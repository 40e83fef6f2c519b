"""Draft rows resolved and attended on the device: vLLM's V2 runner. Fit for captured graphs."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vericache.device import to_device
from vericache.draft.arena import DraftArena
from vericache.draft.runtime import DraftRuntime, Observed
from vericache.draft.step import ArenaRow, CertifiedToken
from vericache.draft.tables import ArenaTables
from vericache.draft.triton_attention import Scratch, attend_arena, grid_programs, segment_starts
from vericache.draft.triton_step import CERTIFIED, DRAFT, UNWRITTEN, resolve_rows, write_tails

CPU_PROGRAMS = 3  # of Triton's interpreter, which runs them one after the other


@dataclass(frozen=True)
class DeviceBatch:
    """One batch of the V2 runner: device tensors with ``rows`` and ``tokens`` entries, padding included, and what the
    host knows of the first ``num_rows`` rows: the most positions each can have reached, and its first token."""

    num_rows: int
    query_start: Tensor  # int32 [rows + 1]
    positions: Tensor  # int64 [tokens]
    seq_lens: Tensor  # int32 [rows]
    slot_mapping: Tensor  # int64 [tokens], changed in place
    last_position: Sequence[int]
    first_token: Sequence[int]

    @property
    def rows(self) -> int:
        return len(self.seq_lens)

    @property
    def tokens(self) -> int:
        return len(self.positions)


class Buffers:
    """What kernels and captured graphs read, at addresses that never change."""

    def __init__(self, tables: ArenaTables, rows: int, tokens: int) -> None:
        device = tables.table.device
        layers, heads = tables.counts.shape[1:]

        def ints(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int32, device=device)

        self.row_slot, self.tail_len, self.stock_lens = ints(rows, fill=-1), ints(rows), ints(rows)
        self.token_slot, self.tail_index = ints(tokens, fill=-1), ints(tokens)
        self.starts = ints(layers, rows * heads + 1)


class DeviceRuntime(DraftRuntime):
    """Buffers for ``max_rows`` batch rows and ``max_tokens`` tokens; ``arena`` has tables."""

    def __init__(self, arena: DraftArena, max_rows: int, max_tokens: int) -> None:
        super().__init__(arena)
        assert arena.tables is not None
        self.tables = arena.tables
        self.buffers = Buffers(self.tables, max_rows, max_tokens)
        shape, device = arena.shape, self.tables.table.device
        programs = CPU_PROGRAMS
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            programs = grid_programs(self.tables.format, processors)
        self._scratch = Scratch.of(programs, max_rows, shape.kv_heads, shape.group, self.tables.format, device)
        self._rows = self._tokens = 0
        self._row_token: Tensor  # each row's first token, in the runner's own buffer
        self._begun = False
        self._certified: list[CertifiedToken] = []
        # Outside captured graphs, kernels for rows that do not exist are not launched.
        self._writes = self._drafts = False
        self._longest: int | None = None  # of the rows that read vLLM's pages; None: no claim

    def begin(
        self, rows: Sequence[ArenaRow | None], unwritten: Sequence[bool], batch: DeviceBatch, observed: Observed
    ) -> None:
        """Resolve a batch: ``rows`` in batch order (None: no slot), and whether vLLM's pages go without a row's K/V."""
        table = np.full((3, max(1, batch.num_rows)), -1, dtype=np.int32)
        longest, self._certified = 1, []
        for index, (row, skipped, last) in enumerate(zip(rows, unwritten, batch.last_position, strict=True)):
            flags = UNWRITTEN if skipped else 0
            if row is not None:
                table[0, index], table[1, index] = row.slot, row.base
                tail = last - row.base + 1
                self.arena.grow_tail(row.slot, tail)
                if row.certified is not None:
                    flags |= CERTIFIED
                    token = batch.first_token[index]
                    self._certified.append(CertifiedToken(token, row.slot, last, tail, row.certified))
                elif row.draft:
                    flags |= DRAFT
            table[2, index] = flags
            if row is None or not row.draft:
                longest = max(longest, last + 1)
        self._longest = longest
        self._writes = any(rows)
        self._drafts = any(r is not None and r.draft and r.certified is None for r in rows)
        self.observed, self._begun = observed, True
        self._resolve(to_device(torch.from_numpy(table), self.tables.table.device), batch)

    def _begin_dummy(self, metadata: Any) -> None:
        """A batch of no request: a warm-up, or the capture of a graph, which must contain all kernels."""
        self._writes = self._drafts = True
        self._longest, self._certified = None, []
        slots = metadata.slot_mapping  # stands for positions too: no row reads them
        batch = DeviceBatch(0, metadata.query_start_loc, slots, metadata.seq_lens, slots, [], [])
        self._resolve(torch.full((3, 1), -1, dtype=torch.int32, device=self.tables.table.device), batch)

    def _resolve(self, rows: Tensor, batch: DeviceBatch) -> None:
        buffers = self.buffers
        self._rows, self._tokens, self._row_token = batch.rows, batch.tokens, batch.query_start
        slots, tails = buffers.row_slot[: batch.rows], buffers.tail_len[: batch.rows]
        resolve_rows(
            rows, batch.num_rows, batch.query_start, batch.positions, batch.seq_lens, batch.slot_mapping, slots, tails,
            buffers.stock_lens, buffers.token_slot[: batch.tokens], buffers.tail_index,
        )  # fmt: skip
        segment_starts(self.tables, slots, tails, out=buffers.starts)

    def end(self) -> None:
        super().end()
        self._begun = self._writes = self._drafts = False
        self._certified = []

    def without_draft_keys(self, metadata: Any) -> Any:
        if not self._begun:  # vLLM prepares the batches of warm-ups and captures by itself
            self._begin_dummy(metadata)
        lengths = self.buffers.stock_lens[: len(metadata.seq_lens)]
        longest = metadata.max_seq_len if self._longest is None else self._longest
        return dataclasses.replace(metadata, seq_lens=lengths, max_seq_len=longest)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        if self._writes:
            tokens, heads = min(self._tokens, len(key)), self.arena.shape.kv_heads
            buffers, dim = self.buffers, self.arena.shape.head_dim
            write_tails(
                key.view(-1, heads, dim), value.view(-1, heads, dim), self.tables, layer, buffers.token_slot[:tokens],
                buffers.tail_index,
            )  # fmt: skip

    def attend(self, layer: int, query: Tensor, output: Tensor, scale: float) -> None:
        if self._drafts:
            buffers, rows = self.buffers, self._rows
            attend_arena(
                query, output, self.tables, layer, buffers.row_slot[:rows], buffers.tail_len[:rows],
                self._row_token, buffers.starts, self._scratch, scale,
            )  # fmt: skip
        self._certify(self._certified, layer, query, output, scale)
