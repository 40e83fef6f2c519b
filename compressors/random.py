"""Uniformly random tokens: the floor every acceptance table shows."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from compressors.base import MethodSpec, Scorer
from compressors.errors import MethodError


class Random(Scorer):
    """An independent random subset per head, reproducible for a given length and option ``seed``."""

    name = "random"
    summary = "uniformly random tokens per head; the baseline"
    query_aware = False
    selectors: ClassVar[tuple[str, ...]] = ("top",)
    options: ClassVar[Mapping[str, int]] = {"seed": 0}

    @classmethod
    def check(cls, spec: MethodSpec) -> None:
        if not 0 <= cls.option(spec, "seed") < 2**63:
            raise MethodError(f"random: option 'seed' must lie in 0..2**63 - 1, got {cls.option(spec, 'seed')}")

    def scores(self) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(self.option(self.spec, "seed"))
        shape = (self.shape.layers, self.shape.kv_heads, self.num_tokens)
        # Drawn on the CPU: the same subset on every device.
        return torch.rand(shape, generator=generator, device="cpu").to(torch.get_default_device())
