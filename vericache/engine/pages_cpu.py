"""The pages of vLLM's CPU attention."""

import torch
from torch import Tensor
from vllm import _custom_ops as ops

from vericache.draft.kept import KeptPages
from vericache.engine.pages import PageLayout, place_elements


class CpuPageLayout(PageLayout):
    """Pages of vLLM's CPU attention: ``[blocks, H, block, 2 * D]``, permuted inside a (block, head) by ISA.

    ``cpu_attn_reshape_and_cache`` packs K (transposed or tiled, by instruction set) and V (tiled for AMX); the
    permutation is derived by writing known numbers through the op itself, so no layout is assumed.
    """

    def __init__(self, dtype: torch.dtype, block_size: int, head_dim: int, isa: str) -> None:
        self.block_size = block_size
        self._keys, self._values = _derive(dtype, block_size, head_dim, isa)

    @property
    def order(self) -> Tensor:
        return torch.stack([self._keys, self._values])

    def read(self, cache: Tensor, blocks: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.read_keys(cache, blocks, positions), self.read_values(cache, blocks, positions)

    def read_keys(self, cache: Tensor, blocks: Tensor, positions: Tensor) -> Tensor:
        return self._gather(cache, blocks, positions, self._keys)

    def read_values(self, cache: Tensor, blocks: Tensor, positions: Tensor) -> Tensor:
        return self._gather(cache, blocks, positions, self._values)

    def place(self, caches: list[Tensor], kept: KeptPages, blocks: Tensor, first: int, whole: int) -> Tensor:
        return place_elements(caches, kept, blocks, first, whole, torch.cat([self._keys, self._values], 1))

    def _gather(self, cache: Tensor, blocks: Tensor, positions: Tensor, order: Tensor) -> Tensor:
        heads = cache.shape[1]
        flat = cache.view(cache.shape[0], heads, -1)
        block = blocks[positions // self.block_size]
        element = order[positions % self.block_size]  # [m, D]
        return flat[block[None, :, None], torch.arange(heads)[:, None, None], element[None]]


def _derive(dtype: torch.dtype, block_size: int, head_dim: int, isa: str) -> tuple[Tensor, Tensor]:
    """Element index inside a (block, head) of K[token, dim] and V[token, dim], int64 ``[block, D]`` each."""
    token = torch.arange(block_size)[:, None].expand(block_size, head_dim)
    dim = torch.arange(head_dim)[None].expand(block_size, head_dim)
    # Each run writes numbers below 256, exact in every dtype: K holds 1 + x, V holds -(1 + x).
    found_token, found_dim = (_written(x, dtype, block_size, head_dim, isa) for x in (token % 16, dim % 16))
    found_token_hi, found_dim_hi = (_written(x, dtype, block_size, head_dim, isa) for x in (token // 16, dim // 16))
    orders = []
    for sign in (1, -1):
        mine = found_token * sign > 0
        tokens = (found_token_hi.abs() - 1) * 16 + found_token.abs() - 1
        dims = (found_dim_hi.abs() - 1) * 16 + found_dim.abs() - 1
        order = torch.full((block_size, head_dim), -1, dtype=torch.int64)
        order[tokens[mine], dims[mine]] = mine.nonzero()[:, 0]
        if (order < 0).any():
            raise AssertionError(f"could not derive the page layout of vLLM's CPU attention (isa {isa!r})")
        orders.append(order)
    return orders[0], orders[1]


def _written(pattern: Tensor, dtype: torch.dtype, block_size: int, head_dim: int, isa: str) -> Tensor:
    page = torch.zeros(1, 1, block_size, 2 * head_dim, dtype=dtype)
    keys, values = page.view(1, 1, 2 * block_size, head_dim).chunk(2, dim=2)
    data = (1 + pattern).to(dtype)[:, None].contiguous()  # [block, 1, D]
    ops.cpu_attn_reshape_and_cache(data, -data, keys, values, torch.arange(block_size), isa)
    return page.flatten().long()
