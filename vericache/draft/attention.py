"""Attention over head pages, in torch: the reference, and what runs on the CPU.

The work list is (page, segment, valid tokens); a segment is one (row, KV head). Pages are independent pieces of
one softmax and are merged by their maxima and sums (log-sum-exp), so ragged lengths cost nothing but the last,
partly filled page of a head. The GPU kernel has the same contract.
"""

import torch
from torch import Tensor


def attend_pages(query: Tensor, pool: Tensor, pages: Tensor, segments: Tensor, lengths: Tensor) -> Tensor:
    """Softmax attention of each segment's queries over all pages of the segment.

    Args:
        query: float32 ``[S, G, D]``, already scaled. Every segment needs at least one valid key.
        pool: ``[P, 2, PT, D]``, keys and values of every page. Tokens beyond a work item's length are not read.
        pages: int ``[N]``, page of each work item.
        segments: int64 ``[N]``, segment of each work item.
        lengths: int64 ``[N]``, valid tokens of each work item, 0 .. PT.

    Returns:
        float32 ``[S, G, D]``.
    """
    count, group, dim = query.shape
    kv = pool.index_select(0, pages).float()  # [N, 2, PT, D], a copy
    q = query.index_select(0, segments)  # [N, G, D]
    logits = torch.bmm(q, kv[:, 0].transpose(1, 2))  # [N, G, PT]
    unused = torch.arange(kv.shape[2]) >= lengths[:, None]
    logits.masked_fill_(unused[:, None], float("-inf"))
    kv[:, 1].masked_fill_(unused[..., None], 0.0)  # weight 0 times a stale NaN would be NaN
    index = segments[:, None].expand(-1, group)
    peak = torch.full((count, group), float("-inf")).scatter_reduce_(0, index, logits.amax(-1), "amax")
    weights = torch.exp_(logits.sub_(peak.index_select(0, segments)[..., None]))
    total = torch.zeros(count, group).index_add_(0, segments, weights.sum(-1))
    mixed = torch.zeros(count, group, dim).index_add_(0, segments, torch.bmm(weights, kv[:, 1]))
    return mixed.div_(total[..., None])
