"""KVQuant."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from compressors import Kept, Rotary, Shape
from vericache.draft.formats.base import aligned, page_content, pages_per_head, require_finite
from vericache.draft.formats.levels import best_levels, nearest
from vericache.draft.formats.packing import pack, unpack
from vericache.draft.formats.simulated import LayerTokens, Simulated
from vericache.draft.formats.uniform import LARGEST
from vericache.errors import ConfigError, UnsupportedError

OUTLIERS = 0.01  # share of numbers that are stored as they are
SINKS = 4  # first tokens of a sequence that are stored as they are


@dataclass(frozen=True)
class Frozen:
    """Of one layer of a slot, fixed when it is compressed: ``thresholds`` float16 ``[H, 2, D]``, least and largest key
    that is no outlier; ``levels`` float16 ``[2, 2^b]``, codebooks of keys and values; ``sinks`` ``[H, SINKS, 2, D]`` in
    the model's dtype. ``rotary`` is the model's."""

    thresholds: Tensor
    levels: Tensor
    sinks: Tensor
    rotary: Rotary

    @property
    def nbytes(self) -> int:
        return self.thresholds.nbytes + self.levels.nbytes + self.sinks.nbytes


class KVQuant:
    """KVQuant (arXiv 2401.18079): keys before RoPE with thresholds per channel, values with thresholds per token; what
    lies between them is brought to [-1, 1] and becomes the nearest of 2^b levels (nuq), what lies outside is stored as
    it is, as are the first tokens. Thresholds of keys and the levels are fitted to the kept context of one request when
    it is compressed and frozen: tokens that are packed later, page by page, get the codes they would have got then.

    A page has a fixed size: it stores the 1 % of its keys that lie farthest outside (or, where fewer do, nearest to
    it), and of each value 1 % of its channels, at least one (its thresholds are the smallest range that leaves just
    these out). Other outliers become the nearest level.

    Left out of the paper: levels weighted by the loss's gradient (they need a backward pass, here every number counts
    alike), and the correction of mean and deviation for 2 bits (Q-Norm).
    """

    def __init__(self, bits: int, page_tokens: int, head_dim: int, dtype: torch.dtype) -> None:
        if head_dim > 256 or page_tokens * head_dim > 65536:
            raise ConfigError(
                f"kvquant{bits} numbers outliers with 16 bits in a page and 8 in a token, got page_tokens "
                f"{page_tokens} and head size {head_dim}; lower page_tokens, or set page_format to turboquant{bits}"
            )
        self.bits, self.page_tokens, self.head_dim, self.dtype = bits, page_tokens, head_dim, dtype
        self.key_outliers = math.ceil(OUTLIERS * page_tokens * head_dim)
        self.value_outliers = math.ceil(OUTLIERS * head_dim)
        # Codes of keys and values, positions, thresholds of values, outliers of keys and where they are, of values.
        codes, kept = page_tokens * head_dim * bits // 8, page_tokens * self.value_outliers
        self._sizes = [codes, codes, 4 * page_tokens, 4 * page_tokens, *[2 * self.key_outliers] * 2, 2 * kept, kept]
        self.page_bytes = aligned(sum(self._sizes))

    def frozen_bytes(self, heads: int) -> int:
        """``Frozen.nbytes`` of one layer."""
        return heads * self.head_dim * (4 + 2 * SINKS * self.dtype.itemsize) + 4 * 2**self.bits

    def freeze(self, tokens: LayerTokens, heads: int, rotary: Rotary) -> Frozen:
        """Fit to the kept context of one layer, ``tokens`` in order of head and position.

        Raises:
            CompressionError: a number is not finite.
        """
        require_finite(tokens.keys, tokens.values, tokens.valid)
        sink = tokens.valid & (tokens.positions < SINKS)
        fitted = tokens.valid & ~sink
        keys, owner = self._before_rope(tokens, rotary)[fitted], tokens.heads[:, None].expand_as(fitted)[fitted]
        thresholds = torch.stack([key_thresholds(keys[owner == head]) for head in range(heads)])
        low, high = (t[owner] for t in thresholds.float().unbind(1))
        levels = [best_levels(inside(keys, low, high), self.bits)]
        values = tokens.values[fitted].float()
        low, high = (t.float() for t in value_thresholds(values, self.value_outliers))
        levels.append(best_levels(inside(values, low, high), self.bits))
        sinks = torch.zeros(heads, SINKS, 2, self.head_dim, dtype=self.dtype, device=keys.device)
        page, index = sink.nonzero(as_tuple=True)
        kv = torch.stack([tokens.keys[page, index], tokens.values[page, index]], 1)
        sinks[tokens.heads[page], tokens.positions[page, index]] = kv.to(self.dtype)
        return Frozen(thresholds, torch.stack(levels), sinks, rotary)

    def encode(self, tokens: LayerTokens, frozen: Frozen) -> Tensor:
        """-> uint8 ``[N, page_bytes]``. Raises CompressionError for numbers that are not finite."""
        require_finite(tokens.keys, tokens.values, tokens.valid)
        coded = (tokens.valid & (tokens.positions >= SINKS))[..., None]
        keys = self._before_rope(tokens, frozen.rotary).masked_fill(~coded, 0.0)
        values = tokens.values.float().masked_fill(~coded, 0.0)
        low, high = (t[:, None] for t in frozen.thresholds[tokens.heads].float().unbind(1))
        key_codes = nearest(scaled(keys, low, high), frozen.levels[0])
        excess = torch.maximum(low - keys, keys - high).masked_fill(~coded, float("-inf"))
        key_where, key_numbers = outliers(keys.flatten(1), excess.flatten(1), self.key_outliers)
        bounds = torch.stack(value_thresholds(values, self.value_outliers), 1)  # [N, 2, PT, 1]
        low, high = bounds.float().unbind(1)
        value_codes = nearest(scaled(values, low, high), frozen.levels[1])
        where, numbers = outliers(values, torch.maximum(low - values, values - high), self.value_outliers)
        return page_content(
            (
                pack(key_codes, self.bits), pack(value_codes, self.bits), tokens.positions.int(), bounds, key_numbers,
                (key_where - 32768).short(), numbers, where.to(torch.uint8),
            ),
            self.page_bytes,
        )  # fmt: skip

    def decode(self, pages: Tensor, heads: Tensor, frozen: Frozen) -> tuple[Tensor, Tensor]:
        """``pages`` of the layer's ``heads`` int64 ``[N]`` -> keys behind RoPE and values, up to rounding: float32
        ``[N, page_tokens, D]`` each. What follows a page's tokens is undefined."""
        parts = [p.contiguous() for p in pages[:, : sum(self._sizes)].split(self._sizes, 1)]
        n, halves = self.page_tokens, [p.view(torch.float16) for p in parts[3:5] + parts[6:7]]
        positions = parts[2].view(torch.int32).long()
        low, high = (t[:, None] for t in frozen.thresholds[heads].float().unbind(1))
        keys = unscaled(frozen.levels[0].float()[unpack(parts[0], self.bits, n).long()], low, high)
        where = parts[5].view(torch.int16).long() + 32768
        keys = keys.flatten(1).scatter(1, where, halves[1].float()).view_as(keys)
        keys = frozen.rotary.turn(keys.flatten(0, 1), positions.flatten()).view_as(keys)
        low, high = halves[0].float().view(-1, 2, n, 1).unbind(1)
        values = unscaled(frozen.levels[1].float()[unpack(parts[1], self.bits, n).long()], low, high)
        where, numbers = (x.view(len(keys), n, -1) for x in (parts[7].long(), halves[2].float()))
        values = values.scatter(-1, where, numbers)
        exact = frozen.sinks[heads[:, None], positions.clamp(max=SINKS - 1)].float()
        sink = (positions < SINKS)[..., None]
        return torch.where(sink, exact[:, :, 0], keys), torch.where(sink, exact[:, :, 1], values)

    def _before_rope(self, tokens: LayerTokens, rotary: Rotary) -> Tensor:
        return rotary.back(tokens.keys.flatten(0, 1), tokens.positions.flatten()).view_as(tokens.keys)


