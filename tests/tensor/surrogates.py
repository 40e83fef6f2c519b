"""Random surrogates and rotary embeddings for tests."""

from dataclasses import replace
from itertools import pairwise

import torch

from compressors import Rotary, Shape, Surrogate


def rotary(head_dim: int, positions: int = 4096) -> Rotary:
    angles = torch.arange(float(positions))[:, None] * 10000 ** (-torch.arange(0, head_dim, 2) / head_dim)
    return Rotary(torch.cat([angles.cos(), angles.sin()], -1), neox=True)


def equipped(shape: Shape) -> Shape:
    """With all that some method needs of a model."""
    return replace(shape, rotary=rotary(shape.head_dim), surrogate=surrogate(shape))


def surrogate(shape: Shape, method: str = "kvzap", hidden: int | None = None, seed: int = 0) -> Surrogate:
    """Linear, or with ``hidden`` numbers between two maps."""
    rng = torch.Generator().manual_seed(seed)
    inputs = 2 * shape.kv_heads * shape.head_dim
    widths = [inputs, shape.kv_heads] if hidden is None else [inputs, hidden, shape.kv_heads]
    return Surrogate(
        method,
        tuple(
            (torch.randn(shape.layers, i, o, generator=rng) / i**0.5, torch.randn(shape.layers, o, generator=rng))
            for i, o in pairwise(widths)
        ),
    )
