"""Reading single tokens out of vLLM's KV pages, whose layout belongs to the attention backend."""

from abc import ABC, abstractmethod
from functools import partial

import torch
from torch import Tensor

from compressors import CachedTokens
from vericache.draft.source import LayerSource, Source


class PageLayout(ABC):
    """Reads tokens of a sequence from KV caches; ``blocks`` (int64) are the sequence's, on the caches' device."""

    @property
    def order(self) -> Tensor | None:
        """Where in a head's part of a block the numbers of each token's key and value lie, int64 ``[2, block, D]``;
        None: side by side, as the strides of the caches say."""
        return None

    @abstractmethod
    def read(self, cache: Tensor, blocks: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """One layer's keys and values ``[H, m, D]`` at ``positions`` (int64 ``[m]``)."""

    @abstractmethod
    def read_keys(self, cache: Tensor, blocks: Tensor, positions: Tensor) -> Tensor:
        """Keys only, ``[H, m, D]``."""

    @abstractmethod
    def read_values(self, cache: Tensor, blocks: Tensor, positions: Tensor) -> Tensor:
        """Values only, ``[H, m, D]``."""

    def tokens(self, cache: Tensor, blocks: Tensor) -> CachedTokens:
        """One layer's keys and values, as scorers see them."""
        return CachedTokens(partial(self.read_keys, cache, blocks), partial(self.read_values, cache, blocks))

    def source(self, caches: list[Tensor], blocks: Tensor, num_tokens: int) -> Source:
        """The first ``num_tokens`` tokens, for an arena to keep some of."""
        positions = torch.arange(num_tokens, device=blocks.device)
        return LayerSource(lambda layer: self.read(caches[layer], blocks, positions))
