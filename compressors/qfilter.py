"""Q-Filters (Godey et al., 2025): keys along the direction that all queries of a head share."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from compressors.cached import CachedTokens, runs
from compressors.replay import Replay


class QFilter(Replay):
    """Queries of a head gather around one direction, their first right singular vector, oriented so that they project
    positively on it on average. A key's projection on it, averaged over the query heads of a KV head, says how much the
    key is looked at, whoever looks. The paper computes these filters once for a model, from many texts; here they are
    those of the context's last ``queries`` tokens, so that nothing is trained. Different heads do not compare."""

    name = "qfilter"
    summary = "keys along the main direction of the context's queries"
    query_aware = False
    counts: ClassVar[tuple[str, ...]] = ("uniform", "pyramid")
    default_counts = "uniform"
    selectors: ClassVar[tuple[str, ...]] = ("top",)
    length = "queries"
    options: ClassVar[Mapping[str, int]] = {"queries": 1024}

    def observe(self, layer: int, index: int, query: Tensor, key: Tensor, cached: CachedTokens, scale: float) -> None:
        queries = query.float().transpose(0, 1)  # [Hq, m, D]
        main = torch.linalg.eigh(queries.transpose(1, 2) @ queries).eigenvectors[..., -1]
        towards = (queries.sum(1) * main).sum(-1, keepdim=True)
        main = torch.where(towards < 0, -main, main)
        filters = main.unflatten(0, (self.shape.kv_heads, self.shape.group)).mean(1)
        for at in runs(self.num_tokens, self.shape.kv_heads * self.shape.head_dim):
            self._scores[layer][:, at] = (cached.keys(at).float() @ filters[..., None])[..., 0]
