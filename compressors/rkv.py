"""R-KV (Cai et al., 2025): tokens that are looked at and are not repeated later."""

from collections.abc import Mapping
from math import isqrt
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from compressors.base import MethodSpec
from compressors.cached import LOGITS, CachedTokens, runs
from compressors.errors import MethodError
from compressors.replay import WindowReplay, check_kernel


class RKV(WindowReplay):
    """``share I - (1 - share) R``, with the ``importance_percent`` as share.

    Importance I: of the last ``window`` queries, the largest logit over the query heads of a KV head, softmaxed over
    the tokens before the window, averaged over the queries, pooled by the maximum over ``kernel`` positions.

    Redundancy R: the mean cosine of a token's key to those of all tokens, softmaxed over the context. Each token takes
    no notice of the most recent other token it resembles (a cosine above ``similar_percent``), so that of a text that
    repeats itself the last copy is kept. Costs grow with the square of the context.

    Made for long answers: the paper compresses every 128 tokens while decoding. Here it runs when a prompt is detached
    and whenever the engine compresses anew at a verify boundary (``tail_tokens``, ``ratio_limit``), each time over all
    exact keys, so a token once dropped may come back. As the paper has it, the share is 0.1 (0.07 in its code, which
    also clears a row's first entry where the row resembles nothing).
    """

    name = "rkv"
    summary = "looked at by the last tokens and not repeated later; for long answers; query-aware"
    selectors: ClassVar[tuple[str, ...]] = ("top",)
    options: ClassVar[Mapping[str, int]] = {
        "window": 8, "kernel": 7, "importance_percent": 10, "similar_percent": 50
    }  # fmt: skip

    @classmethod
    def check(cls, spec: MethodSpec) -> None:
        super().check(spec)
        check_kernel(cls.name, cls.option(spec, "kernel"))
        for name in ("importance_percent", "similar_percent"):
            if not 0 <= cls.option(spec, name) <= 100:
                raise MethodError(f"{cls.name}: option {name!r} must lie in 0..100, got {cls.option(spec, name)}")

    def observe(self, layer: int, index: int, query: Tensor, key: Tensor, cached: CachedTokens, scale: float) -> None:
        past = self.num_tokens - len(query)
        if past:
            share = self.option(self.spec, "importance_percent") / 100
            importance, redundancy = self._importance(query, past, cached, scale), self._redundancy(cached)
            self._scores[layer, :, :past] = share * importance - (1 - share) * redundancy[:, :past]

    def _importance(self, query: Tensor, past: int, cached: CachedTokens, scale: float) -> Tensor:
        """float32 ``[H, past]``."""
        heads, group, dim = self.shape.kv_heads, self.shape.group, self.shape.head_dim
        queries = query.float().reshape(len(query), heads, group * dim)
        queries = queries.transpose(0, 1).reshape(heads, len(query) * group, dim)
        logits = []
        for at in runs(past, heads * max(dim, len(query) * group)):
            seen = queries @ cached.keys(at).float().transpose(1, 2) * scale
            logits.append(seen.unflatten(1, (len(query), group)).amax(2))
        kernel = self.option(self.spec, "kernel")
        attention = torch.cat(logits, -1).softmax(-1).mean(1)
        return F.max_pool1d(attention, kernel, stride=1, padding=kernel // 2)

    def _redundancy(self, cached: CachedTokens) -> Tensor:
        """float32 ``[H, n]``. The matrix of cosines is looked at in squares and never stored."""
        n, heads, dim = self.num_tokens, self.shape.kv_heads, self.shape.head_dim
        threshold = self.option(self.spec, "similar_percent") / 100
        squares = runs(n, max(heads * dim, heads * isqrt(LOGITS // heads)))
        total = torch.zeros(heads, n)
        for rows in squares:
            own = F.normalize(cached.keys(rows).float(), dim=-1)  # [H, r, D]
            latest = torch.full((heads, len(rows)), -1)  # the most recent token a row resembles, and its cosine
            cosine = torch.zeros(heads, len(rows))
            for columns in squares:
                cosines = own @ F.normalize(cached.keys(columns).float(), dim=-1).transpose(1, 2)
                cosines.masked_fill_(rows[:, None] == columns, 0)
                total[:, columns] += cosines.sum(1)
                found, place = torch.where(cosines > threshold, columns, -1).max(-1)
                cosine = torch.where(found >= 0, cosines.gather(-1, place[..., None])[..., 0], cosine)
                latest = torch.maximum(latest, found)
            total.scatter_add_(1, latest.clamp(min=0), -cosine)  # a row that resembles nothing takes away 0
        return (total / n).softmax(-1)
