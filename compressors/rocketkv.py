"""RocketKV (Behnam et al., 2025), first stage: SnapKV that keeps whole neighbourhoods."""

from collections.abc import Mapping
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from compressors.snapkv import SnapKV


class RocketKV(SnapKV):
    """SnapKV's attention of the last ``window`` queries, pooled with a wide kernel by the maximum, so that the tokens
    around one that is looked at stay together for the coarse pages of a second stage.

    Taken from the published code: window 32, a fixed kernel of 63 (the paper's first draft adapted it), the maximum,
    a sum over the query heads of a KV head. Not taken: the second stage, a sparse attention over what is kept, and the
    rule that splits a compression of c between the stages, ``c ** min(0.2 + 0.06 log2 c, 0.8)`` for the first: here
    ``ratio`` says what is kept.
    """

    name = "rocketkv"
    summary = "SnapKV pooled by the maximum over wide neighbourhoods; query-aware"
    options: ClassVar[Mapping[str, int]] = {"window": 32, "kernel": 63}

    def _pooled(self, attention: Tensor, kernel: int) -> Tensor:
        return F.max_pool1d(attention, kernel, stride=1, padding=kernel // 2)
