"""DuoAttention (Xiao et al., 2024): few heads retrieve and keep all, the others stream."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from compressors.base import MethodSpec
from compressors.errors import MethodError
from compressors.kvzip import KVzip

_SMALLEST = 0x00800000  # the bits of the smallest normal float32


class DuoAttention(KVzip):
    """A streaming head keeps the sinks and the ``stream`` most recent tokens, a retrieval head keeps everything.

    The paper learns which heads retrieve, once for a model. Here a head retrieves the more its tokens are looked at
    while the model repeats the context (the sum of KVzip's scores outside sinks and recent tokens): nothing is learned,
    nothing about a model is stored, and the scoring pass is KVzip's.

    The budget says how many heads retrieve. Every head streams; then heads are filled in the order of that sum, each
    from its most recent token backwards, until the total is used up. So every head but one keeps everything or streams,
    and that one keeps what is left of the total. Where the total does not even hold the streams, all shrink alike, and
    the method is StreamingLLM.

    kvpress 0.5.5 masks a given share of heads, by labels learned for six models or by what mean queries pay to mean
    keys; the published heads stream 128 sinks and 256 recent tokens.
    """

    name = "duo_attention"
    summary = "all tokens of the heads that retrieve, the most recent of the others; one extra forward pass"
    counts: ClassVar[tuple[str, ...]] = ("per_head",)
    selectors: ClassVar[tuple[str, ...]] = ("top",)
    options: ClassVar[Mapping[str, int]] = {**KVzip.options, "stream": 256}

    @classmethod
    def check(cls, spec: MethodSpec) -> None:
        super().check(spec)
        if cls.option(spec, "stream") < 0:
            raise MethodError(f"{cls.name}: option 'stream' must be at least 0, got {cls.option(spec, 'stream')}")

    def scores(self) -> Tensor:
        n, sinks, recent = self.num_tokens, self.spec.sinks, self.spec.recent
        heads, stream = self.shape.layers * self.shape.kv_heads, min(self.option(self.spec, "stream"), n)
        retrieval = super().scores()[..., sinks : max(n - recent, 0)].sum(-1).flatten()
        place = torch.empty(heads, dtype=torch.int64)
        place[retrieval.sort(stable=True).indices] = torch.arange(heads)  # the head that retrieves most is last
        place, position = place[:, None], torch.arange(n)
        streamed = (position + stream) * heads + place  # of equal age by place, all above what is not streamed
        order = torch.where(position >= n - stream, streamed, place * n + position)
        return _ordered(order).view(self.shape.layers, self.shape.kv_heads, n)


def _ordered(order: Tensor) -> Tensor:
    """float32 numbers in the order of int64 ``order``, 0 .. 2**31 - 2**24 - 1. Converted, neighbours beyond 2**24 would
    become equal; numbers whose bits they are stay apart."""
    return (order + _SMALLEST).int().view(torch.float32)
