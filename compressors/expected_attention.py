"""Expected Attention (Devoto et al., 2025): what queries that are still to come will look at."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from compressors.base import MethodSpec, Shape
from compressors.cached import CachedTokens, runs
from compressors.errors import MethodError
from compressors.replay import Replay


class ExpectedAttention(Replay):
    """Future queries are taken for Gaussian before their rotation, with the mean and the covariance of the last
    ``queries`` ones (without those of the sinks, which are outliers). The rotation is averaged over the next ``future``
    positions. A Gaussian q gives key k the weight ``E[exp(s q k)] = exp(s m k + s^2 k' C k / 2)``; these, normalised
    over the context and averaged over the query heads of a KV head, are the expected attention a, and the score is
    ``(a + epsilon) |v|``: what the token is expected to add to the output.

    kvpress 0.5.5 takes the statistics of all of the context, which needs all hidden states; its epsilon is 0, the
    paper's 0.02.
    """

    name = "expected_attention"
    summary = "attention that queries still to come are expected to pay, times the value's norm"
    query_aware = False
    needs_rotary = True
    length = "queries"
    options: ClassVar[Mapping[str, int]] = {"queries": 1024, "future": 512, "epsilon_permille": 20}

    def __init__(self, shape: Shape, num_tokens: int, spec: MethodSpec) -> None:
        super().__init__(shape, num_tokens, spec)
        self._ahead = self._mean_rotation()
        self._epsilon = self.option(spec, "epsilon_permille") / 1000

    @classmethod
    def check(cls, spec: MethodSpec) -> None:
        super().check(spec)
        for name, least in (("future", 1), ("epsilon_permille", 0)):
            if cls.option(spec, name) < least:
                raise MethodError(f"{cls.name}: option {name!r} must be at least {least}, got {cls.option(spec, name)}")

    def observe(self, layer: int, index: int, query: Tensor, key: Tensor, cached: CachedTokens, scale: float) -> None:
        n, sinks = self.num_tokens, self.spec.sinks
        if n <= sinks:
            return
        mean, covariance = self._future(query[max(len(query) - (n - sinks), 0) :])
        mean, covariance = mean * scale, covariance * scale**2 / 2
        heads, group, dim = self.shape.kv_heads, self.shape.group, self.shape.head_dim
        mean, covariance = mean.view(heads, group, dim, 1), covariance.view(heads, group, dim, dim)
        logits, norms = [], []
        for at in runs(n, heads * group * dim):
            keys = cached.keys(at).float()[:, None]  # [H, 1, t, D]
            logits.append((keys @ mean)[..., 0] + ((keys @ covariance) * keys).sum(-1))
            norms.append(cached.values(at).float().norm(dim=-1))
        weights = torch.cat(logits, -1)[..., sinks:].softmax(-1).mean(1)
        self._scores[layer, :, sinks:] = (weights + self._epsilon) * torch.cat(norms, -1)[:, sinks:]

    def _future(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Mean ``[Hq, D]`` and biased covariance ``[Hq, D, D]`` of queries behind the context that are like
        ``query [m, Hq, D]``, its last ones."""
        assert self.shape.rotary is not None  # the registry asked for it
        positions = torch.arange(self.num_tokens - len(query), self.num_tokens)
        still = self.shape.rotary.back(query.transpose(0, 1), positions)  # [Hq, m, D]
        mean = still.mean(1, keepdim=True)
        centred = still - mean
        covariance = centred.transpose(1, 2) @ centred / len(query)
        return (mean @ self._ahead)[:, 0], self._ahead.T @ covariance @ self._ahead

    def _mean_rotation(self) -> Tensor:
        """float32 ``[D, D]``: ``x @`` it is the mean of x turned to each of the next positions that the model has."""
        rotary = self.shape.rotary
        assert rotary is not None
        stop = min(self.num_tokens + self.option(self.spec, "future"), len(rotary.cos_sin))
        table = rotary.cos_sin[min(self.num_tokens, stop - 1) : stop]
        mean = replace(rotary, cos_sin=table.float().mean(0, keepdim=True))  # a rotation is linear in its cos and sin
        dim = self.shape.head_dim
        return mean.turn(torch.eye(dim), torch.zeros(dim, dtype=torch.int64))
