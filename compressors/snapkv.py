"""SnapKV (Li et al., 2024): what the last queries of the prompt attend to."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from compressors.base import MethodSpec, Probe, Scorer, Shape
from compressors.cached import Asked, CachedTokens
from compressors.errors import MethodError


class SnapKV(Scorer):
    """Mean attention of the last ``window`` queries and of the query heads of a KV head, pooled over neighbouring
    positions (average, odd ``kernel``).

    The window's queries come from replaying the window's tokens on the finished prompt, so they do not depend on
    how the prompt was chunked or how much of it was a prefix-cache hit. The window must lie in the forced
    recent tokens, whose own scores are never read.
    """

    name = "snapkv"
    summary = "attention of the prompt's last queries, pooled; query-aware"
    query_aware = True
    options: ClassVar[Mapping[str, int]] = {"window": 32, "kernel": 5}

    def __init__(self, shape: Shape, num_tokens: int, spec: MethodSpec) -> None:
        super().__init__(shape, num_tokens, spec)
        self._scores = torch.zeros(shape.layers, shape.kv_heads, num_tokens)

    @classmethod
    def check(cls, spec: MethodSpec) -> None:
        window, kernel = cls.option(spec, "window"), cls.option(spec, "kernel")
        if kernel < 1 or kernel % 2 == 0:
            raise MethodError(f"{cls.name}: option 'kernel' must be odd and positive, got {kernel}")
        if not 1 <= window <= spec.recent:
            raise MethodError(f"{cls.name}: option 'window' must lie in 1..recent ({spec.recent}), got {window}")

    @classmethod
    def fit(cls, spec: MethodSpec, row_tokens: int) -> MethodSpec:
        if row_tokens < 1:
            raise MethodError(f"{cls.name} needs a scoring row of at least 1 token, {row_tokens} fit in a step")
        return spec.with_option("window", min(cls.option(spec, "window"), row_tokens))

    @classmethod
    def probes(cls, token_ids: Sequence[int], spec: MethodSpec, texts: Mapping[str, Sequence[int]]) -> list[Probe]:
        start = max(len(token_ids) - cls.option(spec, "window"), 0)
        return [Probe(tuple(token_ids[start:]), start)]

    def observe(self, layer: int, index: int, query: Tensor, key: Tensor, cached: CachedTokens, scale: float) -> None:
        past = self.num_tokens - len(query)
        if past == 0:
            return
        attention = cached.attention_received(query, key, Asked(0, past), scale)  # [H, past]
        kernel = self.option(self.spec, "kernel")
        self._scores[layer, :, :past] = F.avg_pool1d(attention, kernel, stride=1, padding=kernel // 2)

    def scores(self) -> Tensor:
        return self._scores
