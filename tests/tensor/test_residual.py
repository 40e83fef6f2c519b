"""Reloads that leave in the arena what it holds: the blocks are byte for byte those that went to the host, and nothing
that was kept is read from there."""

from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from compressors import Kept, Shape
from tests.tensor.test_pages import HEADS, raw, vllm_cache, write
from tests.tensor.worker_world import BLOCK, SHAPE, World, compress
from vericache.draft.arena import DraftArena
from vericache.draft.formats import Plain
from vericache.engine.kv_worker import KeptOfLoad
from vericache.engine.ops import Compress, Load, Offload, StepReport
from vericache.engine.pages_cpu import CpuPageLayout
from vericache.store.host import HostStore
from vericache.store.transfer import CpuCopyEngine, Direction

BLOCKS = (7, 2, 9)  # of 10 tokens: the last block is partly filled
TOKEN = 2 * SHAPE.head_dim * 4  # bytes of one token of one head


def ragged(layers: int, heads: int, context: int, seed: int) -> Kept:
    """Each head keeps what it likes, one of them nothing, one of them all."""
    rng = torch.Generator().manual_seed(seed)
    keep = torch.rand(layers, heads, context, generator=rng) < torch.rand(layers, heads, 1, generator=rng)
    keep[0, 0], keep[-1, -1] = False, True
    return Kept(keep.sum(2), keep.nonzero()[:, 2])


def filled(world: World, kept: Kept, context: int = 10) -> list[Tensor]:
    """Slot 0 holds what is kept of BLOCKS, host pages 0 .. 2 hold all of it; the blocks' images."""
    blocks = torch.tensor(BLOCKS)
    world.arena.put(0, kept, world.layout.source(world.caches, blocks, context), context, BLOCK)
    world.step(before=[Offload("a", BLOCKS, (0, 1, 2))])
    return [world.image(b) for b in BLOCKS]


