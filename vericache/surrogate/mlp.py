"""A network with one hidden layer, fitted by gradient descent: follows what a linear map of the features cannot."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vericache.surrogate.fitting import Fitting, Maps, deviation

EPOCHS, BATCH, RATE, CLIP = 15, 512, 5e-3, 1.0  # as KVzap trains its own, on a thousand times as many tokens
STEPS = 1000  # at least


class MLP(Fitting):
    """``hidden`` numbers between two linear maps, as KVzap's larger variant. Of each text at most ``tokens`` random
    tokens are kept in memory, the same in every layer."""

    def __init__(self, hidden: int, tokens: int, seed: int = 0, steps: int = STEPS) -> None:
        self.hidden, self.tokens, self.seed, self.steps = hidden, tokens, seed, steps
        self._features: dict[int, list[Tensor]] = {}
        self._targets: dict[int, list[Tensor]] = {}

    @property
    def layers(self) -> int:
        return len(self._features)

    def add(self, layer: int, features: Tensor, log_scores: Tensor) -> None:
        seen = self._features.setdefault(layer, [])
        rng = torch.Generator().manual_seed(self.seed + len(seen))
        chosen = torch.randperm(len(features), generator=rng)[: self.tokens].to(features.device)
        seen.append(features[chosen])
        self._targets.setdefault(layer, []).append(log_scores.T[chosen])

    def fit(self, advance: Callable[[], None] = lambda: None) -> Maps:
        fitted = []
        for layer in range(self.layers):
            x, y = torch.cat(self._features[layer]).float(), torch.cat(self._targets[layer]).float()
            fitted.append(fit_layer(x, y, self.hidden, self.seed, self.steps))
            advance()
        weights, biases, second, second_biases = (torch.stack(t) for t in zip(*fitted, strict=True))
        return (weights, biases), (second, second_biases)


def fit_layer(x: Tensor, y: Tensor, hidden: int, seed: int, steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``w1 [F, hidden]``, ``b1``, ``w2 [hidden, H]``, ``b2`` for which ``gelu(x w1 + b1) w2 + b2`` is close to y.

    By AdamW with a cosine schedule and squared error, ``x [N, F]`` and ``y [N, H]`` standardised, which is folded in.
    """
    mean, level = x.mean(0), y.mean(0)
    scale, spread = deviation(mean, x.var(0, unbiased=False)), y.std(0, unbiased=False).clamp_min(1e-6)
    z, wanted = (x - mean) / scale, (y - level) / spread
    rng = torch.Generator().manual_seed(seed)
    sizes = ((z.shape[1], hidden), (hidden, y.shape[1]))
    w1, w2 = (torch.randn(size, generator=rng).div(size[0] ** 0.5).to(x.device) for size in sizes)
    b1, b2 = (torch.zeros(size[1], device=x.device) for size in sizes)
    parameters = [p.requires_grad_() for p in (w1, b1, w2, b2)]
    optimizer = torch.optim.AdamW(parameters, lr=RATE)
    batches = math.ceil(len(z) / BATCH)
    epochs = max(EPOCHS, math.ceil(steps / batches))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * batches)
    with torch.enable_grad():
        for _ in range(epochs):
            for rows in torch.randperm(len(z), generator=rng).to(x.device).split(BATCH):
                optimizer.zero_grad()
                F.mse_loss(F.gelu(z[rows] @ w1 + b1) @ w2 + b2, wanted[rows]).backward()
                torch.nn.utils.clip_grad_norm_(parameters, CLIP)
                optimizer.step()
                schedule.step()
    w1, b1, w2, b2 = (p.detach() for p in parameters)
    folded = w1 / scale[:, None]
    return folded, b1 - mean @ folded, w2 * spread, b2 * spread + level
