"""A reload that takes kept tokens from the arena, by kernels: the blocks are byte for byte what went to the host."""

import pytest
import torch

from compressors import Kept, Shape
from tests.interpreted.test_triton_compress import BLOCK, DEVICE, HALF, LAYERS, pages
from vericache.draft.arena import DraftArena
from vericache.draft.formats import Plain
from vericache.engine.pages_cuda import SideBySideLayout
from vericache.store.triton_copy import copy_pages, layer_pointers

TOKENS, BLOCKS = 5 * BLOCK + 3, 6


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("dim", [8, 32])
@pytest.mark.parametrize(("first", "whole"), [(0, 0), (2, 1)])
@pytest.mark.parametrize("page_tokens", [4, 32])
def test_blocks_come_back(heads: int, dim: int, first: int, whole: int, page_tokens: int) -> None:
    """Ragged heads, one that keeps nothing and one that keeps all; the host's copy of what is kept is NaN."""
    rng = torch.Generator().manual_seed(heads)
    caches = pages(heads, dim, 2 * BLOCKS, rng)
    order = torch.randperm(len(caches[0]), generator=rng)
    blocks, targets = order[:BLOCKS].to(DEVICE), order[BLOCKS : 2 * BLOCKS - first].to(DEVICE)
    layout, pointers = SideBySideLayout(caches, BLOCK, dim), layer_pointers(caches)
    keep = torch.rand(LAYERS, heads, TOKENS, generator=rng) < torch.rand(LAYERS, heads, 1, generator=rng)
    keep[0, 0], keep[1, -1] = False, True
    kept = Kept(keep.sum(2), keep.nonzero()[:, 2].to(DEVICE))
    arena = DraftArena(Shape(LAYERS, heads, heads, dim), 600, Plain(page_tokens, dim, HALF), DEVICE)
    arena.put(0, kept, layout.source(caches, blocks, TOKENS), TOKENS, BLOCK)

    host = torch.stack([cache[blocks] for cache in caches], 1).cpu()  # [blocks, layers, heads, tokens, 2 D]
    # As a block's bytes lie: tokens before heads.
    image = host.transpose(2, 3).clone(memory_format=torch.contiguous_format)
    rest = keep.clone()
    rest[..., : (first + whole) * BLOCK] = False
    layer, head, position = rest.nonzero().T
    image[position // BLOCK, layer, position % BLOCK, head] = float("nan")
    image = image.pin_memory() if DEVICE.type == "cuda" else image

    found = arena.kept(0)
    assert found is not None
    placed = layout.place(caches, found, targets.int(), first, whole)
    assert int(placed.sum()) == int(rest.sum()) == found.origin.tokens(first + whole, BLOCKS)
    ids = torch.arange(first, BLOCKS, dtype=torch.int32, device=DEVICE)
    copy_pages(caches, pointers, image, targets.int(), ids, False, 3, placed)
    for i, cache in enumerate(caches):
        assert torch.equal(cache[targets].cpu(), host[first:, i])