def spoil(world: World, kept: Kept) -> None:
    """Who reads a kept token from the host reads NaN."""
    for layer in range(SHAPE.layers):
        for head, positions in enumerate(torch.split(kept.layer(layer), kept.counts[layer].tolist())):
            world.store.data[positions // BLOCK, layer, head, positions % BLOCK] = float("nan")


@pytest.mark.parametrize("seed", range(6))
def test_blocks_are_byte_for_byte_what_went_to_the_host(world: World, seed: int) -> None:
    kept = ragged(SHAPE.layers, SHAPE.kv_heads, 10, seed)
    images = filled(world, kept)
    spoil(world, kept)
    targets = tuple(Random(seed).sample([b for b in range(12) if b not in BLOCKS], 3))
    report = world.step(before=[Load("a", (0, 1, 2), targets, slot=0)])
    assert not report.failures
    for target, image in zip(targets, images, strict=True):
        assert torch.equal(raw(world.image(target)), raw(image))
    (transfer,) = report.transfers
    assert transfer.kept == int(kept.counts.sum()) * TOKEN
    assert transfer.num_bytes == 3 * images[0].nbytes - transfer.kept


@pytest.mark.parametrize(("first", "whole"), [(0, 0), (0, 1), (1, 0), (1, 1), (0, 3), (2, 1)])
def test_leading_blocks_come_whole_or_are_there(world: World, first: int, whole: int) -> None:
    """Whole blocks are the host's, which may hold what another prefill computed; the rest counts what it saves."""
    kept = ragged(SHAPE.layers, SHAPE.kv_heads, 10, 8)
    images = filled(world, kept)
    host = torch.randn(whole, *world.store.data.shape[1:])
    spoil(world, kept)
    world.store.data[first : first + whole] = host
    targets = (0, 3, 5)[first:]
    before = world.image(0)
    (transfer,) = world.step(before=[Load("a", (0, 1, 2)[first:], targets, slot=0, first=first, whole=whole)]).transfers
    found = [world.image(b) for b in targets]
    assert torch.equal(torch.stack(found[:whole]) if whole else host, host)
    for image, got in zip(images[first + whole :], found[whole:], strict=True):
        assert torch.equal(raw(got), raw(image))
    assert first == 0 or torch.equal(world.image(0), before)
    assert transfer.kept == int((kept.positions >= (first + whole) * BLOCK).sum()) * TOKEN


def test_what_follows_the_compressed_context_is_the_hosts(world: World) -> None:
    """Tokens that were verified since: in the last block of the context, and in blocks behind it."""
    kept = ragged(SHAPE.layers, SHAPE.kv_heads, 10, 3)
    images = filled(world, kept)
    world.store.data[2, :, :, 10 % BLOCK :] = 7.0
    world.store.data[5] = 8.0
    world.step(before=[Load("a", (0, 1, 2, 5), (0, 3, 5, 8), slot=0)])
    last = images[2].clone()
    last[:, :, 10 % BLOCK :] = 7.0
    assert torch.equal(world.image(5), last)
    assert (world.image(8) == 8.0).all()


def test_compressed_anew_from_what_was_reloaded(world: World) -> None:
    kept = ragged(SHAPE.layers, SHAPE.kv_heads, 10, 4)
    images = filled(world, kept)
    world.step(before=[Load("a", (0, 1, 2), (0, 3, 5), slot=0)])
    again = ragged(SHAPE.layers, SHAPE.kv_heads, 10, 5)
    world.arena.put(0, again, world.layout.source(world.caches, torch.tensor([0, 3, 5]), 10), 10, BLOCK)
    spoil(world, again)
    world.step(before=[Load("a", (0, 1, 2), (1, 4, 6), slot=0)])
    assert all(torch.equal(raw(world.image(b)), raw(i)) for b, i in zip((1, 4, 6), images, strict=True))


def test_a_slot_that_remembers_nothing_or_is_empty_leaves_a_whole_reload(world: World) -> None:
    for ops, slot in (([compress(0)], 0), ([], 4)):
        world.step(before=[*ops, Offload("a", BLOCKS, (0, 1, 2))])
        (transfer,) = world.step(before=[Load("a", (0, 1, 2), (0, 3, 5), slot=slot)]).transfers
        assert (transfer.kept, transfer.num_bytes) == (0, 3 * world.image(0).nbytes)
        assert all(torch.equal(world.image(a), world.image(b)) for a, b in zip(BLOCKS, (0, 3, 5), strict=True))


def test_a_compression_says_what_reloads_will_save(world: World) -> None:
    op = compress(0)
    remembering = Compress(op.request_id, op.slot, op.blocks, op.context, op.spec, op.probes, block_tokens=BLOCK)
    held = world.step(before=[op]).arena_bytes
    report = world.step(before=[remembering])
    assert report.kept == {"a": 2 * 2 * 5 * TOKEN}
    assert report.arena_bytes == held + 2 * 2 * 5 * 4 + 8 * 4
    assert not world.step(before=[op]).kept


def test_a_failed_reload_is_its_own_requests_alone(world: World) -> None:
    filled(world, ragged(SHAPE.layers, SHAPE.kv_heads, 10, 2))
    world.copies.bad_pages = {1}
    (failure,) = world.step(before=[Load("a", (0, 1, 2), (0, 3, 5), slot=0)]).failures
    assert (failure.request_id, failure.op) == ("a", "Load")


def test_ranks_that_keep_unevenly_plan_for_the_one_that_fetches_most() -> None:
    mine, theirs = StepReport(kept={"a": 5, "b": 7}), StepReport(kept={"a": 3, "c": 2})
    assert mine.aggregate(theirs).kept == theirs.aggregate(mine).kept == {"a": 3, "b": 7, "c": 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_in_vllms_own_pages(dtype: torch.dtype, head_dim: int) -> None:
    """Keys lie transposed or tiled there, so that a token's numbers are scattered over its block."""
    block, layers, context = 32, 2, 75
    isa = _get_attn_isa(dtype, block, head_dim)
    layout = CpuPageLayout(dtype, block, head_dim, isa)
    caches = [vllm_cache(8, block, head_dim, dtype) for _ in range(layers)]
    blocks = torch.tensor([4, 1, 5])
    at = torch.arange(context)
    rng = torch.Generator().manual_seed(head_dim)
    for cache in caches:
        keys, values = torch.randn(2, context, HEADS, head_dim, generator=rng).to(dtype)
        write(cache, keys.contiguous(), values.contiguous(), blocks[at // block] * block + at % block, isa)
    store = HostStore(4, caches)
    copies = CpuCopyEngine(caches, store)
    copies.submit(Direction.TO_HOST, blocks.tolist(), [0, 1, 2])
    arena = DraftArena(Shape(layers, HEADS, HEADS, head_dim), 200, Plain(8, head_dim, dtype))
    arena.put(0, ragged(layers, HEADS, context, 1), layout.source(caches, blocks, context), context, block)
    pages = arena.kept(0)
    assert pages is not None
    kept = KeptOfLoad(Load("a", (0, 1, 2), (0, 3, 6)), pages, layout, caches)
    copies.submit(Direction.TO_DEVICE, [0, 3, 6], [0, 1, 2], kept)
    for cache in caches:
        assert torch.equal(raw(cache[[0, 3, 6]]), raw(cache[blocks]))
    placed = kept.place(torch.tensor([0, 3, 6]))
    assert int(placed.sum()) * dtype.itemsize == kept.num_bytes
    store.data.view(torch.uint8).zero_()
    copies.submit(Direction.TO_DEVICE, [0, 3, 6], [0, 1, 2], replace(kept, op=replace(kept.op, whole=1)))
    assert not raw(caches[0][0]).any()
