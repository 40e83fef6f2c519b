"""StreamingLLM (Xiao et al., 2023): attention sinks and the most recent tokens."""

from typing import ClassVar

import torch
from torch import Tensor

from compressors.base import Scorer


class StreamingLLM(Scorer):
    """A token matters as much as it is recent. Positions are the original ones, not re-numbered inside the
    cache, because the verifier uses the original ones. Every head scores alike, so none competes with another."""

    name = "streaming_llm"
    summary = "attention sinks and the most recent tokens; needs no queries"
    query_aware = False
    selectors: ClassVar[tuple[str, ...]] = ("top",)
    counts: ClassVar[tuple[str, ...]] = ("uniform", "pyramid")
    default_counts = "uniform"

    def scores(self) -> Tensor:
        recency = torch.arange(self.num_tokens, dtype=torch.float32)
        return recency.expand(self.shape.layers, self.shape.kv_heads, -1)
