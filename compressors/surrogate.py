"""Surrogates: small networks, one per layer, that predict KVzip's scores from what is cached of a token.

KVzap (arXiv:2601.07891) and Fast KVzip (arXiv:2601.17668) read the hidden state h that a layer's attention gets. An
engine does not keep h, and a prefix-cache hit never computes it. The features here are the token's keys before rotation
and its values, of all KV heads of the layer: 2 H D numbers that are a linear image of h (k = W_k h, v = W_v h; where
the model normalises its keys, k is the normalised one) and are in the cache anyway.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
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
class Surrogate(ABC):
    """The trained numbers of all layers by name, float32, the layer being the first dimension of each."""

    tensors: Mapping[str, Tensor]

    def to(self, device: torch.device) -> Self:
        return type(self)({name: tensor.to(device) for name, tensor in self.tensors.items()})

    @abstractmethod
    def fits(self, layers: int, kv_heads: int, head_dim: int) -> bool:
        """Whether the shapes are those of such a model."""

    @abstractmethod
    def predict(self, layer: int, features: Tensor) -> Tensor:
        """Natural logarithms of the scores, float32 ``[H, m]``, of tokens with features ``[m, 2 * H * D]``."""
