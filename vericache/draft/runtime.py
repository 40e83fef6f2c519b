"""The worker's draft state as the attention backend sees it: the arena, this step's rows, a running scoring pass."""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from vericache.draft.arena import DraftArena
from vericache.draft.step import DraftStep


class Observer(Protocol):
    """A scoring pass that wants to see one row of this step, layer by layer."""

    def observe(self, layer: int, query: Tensor, key: Tensor, cache: Tensor, scale: float) -> None:
        """``query [T, Hq, D]`` and ``key [T, H, D]`` of the row, post-RoPE; ``cache`` is the layer's KV cache."""


@dataclass
class DraftRuntime:
    """Shared by all attention layers of a worker; ``begin`` is called once per step before the forward pass."""

    arena: DraftArena
    step: DraftStep | None = None
    observed: list[tuple[int, int, Observer]] = field(default_factory=list)  # (first token, end token, observer)

    def begin(self, step: DraftStep | None, observed: list[tuple[int, int, Observer]]) -> None:
        self.step, self.observed = step, observed

    @property
    def draft_rows(self) -> Tensor | None:
        """The batch's draft rows, int64 ``[R]``; None when there are none."""
        return self.step.draft_rows if self.step is not None and self.step.work is not None else None

    @property
    def only_drafts(self) -> bool:
        """No row of this batch reads vLLM's pages."""
        return self.step is not None and len(self.step.draft_rows) == self.step.num_rows

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Refresh the tails with this batch's K/V, ``[T, H, D]``."""
        if self.step is not None and self.step.tail is not None:
            self.arena.write_tail(layer, self.step.tail, key, value)

    def observe(self, layer: int, query: Tensor, key: Tensor, cache: Tensor, scale: float) -> None:
        for lo, hi, observer in self.observed:
            observer.observe(layer, query[lo:hi], key[lo:hi], cache, scale)

    def attend(self, layer: int, query: Tensor, output: Tensor, scale: float) -> None:
        """Overwrite the draft rows of ``output``; ``query`` and ``output`` are ``[T, Hq, D]``."""
        assert self.step is not None
        assert self.step.work is not None
        tokens = self.step.draft_tokens
        output[tokens] = self.arena.attend(layer, self.step.work, query[tokens], scale).to(output.dtype)


@dataclass(frozen=True)
class LayerHandle:
    """What one attention layer's impl holds once a worker has attached it."""

    index: int
    runtime: DraftRuntime
