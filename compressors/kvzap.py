"""KVzap (arXiv:2601.07891): KVzip's scores, predicted by a small network instead of measured by a second pass."""

from typing import ClassVar

import torch
from torch import Tensor

from compressors.base import MethodSpec, Scorer, Shape
from compressors.cached import CachedTokens
from compressors.errors import MethodError
from compressors.surrogate import token_features

_STEP = 4096  # tokens whose features are in memory at a time


class KVzap(Scorer):
    """A surrogate per layer, linear or with one hidden layer, predicts the logarithm of KVzip's score of every KV head.
    It is trained for one model (``vericache surrogate train``); the setting ``surrogate`` names its file.

    Differs from KVzap in what it reads: the token's keys before rotation and its values instead of the hidden state
    they are made from, so that a compression costs one small product per layer over the cache and no forward pass. And
    in how much it keeps: the budget's share, by the predicted scores, instead of all above a fixed threshold.
    Query-agnostic, and comparable across heads and layers, as KVzip's own scores.
    """

    name = "kvzap"
    summary = "KVzip's scores as a trained surrogate predicts them from keys and values; no forward pass"
    query_aware = False
    reads_cache: ClassVar[bool] = True
    needs_rotary: ClassVar[bool] = True
    needs_surrogate: ClassVar[bool] = True

    def __init__(self, shape: Shape, num_tokens: int, spec: MethodSpec) -> None:
        super().__init__(shape, num_tokens, spec)
        assert shape.rotary is not None
        assert shape.surrogate is not None
        self._rotary, self._surrogate = shape.rotary, shape.surrogate
        if not self._surrogate.fits(shape.layers, shape.kv_heads, shape.head_dim):
            raise MethodError(
                f"the surrogate was trained for {self._surrogate.describe()}, this model has {shape.layers} layers of "
                f"{shape.kv_heads} KV heads of size {shape.head_dim}; train one for this model"
            )
        self._logs = torch.zeros(shape.layers, shape.kv_heads, num_tokens)

    def read(self, layer: int, cached: CachedTokens) -> None:
        for positions in torch.arange(self.num_tokens).split(_STEP):
            found = token_features(cached, positions, self._rotary)
            self._logs[layer][:, positions] = self._surrogate.predict(layer, found)

    def scores(self) -> Tensor:
        return self._logs.clamp(-80, 80).exp()  # in float32 neither 0 nor infinite
