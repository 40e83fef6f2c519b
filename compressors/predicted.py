"""What methods share that predict KVzip's scores instead of measuring them."""

from typing import ClassVar

import torch
from torch import Tensor

from compressors.base import MethodSpec, Scorer, Shape
from compressors.cached import CachedTokens
from compressors.errors import MethodError
from compressors.surrogate import token_features

_STEP = 4096  # tokens whose features are in memory at a time


class PredictedKVzip(Scorer):
    """KVzip's scores as a surrogate of the kind ``network`` predicts them from the cache, without a forward pass.

    The surrogate is trained for one model (``vericache surrogate train``); the setting ``surrogate`` names its file.
    Query-agnostic, and comparable across heads and layers, as KVzip's own scores.
    """

    query_aware = False
    reads_cache: ClassVar[bool] = True
    needs_rotary: ClassVar[bool] = True

    def __init__(self, shape: Shape, num_tokens: int, spec: MethodSpec) -> None:
        super().__init__(shape, num_tokens, spec)
        assert shape.rotary is not None
        assert shape.surrogate is not None
        self._rotary, self._surrogate = shape.rotary, shape.surrogate
        if not self._surrogate.fits(shape.layers, shape.kv_heads, shape.head_dim):
            raise MethodError(
                f"the surrogate's weights do not fit this model, {shape.layers} layers of {shape.kv_heads} KV heads of "
                f"size {shape.head_dim}; train one for this model"
            )
        self._logs = torch.zeros(shape.layers, shape.kv_heads, num_tokens)

    def read(self, layer: int, cached: CachedTokens) -> None:
        for positions in torch.arange(self.num_tokens).split(_STEP):
            found = token_features(cached, positions, self._rotary)
            self._logs[layer][:, positions] = self._surrogate.predict(layer, found)

    def scores(self) -> Tensor:
        return self._logs.clamp(-80, 80).exp()  # in float32 neither 0 nor infinite
