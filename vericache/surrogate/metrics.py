"""How well predicted scores rank: R2, Spearman's rank correlation, and the overlap of what would be kept."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


def ranks(values: Tensor) -> Tensor:
    """Ranks from 1 along the last dimension, float64; equal values share the mean of their ranks."""
    ordered, order = values.sort(-1)
    position = torch.arange(values.shape[-1], device=values.device).expand_as(values)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    ends = torch.ones_like(starts)
    ends[..., :-1] = starts[..., 1:]
    first = torch.where(starts, position, 0).cummax(-1).values
    last = torch.where(ends, position, values.shape[-1]).flip(-1).cummin(-1).values.flip(-1)
    shared = 1 + (first + last).double() / 2
    return torch.empty_like(shared).scatter_(-1, order, shared)


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Correlation of the ranks of ``a`` and ``b`` along the last dimension; 0 where one of them is constant."""
    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(-1, keepdim=True), y - y.mean(-1, keepdim=True)
    norm = (x.square().sum(-1) * y.square().sum(-1)).sqrt()
    return torch.where(norm > 0, (x * y).sum(-1) / norm, 0.0)


def overlap(a: Tensor, b: Tensor, share: float) -> Tensor:
    """The part of the ``share`` largest of ``b`` (rounded, at least one) that is among as many largest of ``a``, along
    the last dimension. Ties go to the smaller index, as they do when tokens are kept."""
    count = max(1, round(share * a.shape[-1]))
    best = [torch.zeros_like(t, dtype=torch.bool) for t in (a, b)]
    for mask, values in zip(best, (a, b), strict=True):
        order = values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
        mask.scatter_(-1, order, True)
    return (best[0] & best[1]).sum(-1).double() / count


@dataclass
class Agreement:
    """Collects predicted against true log scores, text by text. Heads are averaged, R2 is over all texts' tokens."""

    shares: tuple[float, ...] = (0.25, 0.1)
    tokens: int = 0
    texts: int = 0
    _sums: list[Tensor] = field(default_factory=list)  # per text: y, y^2, (y - predicted)^2, each [L, H]
    _spearman: list[Tensor] = field(default_factory=list)  # [L]
    _overlap: list[Tensor] = field(default_factory=list)  # [L, shares]
    _pooled: list[Tensor] = field(default_factory=list)  # [shares], one threshold over all layers and heads

    def add(self, predicted: Tensor, target: Tensor) -> None:
        """One text's ``[L, H, n]``."""
        y, error = target.double(), (target - predicted).double()
        self.tokens, self.texts = self.tokens + target.shape[-1], self.texts + 1
        self._sums.append(torch.stack([y.sum(-1), y.square().sum(-1), error.square().sum(-1)]))
        self._spearman.append(spearman(predicted, target).mean(-1))
        self._overlap.append(torch.stack([overlap(predicted, target, c).mean(-1) for c in self.shares], -1))
        flat = predicted.flatten(), target.flatten()
        self._pooled.append(torch.stack([overlap(*flat, c) for c in self.shares]))

    def layers(self) -> list[dict[str, float]]:
        """One row per layer: ``r2``, ``spearman``, ``overlap_0.25``, ``overlap_0.1``."""
        y, squares, errors = torch.stack(self._sums).sum(0)
        spread = squares - y.square() / self.tokens
        r2 = torch.where(spread > 0, 1 - errors / spread, 0.0).mean(-1)
        columns = [r2, torch.stack(self._spearman).mean(0), *torch.stack(self._overlap).mean(0).unbind(-1)]
        names = ["r2", "spearman", *(f"overlap_{c}" for c in self.shares)]
        return [dict(zip(names, row, strict=True)) for row in torch.stack(columns, -1).tolist()]

    def pooled(self) -> dict[str, float]:
        """Overlap under one threshold for all layers and heads, as counts ``per_head`` keeps tokens."""
        found = torch.stack(self._pooled).mean(0).tolist()
        return {f"overlap_{c}": value for c, value in zip(self.shares, found, strict=True)}
