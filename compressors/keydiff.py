"""KeyDiff (Park et al., 2025): tokens whose keys differ from the others."""

from typing import ClassVar

import torch
import torch.nn.functional as F

from compressors.base import LayerwiseScorer
from compressors.cached import CachedTokens, runs


class KeyDiff(LayerwiseScorer):
    """The less similar (cosine) a token's key is to the mean of all keys, each of norm 1, the more the token matters.
    The paper drops tokens block by block; here, as in kvpress 0.5.5, all are compared with the mean of all."""

    name = "keydiff"
    summary = "tokens whose keys differ from the mean key; needs no queries"
    query_aware = False
    reads_cache = True
    counts: ClassVar[tuple[str, ...]] = ("uniform", "pyramid")
    default_counts = "uniform"
    selectors: ClassVar[tuple[str, ...]] = ("top",)

    def read(self, layer: int, cached: CachedTokens) -> None:
        positions = runs(self.num_tokens, self.shape.kv_heads * self.shape.head_dim)
        total = torch.zeros(self.shape.kv_heads, 1, self.shape.head_dim)
        for at in positions:
            total += F.normalize(cached.keys(at).float(), dim=-1).sum(1, keepdim=True)
        for at in positions:  # the mean's direction is the sum's
            self._scores[layer][:, at] = -F.cosine_similarity(cached.keys(at).float(), total, dim=-1)
