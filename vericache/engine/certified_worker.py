"""Certified decode on the V1 runner's worker: a sketch and probabilities beside each slot, absent tokens from the host
store, all in torch."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from compressors import Kept
from vericache.certified.attention import Outcome, Sampled, certified_attention, padded
from vericache.certified.certificate import Bound
from vericache.certified.decided import Decided
from vericache.certified.sketch import KeySketch, sketch_keys, value_norms
from vericache.draft.step import CertifiedToken
from vericache.engine.certified_rows import CertifiedRows
from vericache.engine.ops import Compress


@dataclass(frozen=True)
class Decidable:
    """What decisions about one slot read beside the arena. ``inclusion`` float64 ``[L, H, n]``, ``places`` per layer
    (``Sampled.positions``), ``pages`` int64: the context's host pages, ``norms`` per layer (``Sampled.norms``), none
    where only the denominator is certified."""

    request_id: str
    pages: Tensor
    inclusion: Tensor
    places: list[Tensor]
    sketches: list[KeySketch]
    norms: list[Tensor]

    @property
    def nbytes(self) -> int:
        """Of sketches, probabilities and norms."""
        return sum(s.nbytes for s in self.sketches) + self.inclusion.nbytes + sum(n.nbytes for n in self.norms)


@dataclass
class CertifiedWorker(CertifiedRows):
    """The reference, on the CPU."""

    _slots: dict[int, Decidable] = field(default_factory=dict)
    _decided: dict[str, Decided] = field(default_factory=dict)

    def fill(self, op: Compress, kept: Kept, blocks: Tensor) -> None:
        assert kept.inclusion is not None, "only samples can be certified"
        everything = torch.arange(op.context)
        sketches, norms = [], []
        for cache in self.caches:
            if op.bound == "output":
                keys, values = self.layout.read(cache, blocks, everything)
                norms.append(value_norms(values))
            else:
                keys = self.layout.read_keys(cache, blocks, everything)
            sketches.append(sketch_keys(keys))
        self._slots[op.slot] = Decidable(
            op.request_id,
            torch.tensor(op.pages),
            kept.inclusion.double(),
            [padded(counts, kept.layer(i), op.context) for i, counts in enumerate(kept.counts)],
            sketches,
            norms,
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
        norms = slot.norms[layer] if slot.norms else None
        sampled = Sampled(slot.sketches[layer], slot.inclusion[layer], slot.places[layer], keys, values, norms)
        grouped = query.unflatten(0, (len(keys), -1))
        behind = (tail[0], tail[1])
        outcome = certified_attention(
            grouped, sampled, behind, scale, asked.policy, lambda head, at: self._read(slot, layer, head, at)
        )
        exact = self._exact(slot, layer, grouped, behind, scale)
        self._count(slot, outcome, true_errors(outcome, *exact, asked.policy.target.bound) if exact else [])
        return outcome.output.flatten(0, 1)

    def _read(self, slot: Decidable, layer: int, head: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[k, D]`` of one KV head, from the host."""
        keys, values = self.layout.read(self.store.data[:, layer, head : head + 1], slot.pages, positions)
        return keys[0], values[0]

    def _count(self, slot: Decidable, outcome: Outcome, measured: list[float]) -> None:
        tokens, worst = int(outcome.fetched.sum()), outcome.error.max().item()
        now = self._decided.get(slot.request_id, Decided())
        found = Decided(
            len(outcome.output),
            int((outcome.fetched > 0).sum()),
            tokens,
            tokens * self.token_bytes,
            int((outcome.fallback & (outcome.fetched > 0)).sum()),
            measured=tuple(measured),
        )
        # One certificate a position: the largest of its layers.
        largest = max(worst, *(now.certificates or (0.0,)))
        self._decided[slot.request_id] = replace(now + found, certificates=(largest,))

    def _exact(
        self, slot: Decidable, layer: int, query: Tensor, tail: tuple[Tensor, Tensor], scale: float
    ) -> tuple[Tensor, Tensor] | None:
        """Dense attention ``[H, G, D]`` and log D ``[H, G]``, of a share of all calls."""
        if not self._is_measured():
            return None
        everything = torch.arange(slot.inclusion.shape[-1])
        keys, values = self.layout.read(self.store.data[:, layer], slot.pages, everything)
        logits = query.float() @ torch.cat([keys, tail[0]], 1).float().mT * scale
        exact = logits.softmax(-1) @ torch.cat([values, tail[1]], 1).float()
        return exact, logits.double().logsumexp(-1)


def true_errors(outcome: Outcome, exact: Tensor, log_total: Tensor, bound: Bound) -> list[float]:
    """Of what is certified, the largest of each KV head's queries."""
    if bound == "output":
        errors = (outcome.output - exact).norm(dim=-1) / exact.norm(dim=-1)
    else:
        errors = (outcome.log_total - log_total).expm1().abs()
    found: list[float] = errors.amax(-1).tolist()
    return found
