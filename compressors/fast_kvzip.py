"""Fast KVzip (Kim et al., 2026, arXiv:2601.17668): KVzip's scores, predicted by gates with learned sinks."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from compressors.predicted import PredictedKVzip
from compressors.surrogate import Surrogate

_EPSILON = 1e-6  # of the norms


class Gate(Surrogate):
    """Per KV head, with R numbers (the paper: 16) and S sinks (16), over Q queries::

        q = norm(x query + query_bias)    [Q, R]        k = norm(x key + key_bias)    [R]
        s = mean over q of  e^l / (e^l + sum over sinks of e^(sink . q / sqrt R)),   l = k . q / sqrt R + bias

    the attention a token pays to itself beside S learned keys. ``norm`` is RMSNorm with learned weights.

    ``query [L, F, H * Q * R]``, ``query_bias``, ``query_norm [L, R]``, ``key [L, F, H * R]``, ``key_bias``,
    ``key_norm [L, R]``, ``sinks [L, H, S, R]``, ``bias [L, H, Q]``.
    """

    def fits(self, layers: int, kv_heads: int, head_dim: int) -> bool:
        sizes, features = {name: t.shape for name, t in self.tensors.items()}, 2 * kv_heads * head_dim
        queries, width = sizes["bias"][-1], sizes["key_norm"][-1]
        return (
            sizes["query"] == (layers, features, kv_heads * queries * width)
            and sizes["key"] == (layers, features, kv_heads * width)
            and sizes["sinks"][:2] == (layers, kv_heads)
        )

    def predict(self, layer: int, features: Tensor) -> Tensor:
        return gate({name: tensor[layer] for name, tensor in self.tensors.items()}, features)


def gate(layer: dict[str, Tensor], x: Tensor) -> Tensor:
    """Logarithms of the scores, ``[H, m]``, of one layer's gates (as ``Gate``, without L)."""
    heads, queries = layer["bias"].shape
    width = layer["key_norm"].shape[0]
    q = _norm((x @ layer["query"] + layer["query_bias"]).view(-1, heads, queries, width)) * layer["query_norm"]
    k = _norm((x @ layer["key"] + layer["key_bias"]).view(-1, heads, 1, width)) * layer["key_norm"]
    own = (k * q).sum(-1) / width**0.5 + layer["bias"]  # [m, H, Q]
    sinks = torch.einsum("hsr,mhqr->mhqs", layer["sinks"], q) / width**0.5
    logs = F.logsigmoid(own - sinks.logsumexp(-1))
    return (logs.logsumexp(-1) - math.log(queries)).T


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPSILON)


class FastKVzip(PredictedKVzip):
    """Per layer and KV head a gate: the attention of a token's low-rank query to its own low-rank key, beside learned
    sink keys, stands for the most attention KVzip sees it get.

    Differs from Fast KVzip in what it reads: the token's keys before rotation and its values instead of the hidden
    state they are made from (see ``compressors.surrogate``); and it is trained on the logarithms of KVzip's scores.
    """

    name = "fast_kvzip"
    summary = "KVzip's scores as trained gates against sinks predict them from the cache; no forward pass"
    network = Gate
