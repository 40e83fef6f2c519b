"""Codes side by side in bytes.

With b bits, byte j of a token holds dimensions j, j + D b/8, j + 2 D b/8, ..., the first one in the low bits. So a
kernel unpacks a part of a head with one shift and gets neighbouring dimensions.
"""

import torch
from torch import Tensor


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
