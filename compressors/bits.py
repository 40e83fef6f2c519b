"""Widths: how many bits the numbers of a token or of a layer are worth.

Sizes are in bits of a token's key in one KV head; its value takes as many. A quantised vector has a scale beside its
codes.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

WIDTHS = (2, 3, 4, 16)  # of what is kept; 16: as it is
SCALE_BITS = 16
# Squared error of a number of unit variance: TurboQuant's levels (Max 1960), nothing, and the number itself.
ERRORS: Mapping[int, float] = {0: 1.0, 2: 0.1188, 3: 0.0374, 4: 0.0115, 16: 0.0}

Pair = tuple[int, int]  # bits of keys and of values


def vector_bits(width: int, head_dim: int) -> int:
    """Of a key or a value in so many bits a number."""
    return width * head_dim + SCALE_BITS * (0 < width < 16)


def water_filling(
    weights: Tensor, forced: Tensor, budget: int, head_dim: int, widths: Sequence[int] = WIDTHS
) -> Tensor:
    """Bits of every token, the sum of ``weights * ERRORS[bits]`` being least for ``budget`` bits: reverse water-filling
    (Cover and Thomas, 10.3.3), the widths being whole ones and the errors those of real codes.

    A token goes from one width to the next where that saves most error per bit; what it saves falls from step to step,
    so that the best steps come first. Ties go to the smaller index.

    Args:
        weights: float ``[...]``, at least 0.
        forced: bool ``[...]``, tokens that get the least width at least; ``budget`` suffices for that.
        widths: ascending, out of ``WIDTHS``.

    Returns:
        uint8 like ``weights``, 0 (dropped) or one of ``widths``.
    """
    ladder = [0, *widths]
    costs = torch.tensor([vector_bits(b, head_dim) for b in ladder]).diff()
    saved = -torch.tensor([ERRORS[b] for b in ladder]).diff() / costs
    steps = weights.flatten()[:, None] * saved  # [tokens, widths]
    steps[forced.flatten(), 0] = float("inf")
    order = torch.sort(steps.flatten(), descending=True, stable=True).indices
    taken = torch.zeros(len(order), dtype=torch.bool)
    taken[order[costs[order % len(widths)].cumsum(0) <= budget]] = True
    return torch.tensor(ladder, dtype=torch.uint8)[taken.view(steps.shape).sum(-1)].view(weights.shape)


def bits_of_layers(errors: Sequence[Mapping[Pair, float]], mean: float) -> list[Pair]:
    """A pair of widths for every layer, the sum of their ``errors`` being least, of at most ``mean`` bits a number.

    KVTuner (Li et al., 2025) searches these sums by evolution; layer by layer over what has been spent they are found
    exactly. Errors of layers are taken to add up.

    Raises:
        ValueError: ``mean`` is below the least pair of every layer.
    """
    limit = int(2 * mean * len(errors) + 1e-9)
    best: dict[int, tuple[float, list[Pair]]] = {0: (0.0, [])}  # by bits spent
    for layer in errors:
        found: dict[int, tuple[float, list[Pair]]] = {}
        for spent, (error, chosen) in best.items():
            for pair, more in layer.items():
                bits = spent + sum(pair)
                if bits <= limit and (bits not in found or error + more < found[bits][0]):
                    found[bits] = (error + more, [*chosen, pair])
        best = found
    if not best:
        least = sum(min(sum(pair) for pair in layer) for layer in errors) / (2 * len(errors))
        raise ValueError(f"mean bits are {mean:g}, the least widths of all layers have a mean of {least:g}")
    return min(best.values(), key=lambda found: found[0])[1]
