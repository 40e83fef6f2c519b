"""What fits a surrogate has in common."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from compressors import METHODS, Surrogate

BATCH, RATE, CLIP = 512, 5e-3, 1.0  # as KVzap trains its own
EPOCHS, STEPS = 15, 1000  # at least


class Fitting(ABC):
    """Takes texts in, layer by layer, and gives a surrogate for the compressor ``method``."""

    method: ClassVar[str]

    @property
    @abstractmethod
    def layers(self) -> int:
        """Layers taken in so far."""

    @abstractmethod
    def add(self, layer: int, features: Tensor, log_scores: Tensor) -> None:
        """One layer of one text: ``features [m, F]``, ``log_scores [H, m]``."""

    @abstractmethod
    def fit_layer(self, layer: int) -> Mapping[str, Tensor]:
        """The surrogate's tensors, without the dimension of the layer."""

    def fit(self, advance: Callable[[], None] = lambda: None) -> Surrogate:
        """``advance`` is called after every layer."""
        fitted = []
        for layer in range(self.layers):
            fitted.append(self.fit_layer(layer))
            advance()
        network = METHODS[self.method].network
        assert network is not None
        return network({name: torch.stack([found[name] for found in fitted]).float() for name in fitted[0]})


class Sampled(Fitting):
    """Keeps at most ``tokens`` random tokens of each text in memory, the same in every layer, for gradient descent."""

    def __init__(self, tokens: int, seed: int = 0, steps: int = STEPS) -> None:
        self.tokens, self.seed, self.steps = tokens, seed, steps
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

    def fit_layer(self, layer: int) -> Mapping[str, Tensor]:
        return self.descend(torch.cat(self._features[layer]).float(), torch.cat(self._targets[layer]).float())

    @abstractmethod
    def descend(self, x: Tensor, y: Tensor) -> Mapping[str, Tensor]:
        """Fit one layer: features ``[N, F]``, log scores ``[N, H]``."""


def descend(
    parameters: Sequence[Tensor], loss: Callable[[Tensor], Tensor], tokens: int, steps: int, rng: torch.Generator
) -> None:
    """Change ``parameters`` in place so that ``loss`` of batches of token indices falls: AdamW, cosine schedule."""
    batches = math.ceil(tokens / BATCH)
    epochs = max(EPOCHS, math.ceil(steps / batches))
    for parameter in parameters:
        parameter.requires_grad_()
    optimizer = torch.optim.AdamW(parameters, lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * batches)
    with torch.enable_grad():
        for _ in range(epochs):
            for rows in torch.randperm(tokens, generator=rng).to(parameters[0].device).split(BATCH):
                optimizer.zero_grad()
                loss(rows).backward()
                torch.nn.utils.clip_grad_norm_(parameters, CLIP)
                optimizer.step()
                schedule.step()
    for parameter in parameters:
        parameter.requires_grad_(False)


def deviation(mean: Tensor, variance: Tensor) -> Tensor:
    """Standard deviations to divide by; infinite for a feature that is constant but for rounding."""
    found = variance.clamp_min(0).sqrt()
    return torch.where(found > 1e-6 * (1 + mean.abs()), found, torch.inf)
