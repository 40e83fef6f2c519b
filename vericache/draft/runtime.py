"""The worker's draft state as the attention backend sees it: the arena, this step's rows, a running scoring pass."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from vericache.draft.arena import DraftArena
from vericache.draft.step import ArenaRow, CertifiedToken, DraftStep, build_step


class Observer(Protocol):
    """A scoring pass that wants to see one row of this step, layer by layer."""

    def observe(self, layer: int, query: Tensor, key: Tensor, cache: Tensor, scale: float) -> None:
        """``query [T, Hq, D]`` and ``key [T, H, D]`` of the row, post-RoPE; ``cache`` is the layer's KV cache."""


class CertifiedReader(Protocol):
    """Certified attention over a slot and the full cache on the host."""

    def attend(self, asked: CertifiedToken, layer: int, query: Tensor, scale: float) -> Tensor:
        """``query [Hq, D]`` -> float32 ``[Hq, D]``."""


Observed = list[tuple[int, int, Observer]]  # (first token, end token, observer)


@dataclass
class DraftRuntime(ABC):
    """Shared by all attention layers of a worker, prepared once per step before the forward pass. A subclass says how
    draft rows are resolved and attended."""

    arena: DraftArena
    observed: Observed = field(default_factory=list)
    reader: CertifiedReader | None = None  # of certified rows

    def end(self) -> None:
        """The step is over."""
        self.observed = []

    @property
    def only_drafts(self) -> bool:
        """No row of this batch reads vLLM's pages."""
        return False

    def observe(self, layer: int, query: Tensor, key: Tensor, cache: Tensor, scale: float) -> None:
        for lo, hi, observer in self.observed:
            observer.observe(layer, query[lo:hi], key[lo:hi], cache, scale)

    @abstractmethod
    def without_draft_keys(self, metadata: Any) -> Any:
        """vLLM's ``CommonAttentionMetadata`` with sequence length 0 at draft rows: the stock kernel may then run over
        all rows, and its other rows are bitwise those of a batch without draft rows."""

    @abstractmethod
    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Refresh the tails with this batch's K/V, ``[T, H, D]``."""

    @abstractmethod
    def attend(self, layer: int, query: Tensor, output: Tensor, scale: float) -> None:
        """Overwrite the draft and certified rows of ``output``; ``query`` and ``output`` are ``[T, Hq, D]``."""

    def _certify(self, rows: Iterable[CertifiedToken], layer: int, query: Tensor, output: Tensor, scale: float) -> None:
        for asked in rows:
            assert self.reader is not None, "refused at the door (engine.support.certified_refused)"
            output[asked.token] = self.reader.attend(asked, layer, query[asked.token], scale).to(output.dtype)


@dataclass
class HostRuntime(DraftRuntime):
    """Rows resolved in host memory, attention in torch: vLLM's V1 runner on the CPU."""

    step: DraftStep | None = None

    def begin(
        self, rows: Sequence[ArenaRow | None], query_start: Sequence[int], positions: Sequence[int], observed: Observed
    ) -> None:
        """``rows`` in batch order, ``query_start`` one longer, ``positions`` of every token."""
        self.step = build_step(self.arena, rows, query_start, positions) if any(rows) else None
        self.observed = observed

    def end(self) -> None:
        super().end()
        self.step = None

    @property
    def only_drafts(self) -> bool:
        return self.step is not None and len(self.step.arena_rows) == self.step.num_rows

    def without_draft_keys(self, metadata: Any) -> Any:
        if self.step is None or not len(self.step.arena_rows):
            return metadata
        seq_lens = metadata.seq_lens.clone()
        seq_lens[self.step.arena_rows] = 0
        return dataclasses.replace(metadata, seq_lens=seq_lens)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        if self.step is not None and self.step.tail is not None:
            self.arena.write_tail(layer, self.step.tail, key, value)

    def attend(self, layer: int, query: Tensor, output: Tensor, scale: float) -> None:
        if self.step is not None and self.step.work is not None:
            tokens = self.step.draft_tokens
            output[tokens] = self.arena.attend(layer, self.step.work, query[tokens], scale).to(output.dtype)
        self._certify(self.step.certified if self.step is not None else (), layer, query, output, scale)


@dataclass(frozen=True)
class LayerHandle:
    """What one attention layer's impl holds once a worker has attached it."""

    index: int
    runtime: DraftRuntime
