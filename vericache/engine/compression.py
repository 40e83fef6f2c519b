"""Scoring passes and compressions on the worker: one ``Compressor`` per slot while its pass runs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from compressors import Compressor, Shape, create
from vericache.draft.arena import DraftArena
from vericache.engine.ops import Compress, ProbeRow
from vericache.engine.pages import PageLayout
from vericache.errors import CompressionError


class ScoringRow:
    """Feeds one probe row of one step to a slot's compressor. An exception ends the pass, not the forward:
    it is kept and reported when the compression is asked for."""

    def __init__(self, pass_: "ScoringPass", index: int, blocks: Sequence[int], layout: PageLayout) -> None:
        self._pass, self._index, self._blocks, self._layout = pass_, index, blocks, layout

    def observe(self, layer: int, query: Tensor, key: Tensor, cache: Tensor, scale: float) -> None:
        if self._pass.error is not None:
            return
        try:
            self._pass.compressor.observe(
                layer, self._index, query, key, lambda p: self._layout.read_keys(cache, self._blocks, p), scale
            )
        except Exception as error:  # noqa: BLE001 a compressor is third-party code; the request falls back
            self._pass.error = error


class ScoringPass:
    """The compressor of one slot between its first probe and its compression."""

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self.error: Exception | None = None


class CompressionWorker:
    """Runs what ``ProbeRow`` and ``Compress`` ask for. ``caches`` are the device KV caches, one per layer."""

    def __init__(self, arena: DraftArena, shape: Shape, layout: PageLayout, caches: list[Tensor]) -> None:
        self._arena, self._shape, self._layout, self._caches = arena, shape, layout, caches
        self._passes: dict[int, ScoringPass] = {}

    def scoring_row(self, row: ProbeRow) -> ScoringRow:
        if row.index == 0:
            self._passes[row.slot] = ScoringPass(create(row.spec, self._shape, row.context))
        return ScoringRow(self._passes[row.slot], row.index, row.blocks, self._layout)

    def compress(self, op: Compress) -> int:
        """Fill the slot from the context in ``op.blocks``. Returns the head pages used.

        Raises:
            CompressionError: the method raised while scoring or selecting; the slot is empty.
        """
        pass_ = self._passes.pop(op.slot, None) or ScoringPass(create(op.spec, self._shape, op.context))
        try:
            if pass_.error is not None:
                raise pass_.error
            kept = pass_.compressor.select()
        except Exception as error:
            self._arena.drop(op.slot)
            raise CompressionError(f"compressor {op.spec.name!r} failed: {type(error).__name__}: {error}") from error
        everything = torch.arange(op.context)
        return self._arena.put(op.slot, kept, lambda i: self._layout.read(self._caches[i], op.blocks, everything))

    def drop(self, slot: int) -> None:
        self._passes.pop(slot, None)
        self._arena.drop(slot)
