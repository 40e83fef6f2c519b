"""From scores and counts to kept positions."""

import torch
from torch import Tensor


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
    keep.scatter_(-1, order, torch.arange(n).expand_as(order) < counts[..., None])
    return keep.nonzero()[:, 2]
