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


@pytest.mark.parametrize("programs", [1, 5])
@pytest.mark.parametrize(("block_shape", "part"), [((2, 16, 8), 8), ((3, 16, 128), 128), ((1, 7, 4), 4)])
def test_parts_that_are_in_place_are_left_alone(programs: int, block_shape: tuple[int, ...], part: int) -> None:
    """Also the host's bytes of them are never looked at: they are NaN."""
    generator = torch.Generator().manual_seed(programs)
    caches = [torch.randn(12, *block_shape, generator=generator).bfloat16().to(DEVICE) for _ in range(3)]
    host = torch.randn(9, 3, *block_shape, generator=generator).bfloat16()
    blocks, pages = [7, 0, 11, 3], [2, 8, 0, 5]
    placed = torch.rand(4, 3, caches[0][0].numel() // part, generator=generator) < 0.4
    expected = [c.clone() for c in caches]
    for layer, cache in enumerate(expected):
        for i, (block, page) in enumerate(zip(blocks, pages, strict=True)):
            parts = cache[block].view(-1, part)
            missing = ~placed[i, layer].to(DEVICE)
            parts[missing] = host[page, layer].view(-1, part).to(DEVICE)[missing]
            host[page, layer].view(-1, part)[placed[i, layer]] = float("nan")
    host = host.pin_memory() if DEVICE.type == "cuda" else host
    ids = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (blocks, pages)]
    copy_pages(caches, layer_pointers(caches), host, *ids, False, programs, placed.to(DEVICE, torch.uint8))
    assert all(torch.equal(a, b) for a, b in zip(caches, expected, strict=True))
