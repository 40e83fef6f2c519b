"""The gates of Fast KVzip, fitted by gradient descent."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from compressors.fast_kvzip import gate
from vericache.surrogate.fitting import Sampled, descend, deviation

WIDTH, SINKS = 16, 16  # the paper's
QUERIES = 4  # the paper takes the model's query heads per KV head


class Gates(Sampled):
    """``compressors.fast_kvzip.Gate`` by squared error of the log scores, on standardised features. The paper minimises
    the cross entropy of the scores themselves, which says little of the many that are close to 0."""

    method = "fast_kvzip"

    def descend(self, x: Tensor, y: Tensor) -> Mapping[str, Tensor]:
        mean = x.mean(0)
        scale = deviation(mean, x.var(0, unbiased=False))
        z, heads = (x - mean) / scale, y.shape[1]
        rng = torch.Generator().manual_seed(self.seed)

        def normal(*size: int, of: float) -> Tensor:
            return (of * torch.randn(*size, generator=rng)).to(x.device)

        layer = {
            "query": normal(z.shape[1], heads * QUERIES * WIDTH, of=z.shape[1] ** -0.5),
            "query_bias": torch.zeros(heads * QUERIES * WIDTH, device=x.device),
            "query_norm": torch.ones(WIDTH, device=x.device),
            "key": normal(z.shape[1], heads * WIDTH, of=z.shape[1] ** -0.5),
            "key_bias": torch.zeros(heads * WIDTH, device=x.device),
            "key_norm": torch.ones(WIDTH, device=x.device),
            "sinks": normal(heads, SINKS, WIDTH, of=0.1),
            "bias": torch.zeros(heads, QUERIES, device=x.device),
        }

        def loss(rows: Tensor) -> Tensor:
            return F.mse_loss(gate(layer, z[rows]), y[rows].T)

        descend(tuple(layer.values()), loss, len(z), self.steps, rng)
        for name in ("query", "key"):
            layer[name] = layer[name] / scale[:, None]
            layer[f"{name}_bias"] = layer[f"{name}_bias"] - mean @ layer[name]
        return layer
