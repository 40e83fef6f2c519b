"""Attention over head pages, in torch: the reference, and what runs on the CPU.

The work list is (page, segment, valid tokens); a segment is one (row, KV head). Pages are independent pieces of
one softmax and are merged by their maxima and sums (log-sum-exp), so ragged lengths cost nothing but the last,
partly filled page of a head, and pages of several formats make one softmax. The GPU kernel has the same contract.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Partial:
    """A softmax that is not complete: ``peak`` and ``mass`` float32 ``[S, G]``, the largest logit (-inf: no key) and
    the sum of weights relative to it; ``mixed`` float32 ``[S, G, D]``, weighted values."""

    peak: Tensor
    mass: Tensor
    mixed: Tensor


def attend_pages(query: Tensor, keys: Tensor, values: Tensor, segments: Tensor, lengths: Tensor) -> Partial:
    """Each segment's queries over all pages of the segment.

    Args:
        query: float32 ``[S, G, D]``, already scaled.
        keys, values: float32 ``[N, PT, D]``, one page per work item. Tokens beyond an item's length count nothing.
        segments: int64 ``[N]``, segment of each work item.
        lengths: int64 ``[N]``, valid tokens of each work item, 0 .. PT.
    """
    count, group, dim = query.shape
    logits = torch.bmm(query.index_select(0, segments), keys.transpose(1, 2))  # [N, G, PT]
    unused = torch.arange(keys.shape[1]) >= lengths[:, None]
    logits.masked_fill_(unused[:, None], float("-inf"))
    values = values.masked_fill(unused[..., None], 0.0)  # weight 0 times a stale NaN would be NaN
    index = segments[:, None].expand(-1, group)
    peak = torch.full((count, group), float("-inf")).scatter_reduce_(0, index, logits.amax(-1), "amax")
    level = peak.nan_to_num(neginf=0.0).index_select(0, segments)[..., None]
    weights = torch.exp_(logits.sub_(level))
    mass = torch.zeros(count, group).index_add_(0, segments, weights.sum(-1))
    return Partial(peak, mass, torch.zeros(count, group, dim).index_add_(0, segments, torch.bmm(weights, values)))


def merge(first: Partial, second: Partial) -> Tensor:
    """The softmax over the keys of both, float32 ``[S, G, D]``. Every segment needs at least one key in all."""
    peak = torch.maximum(first.peak, second.peak)
    a, b = torch.exp(first.peak - peak), torch.exp(second.peak - peak)
    mass = first.mass * a + second.mass * b
    return (first.mixed * a[..., None] + second.mixed * b[..., None]).div_(mass[..., None])
