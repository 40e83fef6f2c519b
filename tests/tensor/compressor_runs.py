"""Runs a compression method through its interface, as the engine does, and says by brute force what it must keep."""

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import torch
from hypothesis import settings
from torch import Tensor

from compressors import METHODS, CachedTokens, Compressor, Kept, MethodSpec, Shape
from compressors.budget import kept_count

SHAPE = Shape(layers=3, kv_heads=2, query_heads=6, head_dim=16)
quick = settings(max_examples=60, deadline=None, derandomize=True)


# -- running a method through its interface, as the engine does ------------------------------------------


@dataclass
class Context:
    """A random model state: queries, post-RoPE keys and values of every context token, and a tokenizer's texts."""

    shape: Shape
    tokens: list[int]
    queries: Tensor  # [L, Hq, n, D]
    keys: Tensor  # [L, H, n, D]
    values: Tensor  # [L, H, n, D]
    texts: dict[str, list[int]]
    scale: float

    @classmethod
    def random(cls, shape: Shape, num_tokens: int, seed: int = 0, sharpness: float = 2.0) -> "Context":
        rng = torch.Generator().manual_seed(seed)
        queries = torch.randn(shape.layers, shape.query_heads, num_tokens, shape.head_dim, generator=rng) * sharpness
        keys = torch.randn(shape.layers, shape.kv_heads, num_tokens, shape.head_dim, generator=rng)
        values = torch.randn(keys.shape, generator=torch.Generator().manual_seed(seed + 1))
        tokens = torch.randint(0, 1000, (num_tokens,), generator=rng).tolist()
        names = sorted({"turn", *(key for method in METHODS.values() for key in method.texts)})
        texts = {key: list(range(2000 + 10 * i, 2000 + 10 * i + 5 + i)) for i, key in enumerate(names)}
        return cls(shape, tokens, queries, keys, values, texts, shape.head_dim**-0.5)


@dataclass
class SeenProbe:
    """What one probe showed a scorer, for the references: ``query [L, T, Hq, D]`` and ``key [L, T, H, D]``."""

    start: int
    query: Tensor
    key: Tensor
    asked: list[Tensor]  # positions of every read of keys, in layer order


def drive(compressor: Compressor, context: Context, dtype: torch.dtype = torch.float32) -> list[SeenProbe]:
    """Run the method's scoring pass. A replayed row shows the context's own queries and keys, an appended one new."""
    shape, n = context.shape, len(context.tokens)
    rng = torch.Generator().manual_seed(99)
    seen = []
    for index, probe in enumerate(type(compressor.scorer).probes(context.tokens, compressor.spec, context.texts)):
        count = len(probe.tokens)
        if probe.start < n:
            span = slice(probe.start, probe.start + count)
            query = context.queries[:, :, span].transpose(1, 2)
            key = context.keys[:, :, span].transpose(1, 2)
        else:
            query = 2 * torch.randn(shape.layers, count, shape.query_heads, shape.head_dim, generator=rng)
            key = torch.randn(shape.layers, count, shape.kv_heads, shape.head_dim, generator=rng)
        query, key = query.to(dtype), key.to(dtype)
        record = SeenProbe(probe.start, query, key, [])
        for layer in range(shape.layers):
            cached = reader(context, layer, dtype, record.asked)
            compressor.observe(layer, index, query[layer], key[layer], cached, context.scale)
        seen.append(record)
    if compressor.reads_cache:
        for layer in range(shape.layers):
            compressor.read(layer, reader(context, layer, dtype, []))
    return seen


def reader(context: Context, layer: int, dtype: torch.dtype, asked: list[Tensor]) -> CachedTokens:
    """One layer of ``context``; refuses what the engine's page reader could not answer."""

    def checked(tensor: Tensor, positions: Tensor) -> Tensor:
        assert positions.dtype == torch.int64
        assert ((positions >= 0) & (positions < tensor.shape[1])).all()
        return tensor[:, positions].to(dtype)

    def keys(positions: Tensor) -> Tensor:
        asked.append(positions)
        return checked(context.keys[layer], positions)

    return CachedTokens(keys, lambda positions: checked(context.values[layer], positions))


# -- brute force -----------------------------------------------------------------------------------------


def heads_of(kept: Kept) -> list[list[list[int]]]:
    """Kept positions as nested lists ``[layer][head]``."""
    pieces = iter(torch.split(kept.positions, kept.counts.flatten().tolist()))
    return [[next(pieces).tolist() for _ in row] for row in kept.counts.tolist()]


def brute_force(scores: Tensor, mode: str, budget: int, sinks: int, recent: int) -> list[list[list[int]]]:
    """The selection by Python's sort on (score, layer, head, position), with exact fractions for the rounding."""
    layers, heads, n = scores.shape
    values = [
        [[math.inf if i < sinks or i >= n - recent else s for i, s in enumerate(head)] for head in layer]
        for layer in scores.tolist()
    ]
    everything = sorted((-values[a][h][i], a, h, i) for a in range(layers) for h in range(heads) for i in range(n))
    over = [[0] * heads for _ in range(layers)]  # token-heads above the one global threshold
    for _, a, h, _ in everything[: layers * heads * budget]:
        over[a][h] += 1
    if mode == "uniform":
        counts = [[budget] * heads for _ in range(layers)]
    elif mode == "per_head":
        counts = over
    else:
        wanted = [Fraction(sum(row), heads) for row in over]
        whole = [math.floor(w) for w in wanted]
        missing = layers * budget - sum(whole)
        by_remainder = sorted(range(layers), key=lambda a: (whole[a] - wanted[a], a))
        counts = [[whole[a] + (a in by_remainder[:missing])] * heads for a in range(layers)]
    return [
        [sorted(sorted(range(n), key=lambda i: (-values[a][h][i], i))[: counts[a][h]]) for h in range(heads)]
        for a in range(layers)
    ]


def check_structure(kept: Kept, spec: MethodSpec, shape: Shape, n: int) -> None:
    """What holds for every selection of every method."""
    budget = kept_count(spec.ratio, n, spec.sinks, spec.recent)
    assert kept.counts.shape == (shape.layers, shape.kv_heads)
    assert kept.counts.dtype == kept.positions.dtype == torch.int64
    assert int(kept.counts.sum()) == len(kept.positions) == shape.layers * shape.kv_heads * budget
    if spec.counts == "uniform":
        assert (kept.counts == budget).all()
    if spec.counts == "per_layer":
        assert (kept.counts == kept.counts[:, :1]).all()
    forced = set(range(min(spec.sinks, n))) | set(range(max(n - spec.recent, 0), n))
    for layer in heads_of(kept):
        for positions in layer:
            assert all(a < b for a, b in pairwise(positions))
            assert positions[0] >= 0
            assert positions[-1] < n
            assert forced <= set(positions)