class KVQuantPages(Simulated[Frozen]):
    """Pages that hold what those of ``codec`` would give back."""

    def __init__(self, codec: KVQuant) -> None:
        super().__init__(codec.page_tokens, codec.head_dim, codec.dtype)
        self.codec = codec

    def require(self, shape: Shape) -> None:
        if shape.rotary is None:
            raise UnsupportedError(
                f"page_format {self.name} packs keys as they are before RoPE, and this model has no single rotary "
                f"embedding that all layers apply; set page_format to turboquant{self.codec.bits}"
            )

    def freeze(self, layer: int, tokens: LayerTokens, shape: Shape) -> Frozen:
        assert shape.rotary is not None
        return self.codec.freeze(tokens, shape.kv_heads, shape.rotary)

    def rounded(self, tokens: LayerTokens, frozen: Frozen) -> Tensor:
        kv = self.codec.decode(self.codec.encode(tokens, frozen), tokens.heads, frozen)
        return torch.stack(kv, 1).to(self.dtype)

    def frozen_bytes(self, layers: int, heads: int) -> int:
        return layers * self.codec.frozen_bytes(heads)

    def packed_bytes(self, kept: Kept) -> int:
        pages = int(pages_per_head(kept.counts, self.page_tokens).sum())
        saved = pages * (self.page_bytes - self.codec.page_bytes)
        return self.slot_bytes(pages, *kept.counts.shape) - saved


