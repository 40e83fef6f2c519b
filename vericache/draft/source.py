"""Where the tokens that an arena keeps come from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from compressors import Kept
from vericache.device import to_device


class Source(Protocol):
    """One sequence's exact keys and values."""

    def fill(self, pages: Tensor, ids: Tensor, kept: Kept, need: Tensor, layers: range) -> None:
        """Write the tokens that ``layers`` keep to ``pages [P, 2, page_tokens, D]``.

        ``kept.counts``, ``need`` (head pages, int64 ``[L, H]``) and ``ids`` (int32, pages of these layers in order of
        layer, head, index) are in host memory.
        """


@dataclass(frozen=True)
class LayerSource:
    """``read``: layer -> keys and values of the context, each ``[H, n, D]``."""

    read: Callable[[int], tuple[Tensor, Tensor]]

    def fill(self, pages: Tensor, ids: Tensor, kept: Kept, need: Tensor, layers: range) -> None:
        heads, page_tokens, device = need.shape[1], pages.shape[2], pages.device
        totals, need = kept.counts.sum(1).tolist(), need[layers.start : layers.stop].flatten()
        first_page = to_device(need.cumsum(0) - need, device)
        ids, every = to_device(ids.long(), device), to_device(kept.counts, device)
        for layer in layers:
            counts, positions, total = every[layer], kept.layer(layer), totals[layer]
            head = torch.repeat_interleave(torch.arange(heads, device=device), counts, output_size=total)
            before = torch.repeat_interleave(counts.cumsum(0) - counts, counts, output_size=total)
            rank = torch.arange(total, device=device) - before
            page = ids[first_page[(layer - layers.start) * heads + head] + rank // page_tokens]
            keys, values = self.read(layer)
            pages[page, 0, rank % page_tokens] = keys[head, positions].to(pages.dtype)
            pages[page, 1, rank % page_tokens] = values[head, positions].to(pages.dtype)
