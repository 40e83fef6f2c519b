"""Non-uniform codes: numbers become the nearest of a few levels that were fitted to them."""

import torch
from torch import Tensor

SAMPLES = 1 << 16  # numbers that levels are fitted to, at least, where there are more
ROUNDS = 30


def best_levels(x: Tensor, bits: int) -> Tensor:
    """2^b levels for float32 ``x [n]``, ascending, float16: k-means in one dimension (Lloyd's), from the quantiles on.
    Clusters are intervals of the sorted numbers, so a round costs no more than a few sums."""
    count = 2**bits
    if not len(x):
        return torch.zeros(count, dtype=torch.float16, device=x.device)
    ordered = x[:: len(x) // SAMPLES | 1].double().sort().values  # an odd stride meets all channels
    sums = torch.nn.functional.pad(ordered.cumsum(0), (1, 0))
    middles = (torch.arange(count, device=x.device) * 2 + 1) * len(ordered) // (2 * count)
    levels = ordered[middles]
    for _ in range(ROUNDS):
        edges = torch.searchsorted(ordered, (levels[1:] + levels[:-1]) / 2)
        edges = torch.nn.functional.pad(torch.nn.functional.pad(edges, (1, 0)), (0, 1), value=len(ordered))
        sizes = edges.diff()
        levels = torch.where(sizes > 0, sums[edges].diff() / sizes.clamp(min=1), levels)
    return levels.half()


def nearest(x: Tensor, levels: Tensor) -> Tensor:
    """uint8 codes of ``x``: the index of the nearest of the ascending ``levels`` float16 ``[2^b]``."""
    numbers = levels.float()
    return torch.bucketize(x, (numbers[1:] + numbers[:-1]) / 2).to(torch.uint8)
