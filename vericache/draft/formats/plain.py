"""Uncompressed pages."""

import torch
from torch import Tensor

from vericache.draft.formats.base import PageFormat


class Plain(PageFormat):
    """The model's dtype."""

    name = "plain"
    packed = False

    def __init__(self, page_tokens: int, head_dim: int, dtype: torch.dtype) -> None:
        self.page_tokens, self.head_dim, self.dtype = page_tokens, head_dim, dtype
        self.page_bytes = 2 * page_tokens * head_dim * dtype.itemsize
        self.tail_page_tokens = page_tokens

    def encode(self, keys: Tensor, values: Tensor, counts: Tensor) -> Tensor:
        return torch.stack([keys, values], 1).to(self.dtype).view(torch.uint8).flatten(1)

    def decode(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        kv = pages.view(self.dtype).unflatten(1, (2, self.page_tokens, self.head_dim)).float()
        return kv[:, 0], kv[:, 1]
