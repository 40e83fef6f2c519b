"""H2O (Zhang et al., 2023): tokens that have received most attention so far, the heavy hitters."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from compressors.base import LayerwiseScorer, MethodSpec, Probe
from compressors.cached import Asked, CachedTokens
from compressors.errors import MethodError


class H2O(LayerwiseScorer):
    """Attention each token receives from itself and all tokens behind it, summed over queries and averaged over the
    query heads of a KV head. The context is replayed in rows of ``chunk`` tokens: a second prefill that writes nothing.

    Sums favour old tokens, which more queries see. ``normalize`` 1 divides by the number of queries that see a token
    (that is ObservedAttention in kvpress 0.5.5), which favours recent tokens with few observations. Half of the paper's
    cache is recent tokens: that is ``recent`` of the spec.
    """

    name = "h2o"
    summary = "attention received from all of the context; one extra forward pass"
    query_aware = False
    options: ClassVar[Mapping[str, int]] = {"chunk": 1024, "normalize": 0}

    @classmethod
    def check(cls, spec: MethodSpec) -> None:
        if cls.option(spec, "chunk") < 1:
            raise MethodError(f"{cls.name}: option 'chunk' must be at least 1, got {cls.option(spec, 'chunk')}")
        if cls.option(spec, "normalize") not in (0, 1):
            raise MethodError(f"{cls.name}: option 'normalize' must be 0 or 1, got {cls.option(spec, 'normalize')}")

    @classmethod
    def fit(cls, spec: MethodSpec, row_tokens: int) -> MethodSpec:
        if row_tokens < 1:
            raise MethodError(f"{cls.name} needs scoring rows of at least 1 token, {row_tokens} fit in a step")
        return spec.with_option("chunk", min(cls.option(spec, "chunk"), row_tokens))

    @classmethod
    def probes(cls, token_ids: Sequence[int], spec: MethodSpec, texts: Mapping[str, Sequence[int]]) -> list[Probe]:
        chunk = cls.option(spec, "chunk")
        return [Probe(tuple(token_ids[at : at + chunk]), at) for at in range(0, len(token_ids), chunk)]

    def observe(self, layer: int, index: int, query: Tensor, key: Tensor, cached: CachedTokens, scale: float) -> None:
        start = index * self.option(self.spec, "chunk")
        received = cached.attention_received(query, key, Asked(0, start, own=True), scale)
        self._scores[layer, :, : start + len(query)] += len(query) * received

    def scores(self) -> Tensor:
        if self.option(self.spec, "normalize"):
            return self._scores / torch.arange(self.num_tokens, 0, -1)
        return self._scores
