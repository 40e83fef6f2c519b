"""DBudgetKV (Ni et al., 2025, later named ReFreeKV): as many tokens as the attention's norm needs."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from compressors.base import MethodSpec, Shape
from compressors.budget import forced_mask
from compressors.cached import Asked, CachedTokens
from compressors.errors import MethodError
from compressors.snapkv import SnapKV


class DBudgetKV(SnapKV):
    """SnapKV's order, but a head stops keeping tokens when the attention of the context's last query to what is kept
    has nearly its full norm: ``|A_kept| >= (1 - loss) |A|``, the mean over the query heads of a KV head (option
    ``loss_percent``, 1 in the paper). The counts that the ratio allows are the most it may keep.

    The paper stops all heads of a layer at once; here counts may differ, so that each KV head stops by itself. The
    paper's order is by position, which keeps far more than a draft can use; its authors' code offers attention too.
    """

    name = "dbudgetkv"
    summary = "as snapkv, up to the ratio, but no more than the attention's norm needs; query-aware"
    dynamic = True
    selectors: ClassVar[tuple[str, ...]] = ("top",)
    options: ClassVar[Mapping[str, int]] = {**SnapKV.options, "loss_percent": 1}

    def __init__(self, shape: Shape, num_tokens: int, spec: MethodSpec) -> None:
        super().__init__(shape, num_tokens, spec)
        self._needed = torch.zeros(shape.layers, shape.kv_heads, dtype=torch.int64)

    @classmethod
    def check(cls, spec: MethodSpec) -> None:
        super().check(spec)
        if not 0 <= (loss := cls.option(spec, "loss_percent")) <= 100:
            raise MethodError(f"{cls.name}: option 'loss_percent' must lie in 0..100, got {loss}")

    def observe(self, layer: int, index: int, query: Tensor, key: Tensor, cached: CachedTokens, scale: float) -> None:
        super().observe(layer, index, query, key, cached, scale)
        group, before = self.shape.group, Asked(0, self.num_tokens - 1)
        rows = [cached.attention_received(query[-1:, g::group], key[-1:], before, scale) for g in range(group)]
        paid = torch.stack(rows).double()  # [G, H, n - 1]
        paid = torch.cat([paid, 1 - paid.sum(-1, keepdim=True)], -1)
        forced = forced_mask(self.num_tokens, self.spec.sinks, self.spec.recent)
        first = self._scores[layer].masked_fill(forced, float("inf"))
        order = torch.sort(first, dim=-1, descending=True, stable=True).indices
        norm = paid.square().gather(-1, order.expand_as(paid)).cumsum(-1).sqrt().mean(0)  # [H, n]
        enough = (1 - self.option(self.spec, "loss_percent") / 100) * norm[:, -1:]
        self._needed[layer] = (norm < enough).sum(-1) + 1

    def needed(self) -> Tensor:
        return self._needed
