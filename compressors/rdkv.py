"""RDKV (Zhang et al., 2026): eviction and quantisation as one choice of bits."""

from typing import ClassVar

import torch
from torch import Tensor

from compressors.bits import WIDTHS, vector_bits, water_filling
from compressors.kvzip import KVzip
from compressors.select import Kept


class RDKV(KVzip):
    """Reverse water-filling over tokens: each gets 0 (dropped), 2, 3, 4 or 16 bits a number, so that the error of the
    attention's output is least at the size of ``ratio * n`` tokens of 2 bits. A token's weight is the square of its
    score: an error in a value enters the output times the attention it gets.

    The scores are KVzip's, where the paper derives weights from the last queries. Not taken: widths per channel.
    """

    name = "rdkv"
    summary = "KVzip's scores as bits: tokens of 0, 2, 3, 4 or 16, as large as the ratio's tokens of 2"
    counts: ClassVar[tuple[str, ...]] = ("per_head",)
    selectors: ClassVar[tuple[str, ...]] = ("top",)
    dynamic = True

    def narrowed(self, kept: Kept, scores: Tensor) -> Kept:
        head = torch.repeat_interleave(torch.arange(kept.counts.numel()), kept.counts.flatten())
        mine = scores.flatten(0, 1)[head, kept.positions]
        forced = mine.isinf()
        weights = mine.masked_fill(forced, 0.0)
        weights = torch.where(forced, weights.max(), weights).square()  # worth as much as the best token
        dim = self.shape.head_dim
        bits = water_filling(weights, forced, len(mine) * vector_bits(WIDTHS[0], dim), dim)
        stays = bits > 0
        counts = torch.bincount(head[stays], minlength=kept.counts.numel()).view_as(kept.counts)
        return Kept(counts, kept.positions[stays], bits=bits[stays])
