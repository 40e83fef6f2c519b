"""A network with one hidden layer, fitted by gradient descent: follows what a linear map of the features cannot."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from vericache.surrogate.fitting import STEPS, Sampled, descend, deviation


class MLP(Sampled):
    """``gelu(x w0 + b0) w1 + b1`` with ``hidden`` numbers between the maps, as KVzap's larger variant, by squared error
    on standardised features and targets."""

    method = "kvzap"

    def __init__(self, hidden: int, tokens: int, seed: int = 0, steps: int = STEPS) -> None:
        super().__init__(tokens, seed, steps)
        self.hidden = hidden

    def descend(self, x: Tensor, y: Tensor) -> Mapping[str, Tensor]:
        mean, level = x.mean(0), y.mean(0)
        scale, spread = deviation(mean, x.var(0, unbiased=False)), y.std(0, unbiased=False).clamp_min(1e-6)
        z, wanted = (x - mean) / scale, (y - level) / spread
        rng = torch.Generator().manual_seed(self.seed)
        sizes = ((z.shape[1], self.hidden), (self.hidden, y.shape[1]))
        w0, w1 = (torch.randn(size, generator=rng).div(size[0] ** 0.5).to(x.device) for size in sizes)
        b0, b1 = (torch.zeros(size[1], device=x.device) for size in sizes)

        def loss(rows: Tensor) -> Tensor:
            return F.mse_loss(F.gelu(z[rows] @ w0 + b0) @ w1 + b1, wanted[rows])

        descend((w0, b0, w1, b1), loss, len(z), self.steps, rng)
        w0 = w0 / scale[:, None]
        return {"weight0": w0, "bias0": b0 - mean @ w0, "weight1": w1 * spread, "bias1": b1 * spread + level}
