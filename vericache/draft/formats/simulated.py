"""Pages of a method whose attention kernel is not written yet."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from compressors import Kept, Shape
from vericache.draft.formats.plain import Plain

F = TypeVar("F")  # what packing fixes in one layer of a slot


@dataclass(frozen=True)
class LayerTokens:
    """Tokens of one layer in head pages: ``keys`` (behind RoPE) and ``values`` ``[N, page_tokens, D]``, ``valid`` bool
    and ``positions`` int64 ``[N, page_tokens]`` (0 where there is no token), ``heads`` int64 ``[N]``. ``bits`` uint8
    ``[N, page_tokens]``: what the compressor gave each token (``Kept.bits``); None if it gave nothing, and behind the
    context."""

    keys: Tensor
    values: Tensor
    valid: Tensor
    positions: Tensor
    heads: Tensor
    bits: Tensor | None = None


class Simulated(Plain, ABC, Generic[F]):
    """Pages of the model's dtype that hold what the method's packed pages would give back. Drafts are those of the
    method; memory is that of plain pages, and every report says so (``packed_bytes``).

    Verified tokens of a tail stay where they are: a fold rounds them in place.
    """

    simulated = True

    def require(self, shape: Shape) -> None:
        """Raises UnsupportedError when the model lacks what the method needs."""

    @abstractmethod
    def freeze(self, layer: int, tokens: LayerTokens, shape: Shape) -> F:
        """What packing fixes for a layer of a slot when it is compressed, ``tokens`` being its kept context."""

    @abstractmethod
    def rounded(self, tokens: LayerTokens, frozen: F) -> Tensor:
        """What packing leaves of ``tokens``, ``[N, 2, page_tokens, D]`` in the model's dtype."""

    @abstractmethod
    def packed_bytes(self, kept: Kept) -> int:
        """``slot_bytes`` of a context if its pages were packed. ``kept.counts`` is in host memory."""
