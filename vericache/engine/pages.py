"""Reading single tokens out of vLLM's KV pages, whose layout belongs to the attention backend."""

from abc import ABC, abstractmethod
from functools import partial

import torch
from torch import Tensor

from compressors import CachedTokens
from vericache.draft.kept import KeptPages
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

    @abstractmethod
    def place(self, caches: list[Tensor], kept: KeptPages, blocks: Tensor, first: int, whole: int) -> Tensor:
        """Write kept tokens of a sequence into ``blocks`` of all layers, which are the sequence's from its block
        ``first`` on, without the ``whole`` leading ones of them. Returns what was written, see
        ``store.transfer.KeptRows.place``."""

    def tokens(self, cache: Tensor, blocks: Tensor) -> CachedTokens:
        """One layer's keys and values, as scorers see them."""
        return CachedTokens(partial(self.read_keys, cache, blocks), partial(self.read_values, cache, blocks))

    def source(self, caches: list[Tensor], blocks: Tensor, num_tokens: int) -> Source:
        """The first ``num_tokens`` tokens, for an arena to keep some of."""
        positions = torch.arange(num_tokens, device=blocks.device)
        return LayerSource(lambda layer: self.read(caches[layer], blocks, positions))


def place_elements(
    caches: list[Tensor], kept: KeptPages, blocks: Tensor, first: int, whole: int, elements: Tensor
) -> Tensor:
    """``PageLayout.place`` for contiguous ``[blocks, H, block, 2 * D]``; ``elements`` int64 ``[block, 2 * D]``: where
    in a (block, head) the numbers of a token's key, then of its value, are. A part is one number."""
    heads, size = caches[0].shape[1], caches[0][0, 0].numel()
    placed = torch.zeros(len(blocks), len(caches), heads, size, dtype=torch.uint8)
    for layer, cache in enumerate(caches):
        head, position, keys, values = kept.layer(layer)
        index = position // len(elements) - first
        there = (index >= whole) & (index < len(blocks))
        index, head, at = index[there, None], head[there, None], elements[position[there] % len(elements)]
        cache.view(len(cache), heads, size)[blocks[index], head, at] = torch.cat([keys[there], values[there]], 1)
        placed[index, layer, head, at] = 1
    return placed.flatten(2)
