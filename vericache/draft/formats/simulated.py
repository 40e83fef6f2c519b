"""Pages of a method whose attention kernel is not written yet."""

import torch
from torch import Tensor

from compressors import Shape
from vericache.draft.formats.kvquant import Frozen, KVQuant, LayerTokens
from vericache.draft.formats.plain import Plain
from vericache.errors import UnsupportedError


class Simulated(Plain):
    """Pages of the model's dtype that hold what the packed pages of ``codec`` would give back. Drafts are those of the
    method; memory is that of plain pages, and every report says so (``packed_page_bytes``).

    Verified tokens of a tail stay where they are: a fold rounds them in place.
    """

    simulated = True

    def __init__(self, codec: KVQuant) -> None:
        super().__init__(codec.page_tokens, codec.head_dim, codec.dtype)
        self.codec = codec

    def require(self, shape: Shape) -> None:
        """Raises UnsupportedError when the model lacks what the method needs."""
        if shape.rotary is None:
            raise UnsupportedError(
                f"page_format {self.name} packs keys as they are before RoPE, and this model has no single rotary "
                f"embedding that all layers apply; set page_format to turboquant{self.codec.bits}"
            )

    def freeze(self, tokens: LayerTokens, shape: Shape) -> Frozen:
        assert shape.rotary is not None
        return self.codec.freeze(tokens, shape.kv_heads, shape.rotary)

    def rounded(self, tokens: LayerTokens, frozen: Frozen) -> Tensor:
        """What packing leaves of ``tokens``, ``[N, 2, page_tokens, D]`` in the model's dtype."""
        kv = self.codec.decode(self.codec.encode(tokens, frozen), tokens.heads, frozen)
        return torch.stack(kv, 1).to(self.dtype)

    @property
    def packed_page_bytes(self) -> int:
        return self.codec.page_bytes

    def frozen_bytes(self, layers: int, heads: int) -> int:
        return layers * self.codec.frozen_bytes(heads)
