"""What packed page formats lose, written down a second time: the oracle of the formats and of every packed round."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from compressors import Kept
from tests.kvquant_oracle import fitted, lost
from vericache.draft.formats import rotation

STEPS = {4: 0.3352, 3: 0.5860, 2: 0.9957}  # between the best uniform levels of a normal distribution (Max 1960)


@dataclass(frozen=True)
class Packing:
    """A packed page format, told independently: ``lose`` maps keys and values ``[n, D]`` of tokens that follow one
    another in pages to what comes out of them. Behind the context, full pages are packed once ``keep`` follow."""

    lose: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    page_tokens: int
    keep: int

    def pack(self, full: DynamicCache, mask: Tensor) -> DynamicCache:
        """The cache as it would be with everything packed: the kept tokens of each head one after the other, then what
        follows the context."""
        context = mask.shape[-1]
        out = DynamicCache()
        for layer, stored in enumerate(full.layers):
            keys, values = stored.keys.clone(), stored.values.clone()
            behind = torch.arange(context, keys.shape[2])
            behind = behind[: len(behind) // self.page_tokens * self.page_tokens]
            self.pack_layer(layer, keys[0], values[0], [m.nonzero()[:, 0] for m in mask[layer]], behind)
            out.update(keys, values, layer)
        return out

    def pack_layer(self, layer: int, keys: Tensor, values: Tensor, kept: Sequence[Tensor], behind: Tensor) -> None:
        """In place, ``keys`` and ``values [H, T, D]``; positions ``kept`` of each head, and ``behind`` the context."""
        for head, mine in enumerate(kept):
            for where in (mine, behind):
                if len(where):
                    keys[head, where], values[head, where] = self.lose(keys[head, where], values[head, where])

    def exact_from(self, context: int, n: int) -> int:
        """The first token that is not packed when ``n`` are verified."""
        return context + max(0, n - context - self.keep) // self.page_tokens * self.page_tokens


def turboquant(bits: int, page_tokens: int, keep: int) -> Packing:
    def rounded(x: Tensor) -> Tensor:
        matrix = rotation(x.shape[-1], x.device).double()
        y = x.double() @ matrix.T
        scale = (y.pow(2).mean(-1, keepdim=True).sqrt().half().double() * STEPS[bits]).clamp(min=1e-30)
        level = (torch.floor(y / scale) + 0.5).clamp(-(2 ** (bits - 1)) + 0.5, 2 ** (bits - 1) - 0.5)
        return ((level * scale) @ matrix).float()

    return Packing(lambda keys, values: (rounded(keys), rounded(values)), page_tokens, keep)


def rotatekv(bits: int, page_tokens: int, keep: int) -> Packing:
    def rounded(x: Tensor) -> Tensor:
        """Every token in a range of its own, behind a Hadamard matrix written down by its definition."""
        sizes = [int(s) << i for i, s in enumerate(reversed(f"{x.shape[-1]:b}"))][::-1]
        blocks = [
            torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]) / size**0.5
            for size in sizes
            if size
        ]
        matrix = torch.block_diag(*blocks).double()
        y = x.double() @ matrix
        low, high = y.amin(-1, keepdim=True).float(), y.amax(-1, keepdim=True).float()
        scale = ((high - low) / (2**bits - 1)).half().clamp(min=6e-8).double()
        zero = low.half().double()
        return ((((y - zero) / scale).round().clamp(0, 2**bits - 1) * scale + zero) @ matrix).float()

    return Packing(lambda keys, values: (rounded(keys), rounded(values)), page_tokens, keep)


def kivi(bits: int, page_tokens: int, keep: int) -> Packing:
    """Pages are whole groups of 32 tokens."""

    def rounded(group: Tensor) -> Tensor:
        """Along the first dimension."""
        low, high = group.amin(0), group.amax(0)
        scale = ((high - low) / (2**bits - 1)).half().clamp(min=6e-8).float()
        zero = low.half().float()
        return ((group - zero) / scale).round().clamp(0, 2**bits - 1) * scale + zero

    def lose(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        keys = torch.cat([rounded(g) for g in keys.split(32)])
        values = torch.cat([rounded(g.T).T for g in values.split(32, 1)], 1)
        return keys, values

    return Packing(lose, page_tokens, keep)


@dataclass(frozen=True)
class KVQuantPacking(Packing):
    """Everything behind RoPE with base ``theta``; fitted to what is kept of the context, in all heads of a layer."""

    bits: int
    theta: float

    def pack_layer(self, layer: int, keys: Tensor, values: Tensor, kept: Sequence[Tensor], behind: Tensor) -> None:
        heads = [(keys[h, mine], values[h, mine], mine) for h, mine in enumerate(kept)]
        fit = fitted(heads, self.bits, self.theta)
        for head, mine in enumerate(kept):
            for where in (mine, behind):
                if len(where):
                    run = keys[head, where], values[head, where], where
                    keys[head, where], values[head, where] = lost(run, fit, head, self.page_tokens, self.theta)


def kvquant(bits: int, page_tokens: int, keep: int, theta: float) -> Packing:
    def lose(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("depends on positions and on other heads")

    return KVQuantPacking(lose, page_tokens, keep, bits, theta)


# layer, head and positions int64 [m] of tokens -> bits of their keys and of their values, int64 [m] each
Widths = Callable[[int, int, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Mixed(Packing):
    """TurboQuant with widths that differ."""

    widths: Widths

    def pack_layer(self, layer: int, keys: Tensor, values: Tensor, kept: Sequence[Tensor], behind: Tensor) -> None:
        for head, mine in enumerate(kept):
            where = torch.cat([mine, behind])
            for side, bits in zip((keys, values), self.widths(layer, head, where), strict=True):
                side[head, where] = narrowed(side[head, where], bits)


def narrowed(x: Tensor, bits: Tensor) -> Tensor:
    """``x [m, D]`` with token i as ``bits[i]`` bits leave it."""
    out = x.clone()
    for width in set(bits.tolist()) - {16}:
        out[bits == width] = turboquant(width, 1, 0).lose(x[bits == width], x[:0])[0]
    return out


def mixed(widths: Widths, page_tokens: int, keep: int) -> Mixed:
    def lose(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("depends on layer and position")

    return Mixed(lose, page_tokens, keep, widths)


def by_layer(bits: Sequence[tuple[int, int]]) -> Widths:
    """Of keys and values of each layer."""
    return lambda layer, head, where: tuple(torch.full_like(where, b) for b in bits[layer])


def by_token(bits: Tensor, behind: Widths) -> Widths:
    """``bits`` int64 ``[L, H, n]`` of a context, and of what is behind it."""
    context = bits.shape[-1]

    def widths(layer: int, head: int, where: Tensor) -> tuple[Tensor, Tensor]:
        mine = bits[layer, head, where.clamp(max=context - 1)]
        keys, values = (torch.where(where < context, mine, other) for other in behind(layer, head, where))
        return keys, values

    return widths


def kept_bits(kept: Kept, context: int) -> Tensor:
    """``Kept.bits`` int64 ``[L, H, context]``, 0 for what is not kept."""
    assert kept.bits is not None
    out = torch.zeros(kept.counts.numel(), context, dtype=torch.int64)
    head = torch.repeat_interleave(torch.arange(len(out)), kept.counts.flatten())
    out[head, kept.positions] = kept.bits.long()
    return out.view(*kept.counts.shape, context)


def packing(name: str, page_tokens: int, keep: int, theta: float) -> Packing | None:
    """The oracle of the page format called ``name``; None for plain pages, which lose nothing. ``theta`` is the base of
    the model's RoPE."""
    if name == "plain":
        return None
    family, bits = name[:-1], int(name[-1])
    if family == "kvquant":
        return kvquant(bits, page_tokens, keep, theta)
    return {"turboquant": turboquant, "kivi": kivi, "rotatekv": rotatekv}[family](bits, page_tokens, keep)
