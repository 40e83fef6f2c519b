"""Surrogates: small networks, one per layer, that predict a method's scores from what is cached of a token.

KVzap (arXiv:2601.07891) reads the hidden state h that a layer's attention gets. An engine does not keep h, and a
prefix-cache hit never computes it. The features here are the token's keys before rotation and its values, of all KV
heads of the layer: 2 H D numbers that are a linear image of h (k = W_k h, v = W_v h; where the model normalises its
keys, k is the normalised one) and are in the cache anyway.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from compressors.cached import CachedTokens
from compressors.rotary import Rotary

FEATURES = 1  # version of ``token_features``: a network only fits the features it was trained on


def token_features(cached: CachedTokens, positions: Tensor, rotary: Rotary) -> Tensor:
    """float32 ``[m, 2 * H * D]`` of the tokens at ``positions`` (int64 ``[m]``): the keys of all KV heads, turned back,
    then their values."""
    keys = rotary.back(cached.keys(positions), positions)
    return torch.cat([keys, cached.values(positions).float()]).transpose(0, 1).flatten(1)


@dataclass(frozen=True, eq=False)
class Surrogate:
    """``maps``: (weight ``[L, in, out]``, bias ``[L, out]``), float32, GELU between two of them; from ``2 * H * D``
    features to the natural logarithms of H scores. ``method`` is the compressor that it was trained for."""

    method: str
    maps: tuple[tuple[Tensor, Tensor], ...]

    def fits(self, layers: int, kv_heads: int, head_dim: int) -> bool:
        first, last = self.maps[0][0], self.maps[-1][0]
        return first.shape[:2] == (layers, 2 * kv_heads * head_dim) and last.shape[2] == kv_heads

    def describe(self) -> str:
        first, last = self.maps[0][0], self.maps[-1][0]
        return f"{first.shape[0]} layers of {last.shape[2]} KV heads and {first.shape[1]} features"

    def to(self, device: torch.device) -> "Surrogate":
        return Surrogate(self.method, tuple((w.to(device), b.to(device)) for w, b in self.maps))

    def predict(self, layer: int, features: Tensor) -> Tensor:
        """Log scores, float32 ``[H, m]``, of tokens with features ``[m, 2 * H * D]``."""
        x = features
        for index, (weight, bias) in enumerate(self.maps):
            x = torch.addmm(bias[layer], F.gelu(x) if index else x, weight[layer])
        return x.T
