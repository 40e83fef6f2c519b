"""Scoring passes and compressions on the worker: one ``Compressor`` per slot while its pass runs."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from compressors import Compressor, Kept, MethodSpec, Scorer, Shape, create
from vericache.device import to_device
from vericache.draft.arena import DraftArena
from vericache.engine.certified_rows import CertifiedRows
from vericache.engine.ops import Compress, ProbeRow
from vericache.engine.pages import PageLayout
from vericache.engine.score_parts import ScorePart
from vericache.errors import CompressionError

T = TypeVar("T")


class ScoringRow:
    """Feeds one probe row of one step to a slot's compressor. An exception ends the pass, not the forward:
    it is kept and reported when the compression is asked for."""

    def __init__(self, pass_: "ScoringPass", index: int, blocks: Tensor, layout: PageLayout) -> None:
        self._pass, self._index, self._blocks, self._layout = pass_, index, blocks, layout

    def observe(self, layer: int, query: Tensor, key: Tensor, cache: Tensor, scale: float) -> None:
        cached = self._layout.tokens(cache, self._blocks)
        self._pass.run(lambda c: c.observe(layer, self._index, query, key, cached, scale))


class ScoringPass:
    """The compressor of one slot between its first probe and its compression, and the first exception it raised.
    Methods name no device: what they create is on the KV caches' ``device``."""

    def __init__(self, spec: MethodSpec, shape: Shape, context: int, device: torch.device) -> None:
        self.error: Exception | None = None
        self.rows = 0
        self._device = device
        self._compressor: Compressor | None = None
        try:
            with device:
                self._compressor = create(spec, shape, context)
        except Exception as error:  # noqa: BLE001 a compressor is third-party code; the request falls back
            self.error = error

    def run(self, action: Callable[[Compressor], T]) -> T | None:
        """Nothing runs after the first exception."""
        if self.error is None and self._compressor is not None:
            try:
                with self._device:
                    return action(self._compressor)
            except Exception as error:  # noqa: BLE001 as above
                self.error = error
        return None


class CompressionWorker:
    """Runs what ``ProbeRow`` and ``Compress`` ask for. ``caches`` are the device KV caches, one per layer;
    ``certified`` where slots can be read by certified rows."""

    def __init__(
        self,
        arena: DraftArena,
        shape: Shape,
        layout: PageLayout,
        caches: list[Tensor],
        certified: CertifiedRows | None = None,
    ) -> None:
        self._certified = certified
        self._arena, self._shape, self._layout, self._caches = arena, shape, layout, caches
        self._device = caches[0].device
        self._passes: dict[int, ScoringPass] = {}
        self._parts: dict[int, Tensor] = {}  # scores held for later passes, in host memory: by id of the part

    def scoring_row(self, row: ProbeRow) -> ScoringRow:
        if row.first:
            self._passes[row.slot] = ScoringPass(row.spec, self._shape, row.context, self._device)
        pass_ = self._passes[row.slot]
        pass_.rows += 1
        return ScoringRow(pass_, row.index, self._on_device(row.blocks), self._layout)

    def compress(self, op: Compress) -> int:
        """Fill the slot from the context in ``op.blocks``. Returns the head pages used.

        Raises:
            CompressionError: the method raised while scoring or selecting, and the slot is empty; or its keys cannot be
                sketched for certified rows.
        """
        pass_ = self._passes.pop(op.slot, None) or ScoringPass(op.spec, self._shape, op.context, self._device)
        if pass_.rows != op.probes and pass_.error is None:
            pass_.error = CompressionError(f"{pass_.rows} scoring rows were seen, expected {op.probes}")
        self._take_parts(pass_, op)
        blocks = self._on_device(op.blocks)
        kept = pass_.run(lambda compressor: self._select(compressor, blocks))
        if kept is None:
            self._arena.drop(op.slot)
            error = pass_.error
            raise CompressionError(f"compressor {op.spec.name!r} failed: {type(error).__name__}: {error}") from error
        source = self._layout.source(self._caches, blocks, op.context)
        used = self._arena.put(op.slot, kept, source, op.context, op.block_tokens)
        if op.pages:
            assert self._certified is not None, "refused at the door (engine.support.certified_refused)"
            self._certified.fill(op, kept, blocks)
        return used

    def _take_parts(self, pass_: ScoringPass, op: Compress) -> None:
        """Scores that are known in place of rows go in, those to be held go out."""
        for part_id in op.forget:
            self._parts.pop(part_id, None)
        if op.known:
            pass_.run(lambda compressor: self._adopt(compressor.scorer, op.known))
        if op.keep:
            pass_.run(lambda compressor: self._hold(compressor.scorer, op.keep))

    def _adopt(self, scorer: Scorer, parts: Iterable[ScorePart]) -> None:
        for part in parts:
            scorer.adopt(part.start, part.end, to_device(self._parts[part.part_id], self._device))

    def _hold(self, scorer: Scorer, parts: Iterable[ScorePart]) -> None:
        for part in parts:
            self._parts[part.part_id] = scorer.part(part.start, part.end).cpu()

    def _select(self, compressor: Compressor, blocks: Tensor) -> Kept:
        if compressor.reads_cache:
            for layer, cache in enumerate(self._caches):
                compressor.read(layer, self._layout.tokens(cache, blocks))
        return compressor.select()

    def _on_device(self, blocks: tuple[int, ...]) -> Tensor:
        return to_device(torch.tensor(blocks, dtype=torch.int64), self._device)

    def drop(self, slot: int) -> None:
        self._passes.pop(slot, None)
        if self._certified is not None:
            self._certified.drop(slot)
        self._arena.drop(slot)
