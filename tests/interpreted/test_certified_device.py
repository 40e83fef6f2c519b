"""Certified rows on the V2 runner's worker, over GPU pages whose heads and tokens are permuted in memory: what the copy
kernel has put into host pages is what they read."""

import pytest
import torch
from torch import Tensor

from compressors import Kept, MethodSpec, Shape
from compressors.poisson import inclusion
from vericache.certified.attention import Policy
from vericache.certified.certificate import Target
from vericache.draft.arena import DraftArena
from vericache.draft.formats import Plain
from vericache.draft.step import CertifiedToken
from vericache.engine.certified_device import CertifiedDevice
from vericache.engine.ops import Compress
from vericache.engine.pages_cuda import SideBySideLayout
from vericache.errors import CompressionError
from vericache.store.host import HostStore
from vericache.store.triton_copy import copy_pages, layer_pointers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = Shape(layers=2, kv_heads=2, query_heads=4, head_dim=32)
CONTEXT, BLOCK, BLOCKS, PAGES, PT = 50, 8, (7, 2, 9, 0, 4, 1, 3), (5, 1, 3, 0, 8, 2, 6), 16
SCALE = 32**-0.5


class DeviceWorld:
    """``permuted``: a block's tokens come before its heads in memory."""

    def __init__(self, permuted: bool, measured: float = 1.0) -> None:
        rng = torch.Generator(DEVICE).manual_seed(0)
        shape = (10, SHAPE.kv_heads, BLOCK, 2 * SHAPE.head_dim)
        self.caches = [torch.randn(shape, generator=rng, device=DEVICE) for _ in range(SHAPE.layers)]
        if permuted:
            self.caches = [c.transpose(1, 2).contiguous().transpose(1, 2) for c in self.caches]
        self.layout = SideBySideLayout(self.caches, BLOCK, SHAPE.head_dim)
        self.arena = DraftArena(SHAPE, 80, Plain(PT, SHAPE.head_dim, torch.float32), DEVICE)
        self.arena.with_tables(2, CONTEXT + 64)
        self.store = HostStore(10, self.caches)
        self.rows = CertifiedDevice(self.arena, self.layout, self.caches, self.store, measured)
        self.blocks = torch.tensor(BLOCKS, device=DEVICE)
        self.context = [self.layout.read(c, self.blocks, torch.arange(CONTEXT, device=DEVICE)) for c in self.caches]

    def kept(self) -> Kept:
        rng = torch.Generator().manual_seed(1)
        heads = SHAPE.layers * SHAPE.kv_heads
        scores = torch.rand(heads, CONTEXT, generator=rng, dtype=torch.float64).to(DEVICE)
        forced = torch.zeros(CONTEXT, dtype=torch.bool, device=DEVICE)
        forced[:2] = forced[-3:] = True
        sizes = torch.full((heads,), 14.0, dtype=torch.float64, device=DEVICE)
        r = inclusion(scores.masked_fill(forced, float("inf")), sizes, forced, 1.0, 1e-3)
        z = torch.rand(r.shape, generator=rng, dtype=torch.float64).to(DEVICE) < r
        shape = (SHAPE.layers, SHAPE.kv_heads)
        return Kept(z.sum(-1).view(shape), z.nonzero()[:, -1], r.float().unflatten(0, shape))

    def demote(self, kept: Kept) -> None:
        spec = MethodSpec("snapkv", "uniform", 0.3, 2, 3, (), "poisson")
        op = Compress("a", 1, BLOCKS, CONTEXT, spec, 0, PAGES)
        ids = [torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in (BLOCKS, PAGES)]
        copy_pages(self.caches, layer_pointers(self.caches), self.store.data, *ids, to_host=True, programs=2)
        self.arena.put(1, kept, self.layout.source(self.caches, self.blocks, CONTEXT), CONTEXT)
        self.rows.fill(op, kept, self.blocks)
        self.arena.grow_tail(1, 3)
        for cache in self.caches:  # vLLM uses the blocks for others
            cache.fill_(float("nan"))

    def tail(self, layer: int) -> tuple[Tensor, Tensor]:
        """Written to the slot, ``[H, 3, D]`` each."""
        rng = torch.Generator(DEVICE).manual_seed(layer)
        made = torch.randn(2, 3, SHAPE.kv_heads, SHAPE.head_dim, generator=rng, device=DEVICE)
        where = self.arena.tail_tokens([0, 1, 2], [1, 1, 1], [0, 1, 2])
        pages, offsets = where.pages[:, layer].to(DEVICE), where.offsets[:, None].to(DEVICE)
        self.arena.pool.data[pages, 0, offsets], self.arena.pool.data[pages, 1, offsets] = made
        return made[0].transpose(0, 1), made[1].transpose(0, 1)

    def row(self, eps: float) -> float:
        """The largest difference from dense attention."""
        asked = CertifiedToken(0, 1, CONTEXT + 2, 3, Policy(Target(eps)))
        rng, off = torch.Generator(DEVICE).manual_seed(9), 0.0
        for layer in range(SHAPE.layers):
            tail = self.tail(layer)
            query = torch.randn(SHAPE.query_heads, SHAPE.head_dim, generator=rng, device=DEVICE)
            output = self.rows.attend(asked, layer, query, SCALE)
            keys, values = (torch.cat(both, 1) for both in zip(self.context[layer], tail, strict=True))
            grouped = query.unflatten(0, (SHAPE.kv_heads, -1))
            exact = ((grouped @ keys.mT * SCALE).softmax(-1) @ values).flatten(0, 1)
            off = max(off, float((output - exact).abs().max()))
        return off


@pytest.mark.parametrize("permuted", [False, True])
def test_host_pages_are_read_as_they_were_copied(permuted: bool) -> None:
    world = DeviceWorld(permuted)
    world.demote(world.kept())
    assert world.row(1e-9) < 1e-5
    decided = world.rows.take()["a"]
    assert decided.decisions == SHAPE.layers * SHAPE.kv_heads == decided.fallbacks
    assert decided.num_bytes == decided.tokens * 2 * SHAPE.head_dim * 4 > 0
    assert len(decided.measured) == decided.decisions
    assert max(decided.measured) < 1e-5
    assert decided.certificates == (0.0,)
    assert not world.rows.take()


def test_what_a_loose_target_leaves_is_measured() -> None:
    world = DeviceWorld(False)
    world.demote(world.kept())
    off = world.row(0.9)
    decided = world.rows.take()["a"]
    assert decided.fallbacks < decided.decisions
    assert off > 0
    assert max(decided.measured) > 0
    assert 0 < decided.certificates[0] <= 0.9


def test_a_dropped_slot_leaves_nothing() -> None:
    world = DeviceWorld(False)
    world.demote(world.kept())
    assert world.rows.bytes_held > 0
    world.rows.drop(1)
    assert world.rows.bytes_held == 0


def test_a_certain_token_must_have_been_kept() -> None:
    world, kept = DeviceWorld(False), DeviceWorld(False).kept()
    assert kept.inclusion is not None
    wrong = Kept(kept.counts, kept.positions, kept.inclusion.fill_(1.0))
    with pytest.raises(CompressionError, match="certain"):
        world.demote(wrong)
