"""The pages of vLLM's GPU attention backends."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compressors import Asked, CachedTokens, Kept
from vericache.draft.kept import KeptPages, page_table
from vericache.draft.triton_compress import attention_received, fill_pages, place_pages
from vericache.engine.pages import PageLayout
from vericache.store.triton_copy import layer_pointers


class SideBySideLayout(PageLayout):
    """Pages of FLASH_ATTN and TRITON_ATTN: ``[blocks, H, block, 2 * D]``, a token's key and value side by side."""

    def __init__(self, caches: list[Tensor], block_size: int, head_dim: int) -> None:
        strides = {cache.stride() for cache in caches}
        if len(strides) > 1 or caches[0].stride(-1) != 1:
            raise ValueError(
                f"KV caches have strides {sorted(strides)}, expected the same in all layers, the last one 1"
            )
        self.block_size, self.head_dim = block_size, head_dim
        self._pointers = layer_pointers(caches)

    def place(self, caches: list[Tensor], kept: KeptPages, blocks: Tensor, first: int, whole: int) -> Tensor:
        """A part is a token of a head, in the order in which they lie in a block."""
        _, heads, size, _ = caches[0].shape
        placed = torch.zeros(len(blocks), len(caches), heads * size, dtype=torch.uint8, device=blocks.device)
        place_pages(
            kept.data, kept.table(), kept.origin.positions, caches, self._pointers, blocks, first, whole, placed
        )
        if placed.is_cuda:  # the copy's stream reads it, and may do so when the slot is emptied
            kept.origin.positions.record_stream(torch.cuda.current_stream(placed.device))
        return placed

    def read(self, cache: Tensor, blocks: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        rows = self._gather(cache, blocks, positions)
        return rows[..., : self.head_dim], rows[..., self.head_dim :]

    def read_keys(self, cache: Tensor, blocks: Tensor, positions: Tensor) -> Tensor:
        return self._gather(cache[..., : self.head_dim], blocks, positions)

    def read_values(self, cache: Tensor, blocks: Tensor, positions: Tensor) -> Tensor:
        return self._gather(cache[..., self.head_dim :], blocks, positions)

    def _gather(self, cache: Tensor, blocks: Tensor, positions: Tensor) -> Tensor:
        return cache[blocks[positions // self.block_size], :, positions % self.block_size].transpose(0, 1)

    def tokens(self, cache: Tensor, blocks: Tensor) -> CachedTokens:
        return PagedTokens(self, cache, blocks)

    def source(self, caches: list[Tensor], blocks: Tensor, num_tokens: int) -> "PagedSource":
        return PagedSource(caches, self._pointers, blocks)


class PagedTokens(CachedTokens):
    """Keys and values where they lie."""

    def __init__(self, layout: SideBySideLayout, cache: Tensor, blocks: Tensor) -> None:
        super().__init__(partial(layout.read_keys, cache, blocks), partial(layout.read_values, cache, blocks))
        self._cache, self._blocks = cache, blocks

    def attention_received(self, query: Tensor, key: Tensor, asked: Asked, scale: float) -> Tensor:
        return attention_received(query, key, self._cache, self._blocks, asked, scale)


@dataclass(frozen=True)
class PagedSource:
    """A sequence in the pages ``blocks`` of all layers."""

    caches: list[Tensor]
    pointers: Tensor
    blocks: Tensor

    def fill(self, pages: Tensor, ids: Tensor, kept: Kept, need: Tensor, layers: range) -> None:
        table = page_table(ids, kept.counts, need, layers, pages)
        fill_pages(pages, table, kept.positions, self.caches, self.pointers, self.blocks)
