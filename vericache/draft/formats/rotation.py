"""Orthogonal matrices that spread a large channel over all of them. Each is made once for each device."""

import math
from functools import cache

import torch
from torch import Tensor

HOST = torch.device("cpu")


@cache
def rotation(dim: int, device: torch.device = HOST) -> Tensor:
    """A fixed random orthogonal matrix, float32 ``[D, D]``: Hadamard times random signs where D is a power of two, so
    that the same one can be applied in D log D steps."""
    if device != HOST:
        return rotation(dim).to(device)
    generator = torch.Generator().manual_seed(dim)
    if dim & (dim - 1):
        return torch.linalg.qr(torch.randn(dim, dim, generator=generator, device="cpu", dtype=torch.float64))[0].float()
    signs = torch.randint(0, 2, (dim,), generator=generator, device="cpu") * 2.0 - 1.0
    return _signs(dim) * signs / math.sqrt(dim)


@cache
def hadamard(dim: int, device: torch.device = HOST) -> Tensor:
    """The orthonormal Walsh-Hadamard matrix, float32 ``[D, D]``, its own inverse. Where D is no power of two: blocks of
    powers of two on the diagonal, the largest first (96 = 64 + 32)."""
    if device != HOST:
        return hadamard(dim).to(device)
    sizes = [1 << bit for bit in reversed(range(dim.bit_length())) if dim >> bit & 1]
    return torch.block_diag(*(_signs(size) / math.sqrt(size) for size in sizes))


def _signs(dim: int) -> Tensor:
    """Hadamard's matrix of ones and minus ones; ``dim`` is a power of two."""
    matrix = torch.ones(1, 1, device="cpu")
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix
