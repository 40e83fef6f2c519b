"""A random context, what is kept of it in a draft arena, and the dense softmax the arena is compared with."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import settings
from torch import Tensor

from compressors import Kept, Rotary, Shape
from vericache.draft.arena import DraftArena
from vericache.draft.source import LayerSource

SHAPE = Shape(layers=3, kv_heads=2, query_heads=4, head_dim=8)
PT = 4  # tokens of a page
quick = settings(max_examples=80, deadline=None, derandomize=True)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def neox_rotary(dim: int, theta: float, length: int) -> Rotary:
    angles = torch.arange(length)[:, None] * theta ** (-torch.arange(0, dim, 2) / dim)
    return Rotary(torch.cat([angles.cos(), angles.sin()], 1), neox=True)


def random_kept(shape: Shape, n: int, seed: int, most: int | None = None) -> Kept:
    """Every head keeps its own random number of random positions, 1 .. ``most``."""
    rng = generator(seed)
    counts = torch.randint(1, (most or n) + 1, (shape.layers, shape.kv_heads), generator=rng)
    rows = [torch.randperm(n, generator=rng)[:count].sort().values for count in counts.flatten().tolist()]
    return Kept(counts, torch.cat(rows))


@dataclass
class Tokens:
    """Keys and values ``[L, H, T, D]`` of a context and of the tokens behind it."""

    keys: Tensor
    values: Tensor

    @classmethod
    def random(cls, shape: Shape, tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> "Tokens":
        size = (shape.layers, shape.kv_heads, tokens, shape.head_dim)
        rng = generator(seed)
        return cls(torch.randn(size, generator=rng).to(dtype), torch.randn(size, generator=rng).to(dtype))

    def read(self, n: int) -> LayerSource:
        """The first ``n`` tokens, as ``put`` reads them."""
        return LayerSource(lambda layer: (self.keys[layer, :, :n], self.values[layer, :, :n]))


def append(arena: DraftArena, slot: int, source: Tokens, base: int, indices: Sequence[int]) -> None:
    """Write tokens ``base + i`` of ``source`` to tail entries ``i`` of a slot, as one batch."""
    arena.grow_tail(slot, max(indices) + 1)
    where = arena.tail_tokens(range(len(indices)), [slot] * len(indices), list(indices))
    rows = [base + i for i in indices]
    for layer in range(arena.shape.layers):
        key, value = (x[layer][:, rows].transpose(0, 1) for x in (source.keys, source.values))
        arena.write_tail(layer, where, key, value)


def dense(shape: Shape, source: Tokens, kept: Kept, n: int, tail: int, query: Tensor, layer: int) -> Tensor:
    """Softmax attention of ``query [Hq, D]`` over the kept positions and ``tail`` tokens behind the context."""
    out = torch.empty(shape.query_heads, shape.head_dim, dtype=torch.float64)
    pieces = torch.split(kept.layer(layer), kept.counts[layer].tolist())
    for a in range(shape.query_heads):
        head = a // shape.group
        positions = torch.cat([pieces[head], torch.arange(n, n + tail)])
        logits = source.keys[layer, head, positions].double() @ query[a].double() * shape.head_dim**-0.5
        out[a] = logits.softmax(0) @ source.values[layer, head, positions].double()
    return out


def attend_all(arena: DraftArena, slots: Sequence[int], tails: Sequence[int], query: Tensor) -> Tensor:
    """Draft attention of every layer: ``query [L, R, Hq, D]`` -> ``[L, R, Hq, D]``."""
    work = arena.work(slots, tails)
    scale = arena.shape.head_dim**-0.5
    return torch.stack([arena.attend(layer, work, query[layer], scale) for layer in range(arena.shape.layers)])
