"""From a ratio to counts per (layer, KV head). The only place where a ratio becomes a count."""

import math

import torch
from torch import Tensor

COUNTS = ("uniform", "per_layer", "per_head")


def kept_count(ratio: float, num_tokens: int, sinks: int, recent: int) -> int:
    """Average tokens kept per KV head: ``ratio * n`` rounded half up, at least the forced ones, at most n."""
    return min(num_tokens, max(math.floor(ratio * num_tokens + 0.5), sinks + recent))


def forced_mask(num_tokens: int, sinks: int, recent: int) -> Tensor:
    """bool ``[n]``: tokens that are always kept (attention sinks and the local window)."""
    mask = torch.zeros(num_tokens, dtype=torch.bool)
    mask[:sinks] = True
    mask[max(num_tokens - recent, 0) :] = True
    return mask


def allocate(scores: Tensor, budget: int, mode: str, forced: int) -> Tensor:
    """Counts int64 ``[L, H]`` with sum ``L * H * budget``, each in ``[forced, n]``.

    Args:
        scores: float32 ``[L, H, n]`` with forced tokens at +inf.
        budget: average count per head.
        mode: ``uniform``; ``per_head``, one global threshold over all layers and heads (KVzip's own rule);
            ``per_layer``, that threshold's mean over the heads of a layer, as engines with equal counts per
            layer need it.
        forced: tokens every head keeps.
    """
    layers, heads, n = scores.shape
    if mode == "uniform":
        return torch.full((layers, heads), budget, dtype=torch.int64)
    # A stable sort breaks ties by the smaller index, so that runs are reproducible.
    order = torch.sort(scores.flatten(), descending=True, stable=True).indices[: layers * heads * budget]
    counts = torch.bincount(order // n, minlength=layers * heads).view(layers, heads)
    if mode == "per_head":
        return counts
    per_layer = _round_to_sum(counts.double().mean(1), layers * budget, forced, n)
    return per_layer[:, None].expand(layers, heads).contiguous()


def _round_to_sum(wanted: Tensor, total: int, low: int, high: int) -> Tensor:
    """Integers near ``wanted`` within ``[low, high]`` that sum to ``total`` (largest remainder)."""
    base = wanted.floor().clamp(low, high).long()
    missing = total - int(base.sum())
    while missing:
        room = (base < high) if missing > 0 else (base > low)
        gap = torch.where(room, (wanted - base) if missing > 0 else (base - wanted), float("-inf"))
        chosen = torch.sort(gap, descending=True, stable=True).indices[: min(abs(missing), int(room.sum()))]
        base[chosen] += 1 if missing > 0 else -1
        missing = total - int(base.sum())
    return base
