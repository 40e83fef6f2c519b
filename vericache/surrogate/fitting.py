"""What fits a surrogate has in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

Maps = tuple[tuple[Tensor, Tensor], ...]  # as in ``Surrogate``


class Fitting(ABC):
    """Takes texts in, layer by layer, and gives the maps of a surrogate."""

    @property
    @abstractmethod
    def layers(self) -> int:
        """Layers taken in so far."""

    @abstractmethod
    def add(self, layer: int, features: Tensor, log_scores: Tensor) -> None:
        """One layer of one text: ``features [m, F]``, ``log_scores [H, m]``."""

    @abstractmethod
    def fit(self, advance: Callable[[], None] = lambda: None) -> Maps:
        """``advance`` is called after every layer."""


def deviation(mean: Tensor, variance: Tensor) -> Tensor:
    """Standard deviations to divide by; infinite for a feature that is constant but for rounding."""
    found = variance.clamp_min(0).sqrt()
    return torch.where(found > 1e-6 * (1 + mean.abs()), found, torch.inf)
