"""How the tokens of a head page are stored: in the model's dtype, or packed into a few bits.

A format turns the keys and values of up to ``page_tokens`` tokens of one head into ``page_bytes`` bytes and back. Codes
may live in a rotated space: queries are turned into it once per step and outputs are turned back once, instead of
every key and value (softmax attention is linear in values, and a rotation keeps inner products).

Packed codes lie side by side in a byte: with b bits, byte j of a token holds dimensions j, j + D b/8, j + 2 D b/8, ...,
the first one in the low bits. So a kernel unpacks a part of a head with one shift and gets neighbouring dimensions.
TurboQuant's values lie the other way round, dimension by dimension, since attention sums them over tokens.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from vericache.errors import ConfigError

HOST = torch.device("cpu")
ALIGNMENT = 16  # bytes: pages start where vectors of any dtype may be read


class PageFormat(ABC):
    """Geometry of a head page: ``page_tokens`` tokens in ``page_bytes`` bytes; ``tail_page_tokens`` uncompressed tokens
    of ``dtype`` fit in the same bytes (a power of two that divides ``page_tokens``: whole pages of them are folded)."""

    packed = True
    kind = 0  # how the attention kernel reads packed pages (``vericache.draft.triton_unpack``)
    bits = 16
    step = 1.0  # TurboQuant: between neighbouring levels

    def __init__(self, content_bytes: int, page_tokens: int, head_dim: int, dtype: torch.dtype) -> None:
        self.page_tokens, self.head_dim, self.dtype = page_tokens, head_dim, dtype
        token = 2 * head_dim * dtype.itemsize
        self.page_bytes = -(-max(content_bytes, token) // ALIGNMENT) * ALIGNMENT
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

    def _pages(self, *parts: Tensor) -> Tensor:
        """The bytes of ``parts``, one after the other, and padding."""
        content = torch.cat([p.contiguous().view(torch.uint8).flatten(1) for p in parts], 1)
        return torch.nn.functional.pad(content, (0, self.page_bytes - content.shape[1]))


class Plain(PageFormat):
    """The model's dtype."""

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


