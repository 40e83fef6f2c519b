"""LagKV (Liang et al., 2025): tokens that stand out against the part of the context behind them."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from compressors.base import LayerwiseScorer, MethodSpec
from compressors.cached import LOGITS, CachedTokens
from compressors.errors import MethodError

_FLAT = 1e-6  # a channel that spans less has no scale


class LagKV(LayerwiseScorer):
    """Behind the sinks the context is cut into parts of ``lag`` tokens. Keys and values of a part are scaled, channel
    by channel, by minimum and maximum of the part that follows; a token's deviation over channels, softmaxed over its
    part, is its share, and the rank of the mean of both shares its score: every part keeps as much. The last whole part
    and what is behind it have nothing to be compared with and come first, the most recent before all."""

    name = "lagkv"
    summary = "tokens that stand out against the next part of the context; needs no queries"
    query_aware = False
    reads_cache = True
    counts: ClassVar[tuple[str, ...]] = ("uniform", "pyramid")
    default_counts = "uniform"
    selectors: ClassVar[tuple[str, ...]] = ("top",)
    options: ClassVar[Mapping[str, int]] = {"lag": 128}

    @classmethod
    def check(cls, spec: MethodSpec) -> None:
        if cls.option(spec, "lag") < 1:
            raise MethodError(f"{cls.name}: option 'lag' must be at least 1, got {cls.option(spec, 'lag')}")

    def read(self, layer: int, cached: CachedTokens) -> None:
        lag, sinks, n = self.option(self.spec, "lag"), self.spec.sinks, self.num_tokens
        scores = self._scores[layer]
        scores[:] = 1 + torch.arange(n) / n
        compared = max((n - sinks) // lag - 1, 0)  # parts with a whole one behind them
        step = max(1, LOGITS // (self.shape.kv_heads * lag * self.shape.head_dim))
        for first in range(0, compared, step):
            at = torch.arange(sinks + first * lag, sinks + (min(first + step, compared) + 1) * lag)
            share = _share(cached.keys(at), lag) + _share(cached.values(at), lag)
            scores[:, at[:-lag]] = (share.argsort(-1).argsort(-1) / lag).flatten(1)


def _share(x: Tensor, lag: int) -> Tensor:
    """``[H, P * lag, D]`` -> ``[H, P - 1, lag]``."""
    x = x.float().unflatten(1, (-1, lag))
    low, high = x[:, 1:].amin(2, keepdim=True), x[:, 1:].amax(2, keepdim=True)
    return ((x[:, :-1] - low) / (high - low).clamp(min=_FLAT)).std(-1).softmax(-1)
