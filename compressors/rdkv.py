"""RDKV (Zhang et al., 2026): eviction and quantisation as one choice of bits."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from compressors.base import MethodSpec
from compressors.bits import WIDTHS, vector_bits, water_filling
from compressors.errors import MethodError
from compressors.kvzip import KVzip
from compressors.select import Kept


class RDKV(KVzip):
    """Reverse water-filling over tokens: each gets 0 (dropped), 2, 3, 4 or 16 bits a number, so that the error of the
    attention's output is least at the size of ``ratio * n`` tokens of 2 bits. A token's weight is the square of its
    score: an error in a value enters the output times the attention it gets.

    The scores are KVzip's, where the paper derives weights from the prompt's attention. Not taken: widths per channel.

    Option ``widest``: bits of a token at most. 16 as in the paper; 4 by default, since that accepts more drafts.
    """

    name = "rdkv"
    summary = "KVzip's scores as bits: tokens of 0, 2, 3, 4 or 16, as large as the ratio's tokens of 2"
    options: ClassVar[Mapping[str, int]] = {**KVzip.options, "widest": 4}
    counts: ClassVar[tuple[str, ...]] = ("per_head",)
    selectors: ClassVar[tuple[str, ...]] = ("top",)
    dynamic = True

    @classmethod
    def check(cls, spec: MethodSpec) -> None:
        super().check(spec)
        if cls.option(spec, "widest") not in WIDTHS:
            raise MethodError(
                f"{cls.name}: option 'widest' must be one of {', '.join(map(str, WIDTHS))}, "
                f"got {cls.option(spec, 'widest')}"
            )

    def narrowed(self, kept: Kept, scores: Tensor) -> Kept:
        head = torch.repeat_interleave(torch.arange(kept.counts.numel()), kept.counts.flatten())
        mine = scores.flatten(0, 1)[head, kept.positions]
        forced = mine.isinf()
        weights = mine.masked_fill(forced, 0.0)
        weights = torch.where(forced, weights.max(), weights).square()  # worth as much as the best token
        dim = self.shape.head_dim
        widths = [width for width in WIDTHS if width <= self.option(self.spec, "widest")]
        bits = water_filling(weights, forced, len(mine) * vector_bits(WIDTHS[0], dim), dim, widths)
        stays = bits > 0
        counts = torch.bincount(head[stays], minlength=kept.counts.numel()).view_as(kept.counts)
        return Kept(counts, kept.positions[stays], bits=bits[stays])
