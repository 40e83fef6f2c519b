"""Runs a compression method through its interface, as the engine does, and says by brute force what it must keep."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

import torch
from hypothesis import settings
from torch import Tensor

from compressors import METHODS, CachedTokens, Compressor, Kept, MethodSpec, Rotary, Shape
from tests.tensor.surrogates import gates, perceptron


def rotary(rot: int, neox: bool = True, positions: int = 400) -> Rotary:
    """Unscaled angles, as of a Llama model."""
    angles = torch.arange(float(positions))[:, None] * 10000 ** (-torch.arange(0, rot, 2) / rot)
    return Rotary(torch.cat([angles.cos(), angles.sin()], -1), neox)


def equipped(shape: Shape) -> Shape:
    """With all that some method needs of a model."""
    surrogates = shape.surrogates or {"kvzap": perceptron(shape), "fast_kvzip": gates(shape)}
    return replace(shape, rotary=shape.rotary or rotary(shape.head_dim), surrogates=surrogates)


def shape_of(layers: int, kv_heads: int, group: int, head_dim: int) -> Shape:
    return equipped(Shape(layers, kv_heads, kv_heads * group, head_dim))


SHAPE = shape_of(layers=3, kv_heads=2, group=3, head_dim=16)
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


def full_attention(context: Context) -> Tensor:
    """Causal attention of every query head over repeated KV heads, float64 ``[L, Hq, n, n]``."""
    n = len(context.tokens)
    keys = context.keys.double().repeat_interleave(context.shape.group, 1)  # repeat_kv: query head a reads a // G
    logits = context.queries.double() @ keys.transpose(2, 3) * context.scale
    return logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf).softmax(-1)


def group_mean(context: Context, per_query_head: Tensor) -> Tensor:
    """``[L, Hq, ...]`` -> ``[L, H, ...]``."""
    return per_query_head.unflatten(1, (context.shape.kv_heads, context.shape.group)).mean(2)


# -- brute force -----------------------------------------------------------------------------------------


def heads_of(kept: Kept) -> list[list[list[int]]]:
    """Kept positions as nested lists ``[layer][head]``."""
    pieces = iter(torch.split(kept.positions, kept.counts.flatten().tolist()))
    return [[next(pieces).tolist() for _ in row] for row in kept.counts.tolist()]


def brute_force(scores: Tensor, spec: MethodSpec, needed: Tensor | None = None) -> list[list[list[int]]]:
    """The selection by Python's sort on (score, layer, head, position), with exact fractions for the rounding; of no
    more than ``needed`` by each head."""
    layers, heads, n = scores.shape
    values = [
        [[math.inf if i < spec.sinks or i >= n - spec.recent else s for i, s in enumerate(head)] for head in layer]
        for layer in scores.tolist()
    ]
    budget = spec.budget(n)
    if spec.counts == "uniform":
        counts = [[budget] * heads] * layers
    elif spec.counts == "per_head":
        counts = winners(values, layers * heads * budget)
    elif spec.counts == "within_layer":
        counts = [winners([raised(layer, budget // 5)], heads * budget)[0] for layer in values]
    else:
        if spec.counts == "per_layer":
            wanted = [Fraction(sum(row), heads) for row in winners(values, layers * heads * budget)]
        else:
            wanted = line(layers, budget, n, Fraction(spec.beta))
        counts = [[count] * heads for count in rounded(wanted, layers * budget, min(spec.forced, n), n)]
    if needed is not None:
        counts = torch.minimum(torch.tensor(counts), needed.clamp(min=spec.forced)).tolist()
    return [
        [sorted(sorted(range(n), key=lambda i: (-values[a][h][i], i))[: counts[a][h]]) for h in range(heads)]
        for a in range(layers)
    ]


def winners(values: list[list[list[float]]], total: int) -> list[list[int]]:
    """How many of the ``total`` best each head has."""
    everything = sorted(
        (-value, a, h, i) for a, row in enumerate(values) for h, head in enumerate(row) for i, value in enumerate(head)
    )
    found = [[0] * len(row) for row in values]
    for _, a, h, _ in everything[:total]:
        found[a][h] += 1
    return found


def raised(layer: list[list[float]], least: int) -> list[list[float]]:
    """Every head's ``least`` best values before all others."""
    best = [set(sorted(range(len(head)), key=lambda i, head=head: (-head[i], i))[:least]) for head in layer]
    return [[math.inf if i in mine else v for i, v in enumerate(head)] for head, mine in zip(layer, best, strict=True)]


def line(layers: int, budget: int, n: int, beta: Fraction) -> list[Fraction]:
    """PyramidKV's counts: from the largest in the first layer down to ``budget / beta``."""
    if layers == 1:
        return [Fraction(budget)]
    low, high = budget / beta, 2 * budget - budget / beta
    if high > n:
        low, high = Fraction(2 * budget - n), Fraction(n)
    return [high - a * (high - low) / (layers - 1) for a in range(layers)]


def rounded(wanted: list[Fraction], total: int, low: int, high: int) -> list[int]:
    """Largest remainder, one at a time."""
    found = [min(max(math.floor(w), low), high) for w in wanted]
    while (missing := total - sum(found)) != 0:
        step = 1 if missing > 0 else -1
        able = [a for a, count in enumerate(found) if low <= count + step <= high]
        for a in sorted(able, key=lambda a: (step * (found[a] - wanted[a]), a))[: abs(missing)]:
            found[a] += step
    return found


def check_structure(kept: Kept, spec: MethodSpec, shape: Shape, n: int) -> None:
    """What holds for every selection of every method."""
    assert kept.counts.shape == (shape.layers, shape.kv_heads)
    assert kept.counts.dtype == kept.positions.dtype == torch.int64
    assert int(kept.counts.sum()) == len(kept.positions)
    forced = set(range(min(spec.sinks, n))) | set(range(max(n - spec.recent, 0), n))
    for layer in heads_of(kept):
        for positions in layer:
            assert all(a < b for a, b in pairwise(positions))
            assert forced <= set(positions) <= set(range(n))
    budget = spec.budget(n)
    heads = shape.layers * shape.kv_heads
    if spec.selector == "poisson" or (spec.name in METHODS and METHODS[spec.name].dynamic):
        assert int(kept.counts.sum()) <= heads * budget
        return
    assert int(kept.counts.sum()) == heads * budget
    assert min(spec.least, n) <= int(kept.counts.min()) <= int(kept.counts.max()) <= n
    if spec.counts == "uniform":
        assert (kept.counts == budget).all()
    if spec.counts in ("per_layer", "pyramid"):
        assert (kept.counts == kept.counts[:, :1]).all()
    if spec.counts == "pyramid":
        assert (kept.counts[:-1] >= kept.counts[1:]).all()
    if spec.counts == "within_layer":
        assert (kept.counts.sum(1) == shape.kv_heads * budget).all()
        assert int(kept.counts.min()) >= budget // 5
