"""What methods share that predict KVzip's scores instead of measuring them."""

import torch

from compressors.base import LayerwiseScorer, MethodSpec, Shape
from compressors.cached import CachedTokens
from compressors.errors import MethodError
from compressors.surrogate import token_features

_STEP = 4096  # tokens whose features are in memory at a time


class PredictedKVzip(LayerwiseScorer):
    """KVzip's scores as a surrogate of the kind ``network`` predicts them from the cache, without a forward pass.

    The surrogate is trained for one model (``vericache surrogate train``); the setting ``surrogate`` names its file.
    Query-agnostic, and comparable across heads and layers, as KVzip's own scores.
    """

    query_aware = False
    reads_cache = True
    needs_rotary = True

    def __init__(self, shape: Shape, num_tokens: int, spec: MethodSpec) -> None:
        super().__init__(shape, num_tokens, spec)
        assert shape.rotary is not None
        self._rotary, self._surrogate = shape.rotary, shape.surrogates[self.name]
        if not self._surrogate.fits(shape.layers, shape.kv_heads, shape.head_dim):
            raise MethodError(
                f"the surrogate's weights do not fit this model, {shape.layers} layers of {shape.kv_heads} KV heads of "
                f"size {shape.head_dim}; train one for this model"
            )

    def read(self, layer: int, cached: CachedTokens) -> None:
        for positions in torch.arange(self.num_tokens).split(_STEP):
            logs = self._surrogate.predict(layer, token_features(cached, positions, self._rotary))
            self._scores[layer][:, positions] = logs.clamp(-80, 80).exp()  # in float32 neither 0 nor infinite
