"""KVzap (arXiv:2601.07891): KVzip's scores, predicted by a linear map or a network with one hidden layer."""

import torch
import torch.nn.functional as F
from torch import Tensor

from compressors.predicted import PredictedKVzip
from compressors.surrogate import Surrogate


class Perceptron(Surrogate):
    """``log s = x w0 + b0``, or ``gelu(x w0 + b0) w1 + b1``: ``weight0 [L, in, out]``, ``bias0 [L, out]`` and so on."""

    @property
    def maps(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.tensors[f"weight{i}"], self.tensors[f"bias{i}"]) for i in range(len(self.tensors) // 2)]

    def fits(self, layers: int, kv_heads: int, head_dim: int) -> bool:
        first, last = self.maps[0][0], self.maps[-1][0]
        return first.shape[:2] == (layers, 2 * kv_heads * head_dim) and last.shape[2] == kv_heads

    def predict(self, layer: int, features: Tensor) -> Tensor:
        x = features
        for index, (weight, bias) in enumerate(self.maps):
            x = torch.addmm(bias[layer], F.gelu(x) if index else x, weight[layer])
        return x.T


class KVzap(PredictedKVzip):
    """Per layer a linear map, or a network with one hidden layer, from a token to the logarithms of KVzip's scores of
    every KV head.

    Differs from KVzap in what it reads: the token's keys before rotation and its values instead of the hidden state
    they are made from (see ``compressors.surrogate``). And in how much it keeps: the budget's share, by the predicted
    scores, instead of all above a fixed threshold.
    """

    name = "kvzap"
    summary = "KVzip's scores as a trained linear map or small network predicts them from the cache; no forward pass"
    network = Perceptron
