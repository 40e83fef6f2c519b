"""Random surrogates for tests."""

from itertools import pairwise

import torch

from compressors import Shape, Surrogate
from compressors.fast_kvzip import Gate
from compressors.kvzap import Perceptron


def perceptron(shape: Shape, hidden: int | None = None, seed: int = 0) -> Perceptron:
    """Linear, or with ``hidden`` numbers between two maps."""
    rng = torch.Generator().manual_seed(seed)
    inputs = 2 * shape.kv_heads * shape.head_dim
    widths = [inputs, shape.kv_heads] if hidden is None else [inputs, hidden, shape.kv_heads]
    tensors = {}
    for index, (i, o) in enumerate(pairwise(widths)):
        tensors[f"weight{index}"] = torch.randn(shape.layers, i, o, generator=rng) / i**0.5
        tensors[f"bias{index}"] = torch.randn(shape.layers, o, generator=rng)
    return Perceptron(tensors)


def gates(shape: Shape, queries: int = 3, width: int = 4, sinks: int = 5) -> Gate:
    rng = torch.Generator().manual_seed(0)
    inputs, heads = 2 * shape.kv_heads * shape.head_dim, shape.kv_heads
    sizes = {
        "query": (inputs, heads * queries * width), "query_bias": (heads * queries * width,), "query_norm": (width,),
        "key": (inputs, heads * width), "key_bias": (heads * width,), "key_norm": (width,),
        "sinks": (heads, sinks, width), "bias": (heads, queries),
    }  # fmt: skip
    return Gate({name: torch.randn(shape.layers, *size, generator=rng) for name, size in sizes.items()})


def same(a: Surrogate, b: Surrogate) -> bool:
    return a.tensors.keys() == b.tensors.keys() and all(torch.equal(t, b.tensors[n]) for n, t in a.tensors.items())
