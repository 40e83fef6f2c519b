"""Certified decode on the V1 runner's worker: a sketch and probabilities beside each slot, absent tokens from the host
store, all in torch."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from compressors import Kept
from vericache.certified.attention import Outcome, Sampled, certified_attention, padded
from vericache.certified.decided import Decided
from vericache.certified.sketch import KeySketch, sketch_keys
from vericache.draft.step import CertifiedToken
from vericache.engine.certified_rows import CertifiedRows, relative_errors
from vericache.engine.ops import Compress


@dataclass(frozen=True)
class Decidable:
    """What decisions about one slot read beside the arena. ``inclusion`` float64 ``[L, H, n]``, ``places`` per layer
    (``Sampled.positions``), ``pages`` int64: the context's host pages."""

    request_id: str
    pages: Tensor
    inclusion: Tensor
    places: list[Tensor]
    sketches: list[KeySketch]

    @property
    def nbytes(self) -> int:
        """Of sketches and probabilities."""
        return sum(s.nbytes for s in self.sketches) + self.inclusion.nbytes


@dataclass
class CertifiedWorker(CertifiedRows):
    """The reference, on the CPU."""

    _slots: dict[int, Decidable] = field(default_factory=dict)
    _decided: dict[str, Decided] = field(default_factory=dict)

    def fill(self, op: Compress, kept: Kept, blocks: Tensor) -> None:
        assert kept.inclusion is not None, "only samples can be certified"
        everything = torch.arange(op.context)
        keys = (self.layout.read_keys(cache, blocks, everything) for cache in self.caches)
        self._slots[op.slot] = Decidable(
            op.request_id,
            torch.tensor(op.pages),
            kept.inclusion.double(),
            [padded(counts, kept.layer(i), op.context) for i, counts in enumerate(kept.counts)],
            [sketch_keys(each) for each in keys],
        )

    def drop(self, slot: int) -> None:
        self._slots.pop(slot, None)

    @property
    def bytes_held(self) -> int:
        return sum(slot.nbytes for slot in self._slots.values())

    def take(self) -> dict[str, Decided]:
        taken, self._decided = self._decided, {}
        return taken

    def attend(self, asked: CertifiedToken, layer: int, query: Tensor, scale: float) -> Tensor:
        slot = self._slots[asked.slot]
        keys, values, *tail = self.arena.tokens(asked.slot, layer, asked.tail)
        sampled = Sampled(slot.sketches[layer], slot.inclusion[layer], slot.places[layer], keys, values)
        grouped = query.unflatten(0, (len(keys), -1))
        behind = (tail[0], tail[1])
        outcome = certified_attention(
            grouped, sampled, behind, scale, asked.policy, lambda head, at: self._read(slot, layer, head, at)
        )
        self._count(slot, layer, outcome, grouped, behind, scale)
        return outcome.output.flatten(0, 1)

    def _read(self, slot: Decidable, layer: int, head: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[k, D]`` of one KV head, from the host."""
        keys, values = self.layout.read(self.store.data[:, layer, head : head + 1], slot.pages, positions)
        return keys[0], values[0]

    def _count(
        self, slot: Decidable, layer: int, outcome: Outcome, query: Tensor, tail: tuple[Tensor, Tensor], scale: float
    ) -> None:
        tokens, worst = int(outcome.fetched.sum()), outcome.error.max().item()
        now = self._decided.get(slot.request_id, Decided())
        found = Decided(
            len(query),
            int((outcome.fetched > 0).sum()),
            tokens,
            tokens * self.token_bytes,
            int((outcome.fallback & (outcome.fetched > 0)).sum()),
            measured=tuple(self._measure(slot, layer, outcome, query, tail, scale)),
        )
        # One certificate a position: the largest of its layers.
        largest = max(worst, *(now.certificates or (0.0,)))
        self._decided[slot.request_id] = replace(now + found, certificates=(largest,))

    def _measure(
        self, slot: Decidable, layer: int, outcome: Outcome, query: Tensor, tail: tuple[Tensor, Tensor], scale: float
    ) -> list[float]:
        """The true error of every KV head, of a share of all calls."""
        if not self._is_measured():
            return []
        everything = torch.arange(slot.inclusion.shape[-1])
        keys, values = self.layout.read(self.store.data[:, layer], slot.pages, everything)
        logits = query.float() @ torch.cat([keys, tail[0]], 1).float().mT * scale
        exact = logits.softmax(-1) @ torch.cat([values, tail[1]], 1).float()
        found: list[float] = relative_errors(outcome.output, exact).tolist()
        return found