def key_thresholds(keys: Tensor) -> Tensor:
    """The percentiles ``OUTLIERS / 2`` and ``1 - OUTLIERS / 2`` of each channel of ``keys`` float32 ``[n, D]``: float16
    ``[2, D]``, 0 where there is no key."""
    n = len(keys)
    if not n:
        return torch.zeros(2, keys.shape[1], dtype=torch.float16, device=keys.device)
    ordered = keys.sort(0).values
    part, first = math.modf(OUTLIERS / 2 * (n - 1))
    i, j = int(first), min(int(first) + 1, n - 1)
    ends = [torch.lerp(ordered[a], ordered[b], part) for a, b in ((i, j), (n - 1 - i, n - 1 - j))]
    return torch.stack(ends).clamp(-LARGEST, LARGEST).half()


def value_thresholds(values: Tensor, outside: int) -> tuple[Tensor, Tensor]:
    """Ends of the smallest range of each token of ``values`` float32 ``[..., D]`` that leaves ``outside`` channels out:
    float16 ``[..., 1]`` each."""
    ordered = values.sort(-1).values
    low, high = ordered[..., : outside + 1], ordered[..., values.shape[-1] - 1 - outside :]
    best = (high - low).argmin(-1, keepdim=True)
    low, high = (x.gather(-1, best).clamp(-LARGEST, LARGEST).half() for x in (low, high))
    return low, high


def scaled(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """From ``low .. high`` to -1 .. 1."""
    return (x - (low + high) / 2) / ((high - low) / 2).clamp(min=1e-9)


def unscaled(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The inverse."""
    return x * ((high - low) / 2) + (low + high) / 2


def inside(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Scaled numbers without outliers, one after the other."""
    return scaled(x, low, high)[(x >= low) & (x <= high)]


def outliers(x: Tensor, excess: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Where in the last dimension of ``x`` the ``count`` numbers of the largest ``excess`` are; these in float16."""
    where = excess.topk(count, -1).indices
    return where, x.gather(-1, where).clamp(-LARGEST, LARGEST).half()
