"""TurboQuant with widths that differ."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from compressors import Kept, Shape
from compressors.bits import WIDTHS, Pair, vector_bits
from vericache.draft.formats.base import aligned, pages_per_head
from vericache.draft.formats.simulated import LayerTokens, Simulated
from vericache.draft.formats.turboquant import TurboQuant

DEFAULT: Pair = (4, 4)


class Mixed(Simulated[Pair]):
    """TurboQuant's codes with a width per token, where the compressor gives one (RDKV; keys and values alike), else one
    per layer for keys and one for values (``layer_bits``; KVTuner), else ``DEFAULT``. Tokens behind the context have
    their layer's widths. 16 bits are the model's dtype.

    A packed page would hold tokens of one head and one pair of widths. Attention does not ask for their order, so that
    a head needs a count per pair, and a token nothing beside its codes and scales.
    """

    def __init__(self, page_tokens: int, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__(page_tokens, head_dim, dtype)
        self.layer_bits: Sequence[Pair] = ()
        self._codecs = {b: TurboQuant(b, page_tokens, head_dim, dtype) for b in WIDTHS if b < 16}

    def freeze(self, layer: int, tokens: LayerTokens, shape: Shape) -> Pair:
        return self.layer_bits[layer] if self.layer_bits else DEFAULT

    def rounded(self, tokens: LayerTokens, frozen: Pair) -> Tensor:
        sides = zip((tokens.keys, tokens.values), frozen, strict=True)
        bits = tokens.bits
        kv = [self._narrow(x, torch.full_like(tokens.positions, b) if bits is None else bits) for x, b in sides]
        return torch.stack(kv, 1).to(self.dtype)

    def _narrow(self, x: Tensor, bits: Tensor) -> Tensor:
        """What is left of ``x [N, page_tokens, D]`` in ``bits [N, page_tokens]``; nothing of tokens without a width."""
        out = x.float().masked_fill((bits == 0)[..., None], 0.0)
        for width, codec in self._codecs.items():
            codes, scale = codec.codes(x[mine := bits == width])
            out[mine] = codec.back(codec.numbers(codes, scale.float()[..., None]))
        return out

    def packed_bytes(self, kept: Kept) -> int:
        total = 4 * kept.counts.numel() * (1 if kept.bits is None else len(WIDTHS))
        for pair, counts in self._by_width(kept):
            sizes = (self._vector_bytes(width) for width in pair)
            page = aligned(self.page_tokens * sum(sizes))
            total += int(pages_per_head(counts, self.page_tokens).sum()) * (page + 4)  # and its entry in a table
        return total

    def _vector_bytes(self, width: int) -> int:
        return self.head_dim * self.dtype.itemsize if width == 16 else vector_bits(width, self.head_dim) // 8

    def _by_width(self, kept: Kept) -> Iterator[tuple[Pair, Tensor]]:
        """Pairs of widths, and how many tokens of each head (and layer) have it."""
        if kept.bits is not None:
            heads = torch.repeat_interleave(torch.arange(kept.counts.numel()), kept.counts.flatten())
            bits = kept.bits.cpu()
            for width in WIDTHS:
                yield (width, width), torch.bincount(heads[bits == width])
        elif self.layer_bits:
            yield from zip(self.layer_bits, kept.counts, strict=True)
        else:
            yield DEFAULT, kept.counts
