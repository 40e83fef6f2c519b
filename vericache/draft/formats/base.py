"""What every page format has: its geometry, and the way to and from bytes."""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from vericache.errors import CompressionError

ALIGNMENT = 16  # bytes: pages start where vectors of any dtype may be read


class PageFormat(ABC):
    """Geometry of a head page: ``page_tokens`` tokens in ``page_bytes`` bytes; ``tail_page_tokens`` uncompressed tokens
    of ``dtype`` fit in the same bytes (a power of two that divides ``page_tokens``: whole pages of them are folded)."""

    name: str  # in the registry
    packed = True
    simulated = False  # ``vericache.draft.formats.simulated``
    kernel = True  # the GPU's attention kernel reads such pages
    kind = 0  # how the attention kernel reads packed pages (``vericache.draft.triton_unpack``)
    bits = 16
    step = 1.0  # TurboQuant: between neighbouring levels

    def __init__(self, content_bytes: int, page_tokens: int, head_dim: int, dtype: torch.dtype) -> None:
        self.page_tokens, self.head_dim, self.dtype = page_tokens, head_dim, dtype
        token = 2 * head_dim * dtype.itemsize
        self.page_bytes = aligned(max(content_bytes, token))
        fit = 1 << int(math.log2(self.page_bytes // token))
        self.tail_page_tokens = math.gcd(fit, page_tokens)

    @abstractmethod
    def encode(self, keys: Tensor, values: Tensor, counts: Tensor) -> Tensor:
        """``keys`` and ``values`` ``[N, page_tokens, D]``, of which the first ``counts`` int64 ``[N]`` tokens are valid
        -> uint8 ``[N, page_bytes]``."""

    @abstractmethod
    def decode(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse, up to rounding, in the space of the codes: float32 ``[N, page_tokens, D]`` each."""

    def turn(self, x: Tensor) -> Tensor:
        """float32 ``[..., D]`` into the space of the codes."""
        return x

    def back(self, x: Tensor) -> Tensor:
        """The inverse of ``turn``."""
        return x

    def frozen_bytes(self, layers: int, heads: int) -> int:
        """What a slot holds beside its pages and tables."""
        return 0

    def slot_bytes(self, head_pages: int, layers: int, heads: int) -> int:
        """A compressed context of so many pages: their bytes, table entries and counts (int32), and what packing
        fixed."""
        return head_pages * (self.page_bytes + 4) + 4 * layers * heads + self.frozen_bytes(layers, heads)

    def _pages(self, *parts: Tensor) -> Tensor:
        return page_content(parts, self.page_bytes)


def pages_per_head(counts: Tensor, page_tokens: int) -> Tensor:
    """Head pages that ``counts`` kept tokens take, per head."""
    return (counts + page_tokens - 1) // page_tokens


def aligned(content_bytes: int) -> int:
    return -(-content_bytes // ALIGNMENT) * ALIGNMENT


def page_content(parts: tuple[Tensor, ...], page_bytes: int) -> Tensor:
    """The bytes of ``parts`` ``[N, ...]``, one after the other, and padding: uint8 ``[N, page_bytes]``."""
    content = torch.cat([p.contiguous().view(torch.uint8).flatten(1) for p in parts], 1)
    return torch.nn.functional.pad(content, (0, page_bytes - content.shape[1]))


def valid_tokens(counts: Tensor, page_tokens: int) -> Tensor:
    """bool ``[N, page_tokens]``: the first ``counts`` tokens of each page."""
    return torch.arange(page_tokens, device=counts.device) < counts[:, None]


def require_finite(keys: Tensor, values: Tensor, valid: Tensor) -> None:
    """Raises CompressionError: one infinite number would take a whole group of codes with it."""
    bad = ~(keys.isfinite().all(-1) & values.isfinite().all(-1)) & valid
    if bad.any():
        raise CompressionError(
            f"{int(bad.sum())} of {int(valid.sum())} tokens have keys or values that are not finite, expected finite "
            f"ones to pack; see why the model computes them, or set page_format to plain"
        )
