"""From a ratio to counts per (layer, KV head). The only place where a ratio becomes a count."""

import math

import torch
from torch import Tensor

COUNTS = ("uniform", "per_layer", "per_head", "within_layer", "pyramid")
SAFEGUARD = 0.2  # share of the budget that no head falls below where heads compete within a layer (AdaKV's alpha)


def kept_count(ratio: float, num_tokens: int, sinks: int, recent: int) -> int:
    """Average tokens kept per KV head: ``ratio * n`` rounded half up, at least the forced ones, at most n."""
    return min(num_tokens, max(math.floor(ratio * num_tokens + 0.5), sinks + recent))


def forced_mask(num_tokens: int, sinks: int, recent: int) -> Tensor:
    """bool ``[n]``: tokens that are always kept (attention sinks and the local window)."""
    mask = torch.zeros(num_tokens, dtype=torch.bool)
    mask[:sinks] = True
    mask[max(num_tokens - recent, 0) :] = True
    return mask


def allocate(scores: Tensor, budget: int, mode: str, forced: int, more: int = 0, beta: float = 20.0) -> Tensor:
    """Counts int64 ``[L, H]`` with sum ``L * H * budget``, each in ``[forced + more, n]``.

    Args:
        scores: float32 ``[L, H, n]`` with forced tokens at +inf.
        budget: average count per head, at least ``forced + more``.
        mode: ``uniform``; ``per_head``, one global threshold over all layers and heads (KVzip's own rule);
            ``per_layer``, that threshold's mean over the heads of a layer, as engines with equal counts per
            layer need it; ``within_layer`` (AdaKV, Feng et al., 2024), layers get equal totals and one threshold each;
            ``pyramid`` (PyramidKV, Cai et al., 2024), uniform in a layer, falling from the first layer to the last.
        forced: tokens every head keeps.
        more: tokens every head keeps at least beside those.
        beta: of the pyramid, average count over the last layer's; 1 is uniform.
    """
    layers, heads, n = scores.shape
    least = forced + more
    if mode == "uniform":
        return torch.full((layers, heads), budget, dtype=torch.int64, device=scores.device)
    if mode == "within_layer":
        return _compete(scores, heads * budget, forced, max(least, math.floor(SAFEGUARD * budget)))
    if mode == "pyramid":
        wanted = torch.tensor(pyramid(layers, budget, n, beta), dtype=torch.float64, device=scores.device)
    else:
        counts = _compete(scores.view(1, layers * heads, n), layers * heads * budget, forced, least)
        counts = counts.view(layers, heads)
        if mode == "per_head":
            return counts
        wanted = counts.double().mean(1)
    per_layer = _round_to_sum(wanted, layers * budget, least, n)
    return per_layer[:, None].expand(layers, heads).contiguous()


def pyramid(layers: int, budget: int, most: int, beta: float) -> list[float]:
    """Counts of the layers, on a line with mean ``budget`` down to ``budget / beta``; flatter where the first layer
    would keep more than ``most``."""
    if layers == 1:
        return [float(budget)]
    first = min(2 * budget - budget / beta, most)
    step = 2 * (first - budget) / (layers - 1)
    return [first - layer * step for layer in range(layers)]


def _compete(scores: Tensor, total: int, forced: int, least: int) -> Tensor:
    """int64 ``[R, H]``: how many of the ``total`` best of ``scores[r]`` each head has, where the ``least`` best of
    every head go before all others."""
    rows, heads, n = scores.shape
    # A stable sort breaks ties by the smaller index, so that runs are reproducible.
    if least > forced:  # forced ones are at +inf already
        best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :least]
        scores = scores.scatter(-1, best, float("inf"))
    order = torch.sort(scores.flatten(1), dim=-1, descending=True, stable=True).indices[:, :total]
    place = order // n + torch.arange(rows, device=scores.device)[:, None] * heads
    return torch.bincount(place.flatten(), minlength=rows * heads).view(rows, heads)


def _round_to_sum(wanted: Tensor, total: int, low: int, high: int) -> Tensor:
    """Integers near ``wanted`` within ``[low, high]`` that sum to ``total`` (largest remainder)."""
    wanted = (wanted * 2**30).round() / 2**30  # equal remainders are equal numbers, whatever a division left in them
    base = wanted.floor().clamp(low, high).long()
    missing = total - int(base.sum())
    while missing:
        room = (base < high) if missing > 0 else (base > low)
        gap = torch.where(room, (wanted - base) if missing > 0 else (base - wanted), float("-inf"))
        chosen = torch.sort(gap, descending=True, stable=True).indices[: min(abs(missing), int(room.sum()))]
        base[chosen] += 1 if missing > 0 else -1
        missing = total - int(base.sum())
    return base
