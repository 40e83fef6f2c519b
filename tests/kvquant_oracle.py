"""KVQuant's rounding written down a second time, in float64 and token by token: the oracle of its pages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SINKS, SHARE = 4, 0.01
Run = tuple[Tensor, Tensor, Tensor]  # keys and values [n, D] of one head's tokens, and their positions [n]


@dataclass(frozen=True)
class Fit:
    """``low`` and ``high [H, D]`` of keys, and the levels of keys and of values; rounded to float16."""

    low: Tensor
    high: Tensor
    key_levels: Tensor
    value_levels: Tensor


def turned(x: Tensor, positions: Tensor, theta: float, sign: int) -> Tensor:
    """RoPE over pairs (i, i + D / 2)."""
    half = x.shape[1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos(), sign * angles.sin()
    a, b = x.double().chunk(2, 1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], 1)


def fitted(heads: Sequence[Run], bits: int, theta: float) -> Fit:
    """To all runs of a layer, one per head, without sinks."""
    lows, highs, key_numbers, value_numbers = [], [], [], []
    for keys, values, positions in heads:
        behind = positions >= SINKS
        before = turned(keys[behind], positions[behind], theta, -1)
        ends = torch.quantile(before, torch.tensor([SHARE / 2, 1 - SHARE / 2], dtype=torch.float64), 0)
        low, high = ends.half().double()
        lows.append(low)
        highs.append(high)
        key_numbers.append(between(before, low, high))
        tokens = values[behind].double()
        value_numbers.append(between(tokens, *narrowest(tokens)))
    levels = [k_means(torch.cat(numbers), bits) for numbers in (key_numbers, value_numbers)]
    return Fit(torch.stack(lows), torch.stack(highs), *levels)


def narrowest(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The ends ``[n, 1]`` of each token's smallest range without SHARE of its channels."""
    out, last = math.ceil(SHARE * tokens.shape[1]), tokens.shape[1] - 1
    ends = []
    for ordered in tokens.sort(1).values.tolist():
        i = min(range(out + 1), key=lambda i: ordered[last - out + i] - ordered[i])
        ends.append((ordered[i], ordered[last - out + i]))
    low, high = torch.tensor(ends).half().double().view(-1, 2, 1).unbind(1)
    return low, high


def unit(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return (x - (low + high) / 2) / ((high - low) / 2).clamp(min=1e-9)


def between(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return unit(x, low, high)[(x >= low) & (x <= high)]


def k_means(x: Tensor, bits: int) -> Tensor:
    """Thirty rounds from the quantiles on."""
    ordered, count = x.sort().values, 2**bits
    levels = torch.stack([ordered[(2 * i + 1) * len(x) // (2 * count)] for i in range(count)])
    for _ in range(30):
        owner = (ordered[:, None] - levels).abs().argmin(1)
        means = [ordered[owner == i].mean() if (owner == i).any() else levels[i] for i in range(count)]
        levels = torch.stack(means)
    return levels.half().double()


def lost(run: Run, fit: Fit, head: int, page_tokens: int, theta: float) -> tuple[Tensor, Tensor]:
    """What comes out of a run's pages."""
    keys, values, positions = run
    before = turned(keys, positions, theta, -1)
    new_keys = torch.cat(
        [page_keys(k, p, fit, head, page_tokens)
         for k, p in zip(before.split(page_tokens), positions.split(page_tokens), strict=True)]
    )  # fmt: skip
    new_keys = turned(new_keys, positions, theta, 1)
    new_values = page_values(values.double(), fit)
    sink = (positions < SINKS)[:, None]
    return tuple(torch.where(sink, old, new.float()) for old, new in ((keys, new_keys), (values, new_values)))


def page_keys(keys: Tensor, positions: Tensor, fit: Fit, head: int, page_tokens: int) -> Tensor:
    low, high = fit.low[head], fit.high[head]
    out = rounded(unit(keys, low, high), fit.key_levels) * (high - low) / 2 + (low + high) / 2
    room = math.ceil(SHARE * page_tokens * keys.shape[1])
    return with_outliers(
        out, keys, torch.where((positions >= SINKS)[:, None], excess(keys, low, high), -math.inf), room
    )


def page_values(values: Tensor, fit: Fit) -> Tensor:
    low, high = narrowest(values)
    out = rounded(unit(values, low, high), fit.value_levels) * (high - low) / 2 + (low + high) / 2
    outside, room = excess(values, low, high), math.ceil(SHARE * values.shape[1])
    return torch.stack([with_outliers(*token, room) for token in zip(out, values, outside, strict=True)])


def excess(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.maximum(low - x, x - high)


def with_outliers(out: Tensor, x: Tensor, outside: Tensor, room: int) -> Tensor:
    """The ``room`` numbers farthest outside as they are, or nearest to it."""
    ranked = sorted(((e, i) for i, e in enumerate(outside.flatten().tolist())), reverse=True)
    for _, i in ranked[:room]:
        out.view(-1)[i] = x.flatten()[i].half().double()
    return out


def rounded(x: Tensor, levels: Tensor) -> Tensor:
    return levels[(x[..., None] - levels).abs().argmin(-1)]
