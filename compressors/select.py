"""From scores and counts to kept positions."""

from dataclasses import dataclass

import torch
from torch import Tensor

SELECTORS = ("top", "poisson", "pareto")


@dataclass(frozen=True)
class Kept:
    """The selection, ragged over (layer, KV head): ``counts`` int64 ``[L, H]`` and ``positions`` int64
    ``[counts.sum()]``, ordered by layer, head, position.

    ``inclusion``: float32 ``[L, H, n]``, the probability with which each token was to be kept, for estimators that
    weigh what is kept by it; None where nothing was left to chance.
    ``bits``: uint8 ``[counts.sum()]``, bits a number of each kept token (16: as it is); None where that is left to the
    page format.
    """

    counts: Tensor
    positions: Tensor
    inclusion: Tensor | None = None
    bits: Tensor | None = None

    def layer(self, index: int) -> Tensor:
        """Positions of one layer, ordered by head then position."""
        return self.positions[self._of(index)]

    def layer_bits(self, index: int) -> Tensor | None:
        """``bits`` of the same tokens."""
        return None if self.bits is None else self.bits[self._of(index)]

    def _of(self, layer: int) -> slice:
        per_layer = self.counts.sum(1)
        start = int(per_layer[:layer].sum())
        return slice(start, start + int(per_layer[layer]))


def top_positions(scores: Tensor, counts: Tensor) -> Tensor:
    """The ``counts[l, h]`` best positions of every head, ascending, concatenated over heads then layers.

    Args:
        scores: float32 ``[L, H, n]``; +inf marks forced tokens. Ties go to the smaller position.
        counts: int64 ``[L, H]``, each at most n.

    Returns:
        int64 ``[counts.sum()]``.
    """
    n = scores.shape[-1]
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    keep = torch.zeros_like(scores, dtype=torch.bool)
    keep.scatter_(-1, order, torch.arange(n, device=scores.device).expand_as(order) < counts[..., None])
    return keep.nonzero()[:, 2]
