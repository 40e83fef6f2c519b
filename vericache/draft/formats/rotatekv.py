"""RotateKV."""

import torch
from torch import Tensor

from vericache.draft.formats.base import PageFormat, require_finite, valid_tokens
from vericache.draft.formats.packing import pack, unpack
from vericache.draft.formats.rotation import hadamard
from vericache.draft.formats.uniform import uniform_codes


class RotateKV(PageFormat):
    """RotateKV (arXiv 2501.16383) behind RoPE: keys and values of a head go through an orthonormal Walsh-Hadamard
    transform, then every token gets asymmetric uniform codes, with scale and zero point in float16.

    TurboQuant without random signs, and with a range of its own for each token: the levels end at the token's smallest
    and largest number instead of where a normal distribution has them, for 16 bits more per token.

    Left out of the paper: the transform of keys over several heads before RoPE (every draft would turn all cached keys
    to their positions), channel reordering (it decides which channels meet in which of several transforms; where D is a
    power of two, all of a head meet in one), clipping of ranges, and attention sinks in full precision: the compressor
    keeps the first tokens, they are packed like all others.
    """

    kernel = False

    def __init__(self, bits: int, page_tokens: int, head_dim: int, dtype: torch.dtype) -> None:
        self.bits = bits
        self.code_bytes = page_tokens * head_dim * bits // 8
        super().__init__(2 * self.code_bytes + 8 * page_tokens, page_tokens, head_dim, dtype)

    def turn(self, x: Tensor) -> Tensor:
        return x @ hadamard(self.head_dim, x.device)

    def back(self, x: Tensor) -> Tensor:
        return self.turn(x)

    def encode(self, keys: Tensor, values: Tensor, counts: Tensor) -> Tensor:
        """Raises CompressionError for numbers that are not finite."""
        require_finite(keys, values, valid_tokens(counts, self.page_tokens))
        codes, scales, zeros = zip(
            *(uniform_codes(self.turn(x.float()), self.bits, -1) for x in (keys, values)), strict=True
        )
        return self._pages(*(pack(c, self.bits) for c in codes), *scales, *zeros)

    def decode(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        size, n = self.code_bytes, self.page_tokens
        ranges = pages[:, 2 * size : 2 * size + 8 * n].contiguous().view(torch.float16).float()
        scales, zeros = ranges.view(-1, 2, 2, n, 1).unbind(1)
        codes = pages[:, : 2 * size].unflatten(1, (2, size)).unbind(1)
        keys, values = (unpack(c, self.bits, n) * scales[:, i] + zeros[:, i] for i, c in enumerate(codes))
        return keys, values
