"""Uniformly random tokens: the floor every acceptance table shows."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from compressors.base import Scorer


class Random(Scorer):
    """An independent random subset per head, reproducible for a given length and option ``seed``."""

    name = "random"
    summary = "uniformly random tokens per head; the baseline"
    options: ClassVar[Mapping[str, int]] = {"seed": 0}

    def scores(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.option(self.spec, "seed"))
        return torch.rand(self.shape.layers, self.shape.kv_heads, self.num_tokens, generator=generator)
