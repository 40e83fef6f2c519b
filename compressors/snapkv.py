"""SnapKV (Li et al., 2024): what the last queries of the prompt attend to."""

from collections.abc import Mapping
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from compressors.base import MethodSpec
from compressors.cached import Asked, CachedTokens
from compressors.replay import WindowReplay, check_kernel


class SnapKV(WindowReplay):
    """Mean attention of the last ``window`` queries and of the query heads of a KV head, pooled over neighbouring
    positions (average, odd ``kernel``)."""

    name = "snapkv"
    summary = "attention of the prompt's last queries, pooled; query-aware"
    options: ClassVar[Mapping[str, int]] = {"window": 32, "kernel": 5}

    @classmethod
    def check(cls, spec: MethodSpec) -> None:
        super().check(spec)
        check_kernel(cls.name, cls.option(spec, "kernel"))

    def observe(self, layer: int, index: int, query: Tensor, key: Tensor, cached: CachedTokens, scale: float) -> None:
        past = self.num_tokens - len(query)
        if past:
            attention = cached.attention_received(query, key, Asked(0, past), scale)  # [H, past]
            self._scores[layer, :, :past] = self._pooled(attention, self.option(self.spec, "kernel"))

    def _pooled(self, attention: Tensor, kernel: int) -> Tensor:
        return F.avg_pool1d(attention, kernel, stride=1, padding=kernel // 2)
