"""The copy kernel: every byte of every layer, nothing beside it."""

import pytest
import torch

from vericache.store.triton_copy import copy_pages, layer_pointers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("programs", [1, 3, 40])
@pytest.mark.parametrize("block_shape", [(2, 16, 8), (3, 16, 128), (1, 7, 4)])  # (heads, tokens, 2 D)
def test_round_trip(programs: int, block_shape: tuple[int, ...]) -> None:
    dtype = torch.bfloat16
    generator = torch.Generator().manual_seed(programs)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    caches = [random(12, *block_shape).to(DEVICE) for _ in range(3)]
    host = random(9, 3, *block_shape)
    host = host.pin_memory() if DEVICE.type == "cuda" else host
    before, kept = [c.clone() for c in caches], host.clone()
    blocks, pages = torch.tensor([7, 0, 11, 3]), torch.tensor([2, 8, 0, 5])
    ids = [t.int().to(DEVICE) for t in (blocks, pages)]
    pointers = layer_pointers(caches)
    copy_pages(caches, pointers, host, *ids, to_host=True, programs=programs)
    for layer, cache in enumerate(before):
        kept[pages, layer] = cache.cpu()[blocks]
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host, kept)
    for cache in caches:
        cache[blocks.to(DEVICE)] = 0
    copy_pages(caches, pointers, host, *ids, to_host=False, programs=programs)
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))


def test_blocks_must_be_whole_pieces() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        layer_pointers([torch.zeros(4, 2, 8, 16, device=DEVICE)[:, :, :6]])
