"""Reading single tokens out of vLLM's pages, and moving whole pages to host memory and back."""

from itertools import product

import pytest
import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vericache.engine.pages_cpu import CpuPageLayout
from vericache.errors import ConfigError, TransferError
from vericache.store.host import HostStore, page_bytes
from vericache.store.transfer import CpuCopyEngine, Direction

DTYPES = [torch.float32, torch.bfloat16]
HEADS = 3


# -- the layout of a page ------------------------------------------------------------------------------------


def vllm_cache(blocks: int, block_size: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """A KV cache of one layer in the only layout vLLM's CPU backend supports, LBHNC, with nothing written yet."""
    return torch.full((blocks, HEADS, block_size, 2 * head_dim), float("nan"), dtype=dtype)


def write(cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor, isa: str) -> None:
    """As ``CPUAttentionBackendImpl.do_kv_cache_update`` writes ``[T, H, D]``."""
    blocks, heads, block_size, _ = cache.shape
    key_cache, value_cache = cache.view(blocks, heads, 2 * block_size, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)


def layouts() -> list[tuple[torch.dtype, int, int, str]]:
    """What vLLM picks on this machine, and what it picks where the CPU has less; "vec" needs multiples of 32."""
    cases = []
    for dtype, block_size, head_dim in product(DTYPES, (32, 128), (64, 80, 96, 128)):
        picked = _get_attn_isa(dtype, block_size, head_dim)
        fallbacks = {"vec16"} if head_dim % 32 else {"vec", "vec16"}
        cases += [(dtype, block_size, head_dim, isa) for isa in sorted({picked} | fallbacks)]
    return cases


def test_head_dims_that_are_no_multiple_of_32_use_vec16() -> None:
    assert {isa for _, _, head_dim, isa in layouts() if head_dim == 80} == {"vec16"}


@pytest.mark.parametrize(("dtype", "block_size", "head_dim", "isa"), layouts())
def test_tokens_come_back_as_vllm_wrote_them(dtype: torch.dtype, block_size: int, head_dim: int, isa: str) -> None:
    layout = CpuPageLayout(dtype, block_size, head_dim, isa)
    rng = torch.Generator().manual_seed(block_size + head_dim)
    tokens = 2 * block_size + 5  # the last block is partly filled
    keys, values = torch.randn(2, tokens, HEADS, head_dim, generator=rng).to(dtype)
    cache, blocks = vllm_cache(6, block_size, head_dim, dtype), torch.tensor([4, 1, 5])
    positions = torch.arange(tokens)
    slots = blocks[positions // block_size] * block_size + positions % block_size
    # Prefill in two pieces, then a decode of the last token: the writes of a chunked prompt.
    for piece in (positions[:7], positions[7:-1], positions[-1:]):
        write(cache, keys[piece].contiguous(), values[piece].contiguous(), slots[piece], isa)

    read_keys, read_values = layout.read(cache, blocks, positions)
    assert read_keys.shape == read_values.shape == (HEADS, tokens, head_dim)
    assert torch.equal(read_keys, keys.transpose(0, 1))
    assert torch.equal(read_values, values.transpose(0, 1))

    some = torch.tensor([tokens - 1, 0, block_size, block_size - 1, 3, 3])  # any order, repeats included
    tokens_seen = layout.tokens(cache, blocks)
    assert torch.equal(tokens_seen.keys(some), keys[some].transpose(0, 1))
    assert torch.equal(tokens_seen.values(some), values[some].transpose(0, 1))
    assert layout.read_keys(cache, blocks, some[:0]).shape == (HEADS, 0, head_dim)


def test_a_block_table_may_be_longer_than_the_context() -> None:
    """Scoring rows own blocks behind the context."""
    layout = CpuPageLayout(torch.float32, 32, 64, "vec")
    cache, keys = vllm_cache(4, 32, 64, torch.float32), torch.randn(32, HEADS, 64)
    write(cache, keys, keys, torch.arange(32) + 2 * 32, "vec")
    read, _ = layout.read(cache, torch.tensor([2, 0, 3]), torch.arange(32))
    assert torch.equal(read, keys.transpose(0, 1))


# -- host pages ------------------------------------------------------------------------------------------------


def device_caches(dtype: torch.dtype, blocks: int = 9) -> list[Tensor]:
    rng = torch.Generator().manual_seed(blocks)
    return [torch.randn(blocks, HEADS, 16, 2 * 8, generator=rng).to(dtype) for _ in range(4)]


def raw(tensor: Tensor) -> Tensor:
    """Bytes: equality of images, not of numbers (a NaN differs from itself)."""
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_come_back_byte_for_byte(dtype: torch.dtype) -> None:
    """Blocks and pages are paired by place, in any order, and may return to other blocks."""
    caches = device_caches(dtype)
    caches[2][6, 0, 0, 0] = float("nan")
    caches[0][1, 0, 0, 0] = float("-inf")
    store = HostStore(7, caches)
    store.data.fill_(3)
    engine = CpuCopyEngine(caches, store)
    before, host_before = [c.clone() for c in caches], store.data.clone()
    ticket = engine.submit(Direction.TO_HOST, [6, 1, 4], [5, 0, 3])
    engine.wait(ticket)
    assert all(torch.equal(raw(a), raw(b)) for a, b in zip(before, caches, strict=True))
    for layer, cache in enumerate(caches):
        for block, page in ((6, 5), (1, 0), (4, 3)):
            assert torch.equal(raw(store.data[page, layer]), raw(cache[block]))
    untouched = [1, 2, 4, 6]
    assert torch.equal(raw(store.data[untouched]), raw(host_before[untouched]))
    assert ticket.num_bytes == 3 * sum(c[0].nbytes for c in caches) == 3 * page_bytes(caches)
    assert ticket.seconds >= 0

    for cache in caches:
        cache[[6, 1, 4]] = 0
    images = store.data.clone()
    engine.wait(engine.submit(Direction.TO_DEVICE, [2, 6, 8], [3, 5, 0]))
    for cache, old in zip(caches, before, strict=True):
        for block, source in ((2, 4), (6, 6), (8, 1)):
            assert torch.equal(raw(cache[block]), raw(old[source]))
        assert torch.equal(raw(cache[[0, 3, 5, 7]]), raw(old[[0, 3, 5, 7]]))
        assert (cache[[1, 4]] == 0).all()
    assert torch.equal(raw(store.data), raw(images))


def test_a_round_trip_through_vllms_layout() -> None:
    """Images are opaque: tokens read from reloaded blocks are those that were offloaded."""
    isa = _get_attn_isa(torch.bfloat16, 32, 64)
    layout = CpuPageLayout(torch.bfloat16, 32, 64, isa)
    caches = [vllm_cache(6, 32, 64, torch.bfloat16) for _ in range(2)]
    keys = torch.randn(2, 64, HEADS, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for cache, key in zip(caches, keys, strict=True):
        write(cache, key, -key, torch.arange(64) + 32, isa)
    engine = CpuCopyEngine(caches, HostStore(4, caches))
    engine.submit(Direction.TO_HOST, [1, 2], [3, 1])
    for cache in caches:
        cache.zero_()
    engine.submit(Direction.TO_DEVICE, [5, 0], [3, 1])
    for cache, key in zip(caches, keys, strict=True):
        read_keys, read_values = layout.read(cache, torch.tensor([5, 0]), torch.arange(64))
        assert torch.equal(read_keys, key.transpose(0, 1))
        assert torch.equal(read_values, -key.transpose(0, 1))


@pytest.mark.parametrize("direction", list(Direction))
def test_unequal_lists_are_a_transfer_error_and_copy_nothing(direction: Direction) -> None:
    caches = device_caches(torch.float32)
    store = HostStore(3, caches)
    store.data.zero_()
    before = [c.clone() for c in caches]
    with pytest.raises(TransferError, match=f"{direction.value} names 2 blocks and 1 host pages"):
        CpuCopyEngine(caches, store).submit(direction, [0, 1], [2])
    assert all(torch.equal(a, b) for a, b in zip(before, caches, strict=True))
    assert (store.data == 0).all()


def test_an_empty_copy_moves_nothing() -> None:
    caches = device_caches(torch.float32)
    assert CpuCopyEngine(caches, HostStore(2, caches)).submit(Direction.TO_DEVICE, [], []).num_bytes == 0


def test_layers_of_different_kinds_are_refused() -> None:
    caches = device_caches(torch.float32)
    with pytest.raises(ConfigError, match="differ in shape or dtype"):
        HostStore(2, [*caches, caches[0].bfloat16()])
    with pytest.raises(ConfigError, match="differ in shape or dtype"):
        HostStore(2, [*caches, caches[0][:, :2]])