class TurboQuant(PageFormat):
    """TurboQuant (arXiv 2504.19874): every token is rotated, scaled to unit variance and rounded to one of 2^b levels;
    stored are the codes and the scale, ``norm / sqrt(D)``, in float16, a token's two side by side.

    The levels are the best *uniform* ones for a normal distribution (Max 1960) instead of the paper's Lloyd-Max code:
    codes are then numbers, and attention multiplies by them as they are. Their error is 1.2 times as large with 4 bits,
    1.08 with 3, 1.01 with 2.
    """

    kind = 1
    STEPS: ClassVar = {4: 0.3352, 3: 0.5860, 2: 0.9957}

    def __init__(self, bits: int, page_tokens: int, head_dim: int, dtype: torch.dtype) -> None:
        self.bits, self.step, self.middle = bits, self.STEPS[bits], (2**bits - 1) / 2
        self.code_bytes = page_tokens * head_dim * bits // 8
        super().__init__(2 * self.code_bytes + 4 * page_tokens, page_tokens, head_dim, dtype)

    def turn(self, x: Tensor) -> Tensor:
        return x @ rotation(self.head_dim, x.device).T

    def back(self, x: Tensor) -> Tensor:
        return x @ rotation(self.head_dim, x.device)

    def encode(self, keys: Tensor, values: Tensor, counts: Tensor) -> Tensor:
        (keys, key_scale), (values, value_scale) = (self._encode(x) for x in (keys, values))
        scales = torch.stack([key_scale, value_scale], -1)
        return self._pages(pack(keys, self.bits), pack(values.transpose(1, 2), self.bits), scales)

    def _encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        turned = self.turn(x.float())
        scale = turned.square().mean(-1).sqrt().half()
        level = turned / (scale.float() * self.step).clamp(min=1e-30)[..., None]
        return (level + self.middle).round().clamp(0, 2**self.bits - 1).to(torch.uint8), scale

    def decode(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        size, n = self.code_bytes, self.page_tokens
        scales = pages[:, 2 * size : 2 * size + 4 * n].contiguous().view(torch.float16).view(-1, n, 1, 2).float()
        keys = unpack(pages[:, :size], self.bits, n)
        values = unpack(pages[:, size : 2 * size], self.bits, self.head_dim).transpose(1, 2)
        return tuple(
            codes.float().sub_(self.middle).mul_(scales[..., i] * self.step) for i, codes in enumerate((keys, values))
        )


class Kivi(PageFormat):
    """KIVI (arXiv 2402.02750): asymmetric uniform codes, keys in groups of 32 tokens of one channel, values in groups
    of 32 channels of one token, with scale and zero point in float16 per group."""

    kind = 2
    GROUP = 32

    def __init__(self, bits: int, page_tokens: int, head_dim: int, dtype: torch.dtype) -> None:
        if page_tokens % self.GROUP or head_dim % self.GROUP:
            raise ConfigError(
                f"kivi{bits} packs groups of {self.GROUP} tokens and channels, got page_tokens {page_tokens} and head "
                f"size {head_dim}; set page_tokens to a multiple of {self.GROUP}, or page_format to turboquant{bits}"
            )
        self.bits = bits
        self.code_bytes = page_tokens * head_dim * bits // 8
        self.groups = page_tokens * head_dim // self.GROUP
        super().__init__(2 * self.code_bytes + 8 * self.groups, page_tokens, head_dim, dtype)

    def encode(self, keys: Tensor, values: Tensor, counts: Tensor) -> Tensor:
        valid = torch.arange(self.page_tokens, device=keys.device) < counts[:, None]
        grouped = keys.float().unflatten(1, (-1, self.GROUP))  # [N, PT / g, g, D]
        key_codes, *key_ranges = self._encode(grouped, valid.unflatten(1, (-1, self.GROUP))[..., None], 2)
        grouped = values.float().unflatten(2, (-1, self.GROUP))  # [N, PT, D / g, g]
        value_codes, *value_ranges = self._encode(grouped, valid[..., None, None], 3)
        codes = (key_codes.flatten(1, 2), value_codes.flatten(2, 3))
        return self._pages(*(pack(c, self.bits) for c in codes), *key_ranges, *value_ranges)

    def _encode(self, x: Tensor, valid: Tensor, along: int) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, and each group's scale and zero; codes are made with the rounded ones, which the decoder has."""
        low = x.masked_fill(~valid, float("inf")).amin(along, keepdim=True)
        high = x.masked_fill(~valid, float("-inf")).amax(along, keepdim=True)
        low, high = (torch.where(low.isfinite(), bound, 0.0) for bound in (low, high))  # a group without tokens
        scale = ((high - low) / (2**self.bits - 1)).half().clamp(min=6e-8)
        zero = low.half()
        code = ((x - zero.float()) / scale.float()).nan_to_num().round().clamp(0, 2**self.bits - 1)
        return code.to(torch.uint8), scale, zero

    def decode(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        size, groups, bits, n = self.code_bytes, self.groups, self.bits, self.page_tokens
        ranges = pages[:, 2 * size : 2 * size + 8 * groups].contiguous().view(torch.float16).float().split(groups, 1)
        key_range = [r.view(-1, n // self.GROUP, 1, self.head_dim) for r in ranges[:2]]
        value_range = [r.view(-1, n, self.head_dim // self.GROUP, 1) for r in ranges[2:]]
        keys = unpack(pages[:, :size], bits, n).float().unflatten(1, (-1, self.GROUP))
        values = unpack(pages[:, size : 2 * size], bits, n).float().unflatten(2, (-1, self.GROUP))
        return (
            (keys * key_range[0] + key_range[1]).flatten(1, 2),
            (values * value_range[0] + value_range[1]).flatten(2, 3),
        )


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes ``[N, T, D]`` -> bytes ``[N, T * D * bits / 8]``. Three bits are two and one: behind all others come
    the third bits, those of tokens t and t + T / 2 in the D / 4 bytes of one row."""
    if bits == 3:
        high = _side_by_side(codes >> 2, 4, 1)  # [N, T, D / 4], four bits each
        first, second = high.chunk(2, 1)
        return torch.cat([pack(codes & 3, 2), (first | second << 4).flatten(1)], 1)
    return _side_by_side(codes, 8 // bits, bits).flatten(1)


def _side_by_side(codes: Tensor, parts: int, bits: int) -> Tensor:
    first, *others = codes.chunk(parts, -1)
    packed = first.clone()
    for i, part in enumerate(others, 1):
        packed |= part << i * bits
    return packed


def unpack(packed: Tensor, bits: int, tokens: int) -> Tensor:
    """The inverse of ``pack``."""
    if bits == 3:
        split = packed.shape[1] * 2 // 3
        pairs = packed[:, split:].unflatten(1, (tokens // 2, -1))
        high = torch.cat([pairs & 15, pairs >> 4], 1)
        third = torch.cat([high >> i & 1 for i in range(4)], -1)
        return unpack(packed[:, :split], 2, tokens) | third << 2
    rows, mask = packed.unflatten(1, (tokens, -1)), 2**bits - 1
    return torch.cat([rows >> i * bits & mask for i in range(8 // bits)], -1)


@cache
def rotation(dim: int, device: torch.device = HOST) -> Tensor:
    """A fixed random orthogonal matrix, float32 ``[D, D]``: Hadamard times random signs where D is a power of two, so
    that the same one can be applied in D log D steps. Made once for each device."""
    if device != HOST:
        return rotation(dim).to(device)
    generator = torch.Generator().manual_seed(dim)
    if dim & (dim - 1):
        return torch.linalg.qr(torch.randn(dim, dim, generator=generator, device="cpu", dtype=torch.float64))[0].float()
    matrix = torch.ones(1, 1, device="cpu")
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(0, 2, (dim,), generator=generator, device="cpu") * 2.0 - 1.0
    return matrix * signs / math.sqrt(dim)


FORMATS: dict[str, Callable[[int, int, torch.dtype], PageFormat]] = {
    "plain": Plain,
    **{f"turboquant{b}": lambda *args, b=b: TurboQuant(b, *args) for b in (4, 3, 2)},
    **{f"kivi{b}": lambda *args, b=b: Kivi(b, *args) for b in (4, 2)},
}


def page_format(name: str, page_tokens: int, head_dim: int, dtype: torch.dtype) -> PageFormat:
    """The format called ``name`` for heads of size ``head_dim`` in a model of ``dtype``.

    Raises:
        ConfigError: heads or pages of this size do not fit the format.
    """
    if name != "plain" and (head_dim % 8 or page_tokens % 2):
        raise ConfigError(
            f"page_format {name} packs heads whose size is a multiple of 8 into pages of an even number of tokens, got "
            f"head size {head_dim} and page_tokens {page_tokens}; set page_format to plain"
        )
    return FORMATS[name](page_tokens, head_dim, dtype)
