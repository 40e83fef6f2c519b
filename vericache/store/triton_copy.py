"""Pages between device KV caches and pinned host memory, moved by a few programs of a GPU kernel.

A page is one block of every layer: short pieces (12 to 64 KiB) at scattered places, for which a copy engine costs more
per piece than the transfer itself (2 us each below 16 KiB). A kernel that reads and writes pinned memory over the link
takes page lists as they are; a few programs of it fill the link and leave the other processors to the model.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_WORDS = 4096  # of 8 bytes: what a program has in flight


def layer_pointers(caches: list[Tensor]) -> Tensor:
    """Addresses of the layers' KV caches ``[blocks, *block_shape]``, int64 on their device, for ``copy_pages``."""
    for cache in caches:
        piece = cache[0]
        # Heads and tokens may be permuted within a block; its bytes are copied as they lie.
        reach = 1 + sum((n - 1) * stride for n, stride in zip(piece.shape, piece.stride(), strict=True))
        if reach != piece.numel() or piece.nbytes % 8 or cache.data_ptr() % 16:
            raise ValueError(
                f"a KV cache block of shape {tuple(piece.shape)} and strides {piece.stride()} is not one aligned piece "
                f"of memory; expected contiguous blocks of a multiple of 8 bytes"
            )
    return torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=caches[0].device)


def copy_pages(
    caches: list[Tensor], pointers: Tensor, host: Tensor, blocks: Tensor, pages: Tensor, to_host: bool, programs: int,
    placed: Tensor | None = None,
) -> None:  # fmt: skip
    """Copy ``blocks[i]`` of every layer to host page ``pages[i]``, or back, on the current stream.

    Args:
        pointers: ``layer_pointers(caches)``.
        host: ``[pages, layers, *block_shape]``, pinned.
        blocks, pages: int32 on the device, parallel.
        programs: how many run at once. 2 to the host, 4 to the device (8 for pieces below 48 KiB) nearly fill a
            PCIe 5 link; more to the host double the time of attention beside them (docs/results/transfer.md).
        placed: of a copy to the device, what it leaves alone and does not read from the host: uint8 on the device
            ``[blocks, layers, parts]`` (``store.transfer.KeptRows``), parts of 8 bytes times a power of 2.
    """
    piece = caches[0][0].nbytes // 8
    stride = caches[0].stride(0) * caches[0].element_size() // 8
    words = host.view(-1).view(torch.int64)
    if placed is not None:
        assert not to_host
        parts = placed.shape[2]
        part = piece // parts
        assert part * parts == piece
        assert part & (part - 1) == 0
        _copy_rest[(programs,)](
            pointers, words, blocks, pages, placed, len(blocks) * len(caches), len(caches), stride, len(caches) * piece,
            piece=piece, parts=parts, part=part, rows=max(1, TILE_WORDS // part), num_warps=16,
        )  # fmt: skip
        return
    _copy[(programs,)](
        pointers, words, blocks, pages, len(blocks) * len(caches), len(caches), stride, len(caches) * piece,
        piece=piece, tile=TILE_WORDS, to_host=to_host, num_warps=16,
    )  # fmt: skip


@triton.jit
def _ends(  # type: ignore[no-untyped-def]
    pointers, host, blocks, pages, index, layers, block_stride, page_stride, piece: tl.constexpr,
):  # fmt: skip
    """Where piece ``index`` lies on the device and in the host."""
    item, layer = index // layers, index % layers
    block, page = tl.load(blocks + item).to(tl.int64), tl.load(pages + item).to(tl.int64)
    base = tl.load(pointers + layer).to(tl.pointer_type(tl.int64))
    return tl.multiple_of(base, 16) + block * block_stride, host + page * page_stride + layer * piece


@triton.jit
def _copy(  # type: ignore[no-untyped-def]
    pointers, host, blocks, pages, pieces, layers, block_stride, page_stride,
    piece: tl.constexpr, tile: tl.constexpr, to_host: tl.constexpr,
):  # fmt: skip
    """Piece by piece, every ``programs``-th one."""
    word = tl.arange(0, tile)
    for index in range(tl.program_id(0), pieces, tl.num_programs(0)):
        device_at, host_at = _ends(pointers, host, blocks, pages, index, layers, block_stride, page_stride, piece)
        for start in range(0, piece, tile):
            at = start + word
            if to_host:
                tl.store(host_at + at, tl.load(device_at + at, mask=at < piece), mask=at < piece)
            else:
                tl.store(device_at + at, tl.load(host_at + at, mask=at < piece), mask=at < piece)


@triton.jit
def _copy_rest(  # type: ignore[no-untyped-def]
    pointers, host, blocks, pages, placed, pieces, layers, block_stride, page_stride,
    piece: tl.constexpr, parts: tl.constexpr, part: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """As ``_copy`` to the device, of parts that are not ``placed``: a load that is masked out asks nothing of the link.
    A tile is some whole parts, so that the mask is one value along each of them and loads stay wide."""
    row, word = tl.arange(0, rows), tl.arange(0, part)
    for index in range(tl.program_id(0), pieces, tl.num_programs(0)):
        device_at, host_at = _ends(pointers, host, blocks, pages, index, layers, block_stride, page_stride, piece)
        for start in range(0, parts, rows):
            mine = start + row
            there = tl.load(placed + index * parts + mine, mask=mine < parts, other=1)
            missing = (there == 0)[:, None]
            at = mine[:, None] * part + word[None, :]
            tl.store(device_at + at, tl.load(host_at + at, mask=missing), mask=missing)
