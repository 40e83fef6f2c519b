"""Key norms (Devoto et al., 2024): keys of a small norm are looked at most."""

from typing import ClassVar

from compressors.base import LayerwiseScorer
from compressors.cached import CachedTokens, runs


class KNorm(LayerwiseScorer):
    """The smaller the L2 norm of a token's key the more the token matters, in float32 as in kvpress 0.5.5: half
    precision gives many tokens the same norm. Norms of different heads do not compare."""

    name = "knorm"
    summary = "tokens whose keys have a small norm; needs no queries"
    query_aware = False
    reads_cache = True
    counts: ClassVar[tuple[str, ...]] = ("uniform", "pyramid")
    default_counts = "uniform"
    selectors: ClassVar[tuple[str, ...]] = ("top",)

    def read(self, layer: int, cached: CachedTokens) -> None:
        for at in runs(self.num_tokens, self.shape.kv_heads * self.shape.head_dim):
            self._scores[layer][:, at] = -cached.keys(at).float().norm(dim=-1)
