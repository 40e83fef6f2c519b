"""Random surrogates for tests."""

from itertools import pairwise

import torch

from compressors import Shape, Surrogate


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
