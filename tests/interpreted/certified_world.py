"""A random context as certified rows see it on the device, an arena slot and host pages, and in torch."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from compressors import Kept, Shape
from compressors.poisson import inclusion
from vericache.certified.attention import Outcome, Policy, Sampled, certified_attention, padded
from vericache.certified.device import DeviceOutcome, DeviceSampled, attend, limits_of
from vericache.certified.sketch import PerChannel, sketch_keys
from vericache.certified.triton_rows import HeldRows, HostRows
from vericache.certified.workspace import Workspace
from vericache.draft.arena import DraftArena
from vericache.draft.formats import Plain
from vericache.draft.source import LayerSource

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROGRAMS = 3 if DEVICE.type == "cpu" else 32  # the interpreter runs them one after the other


@dataclass
class CertifiedWorld:
    """``sizes``: expected kept tokens of each KV head. Host pages of ``block`` tokens hold the numbers of a token in
    any ``order``, blocks are shuffled, and what nobody may read is NaN."""

    sizes: tuple[float, ...] = (10.0, 18.0, 40.0)
    group: int = 2
    dim: int = 16
    tokens: int = 110
    tail: int = 5
    block: int = 8
    page_tokens: int = 16
    seed: int = 0
    spread: float = 2.0
    shuffled: bool = False
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        rng = torch.Generator().manual_seed(self.seed)
        heads, scale = len(self.sizes), self.dim**-0.5
        lengths = (self.tokens, self.tokens, self.tail, self.tail, self.group)
        made = [torch.randn(heads, n, self.dim, generator=rng).to(self.dtype).to(DEVICE) for n in lengths]
        self.keys, self.values, self.tail_keys, self.tail_values, query = made
        self.query, self.scale = query * self.spread, scale
        scores = (self.query.float().mean(1, keepdim=True) @ self.keys.float().mT * scale).softmax(-1)[:, 0]
        forced = torch.zeros(self.tokens, dtype=torch.bool, device=DEVICE)
        forced[:2] = forced[-4:] = True
        sizes = torch.tensor(self.sizes, dtype=torch.float64, device=DEVICE)
        self.inclusion = inclusion(scores.masked_fill(forced, float("inf")), sizes, forced, 1.0, 1e-3).float()
        self.resident = torch.rand(self.inclusion.shape, generator=rng).to(DEVICE) < self.inclusion
        sketch = sketch_keys(self.keys)
        assert isinstance(sketch, PerChannel)
        self.sketch = sketch

    @cached_property
    def arena(self) -> DraftArena:
        """Slot 1 of two, layer 1 of two."""
        heads = len(self.sizes)
        shape = Shape(2, heads, heads * self.group, self.dim)
        pages = heads * (4 + self.tail) + int(self.resident.sum()) // self.page_tokens
        arena = DraftArena(shape, 2 * pages, Plain(self.page_tokens, self.dim, self.dtype), DEVICE)
        arena.pool.data.fill_(float("nan"))
        arena.with_tables(2, self.tokens + 64)
        counts, at = self.resident.sum(-1), self.resident.nonzero()[:, 1]
        other = torch.arange(3, device=DEVICE).repeat(heads)
        kept = Kept(torch.stack([torch.full_like(counts, 3), counts]).cpu(), torch.cat([other, at]))
        arena.put(1, kept, LayerSource(lambda layer: (self.keys, self.values)))
        arena.grow_tail(1, self.tail)
        self.positions = kept.positions.int()
        rows = torch.arange(self.tail)
        where = arena.tail_tokens(rows.tolist(), [1] * self.tail, rows.tolist())
        tails = where.pages[:, 1].to(DEVICE), where.offsets[:, None].to(DEVICE)
        arena.pool.data[tails[0], 0, tails[1]] = self.tail_keys.transpose(0, 1)
        arena.pool.data[tails[0], 1, tails[1]] = self.tail_values.transpose(0, 1)
        return arena

    @cached_property
    def host(self) -> HostRows:
        heads, block, dim = len(self.sizes), self.block, self.dim
        count = -(-self.tokens // block)
        order = torch.arange(2 * block * dim).view(block, 2, dim).transpose(0, 1)
        if self.shuffled:
            order = torch.randperm(2 * block * dim, generator=torch.Generator().manual_seed(1)).view(2, block, dim)
        images = torch.full((count + 2, heads, 2 * block * dim), float("nan"), dtype=self.dtype)
        pages = torch.randperm(count + 2, generator=torch.Generator().manual_seed(2))[:count]
        p = torch.arange(self.tokens)
        for part, source in enumerate((self.keys, self.values)):
            images[pages[p // block][:, None], :, order[part, p % block]] = source.permute(1, 2, 0).cpu()
        images = images.view(count + 2, heads, block, 2 * dim)
        if DEVICE.type == "cuda":
            images = images.pin_memory()
        return HostRows(images, pages.int().to(DEVICE), order.int().to(DEVICE) if self.shuffled else None)

    @cached_property
    def sampled(self) -> DeviceSampled:
        tables = self.arena.tables
        assert tables is not None
        counts = self.resident.sum(-1)
        first = 3 * len(self.sizes) + counts.cumsum(0) - counts
        held = HeldRows(tables, 1, 1, self.positions, first.int(), self.tail)
        return DeviceSampled(self.sketch, self.inclusion, self.resident.to(torch.uint8), held, self.host)

    @cached_property
    def work(self) -> Workspace:
        work = Workspace.of(len(self.sizes), self.group, self.dim, self.tokens + self.tail + 40, PROGRAMS, DEVICE)
        for each in vars(work).values():
            each.fill_(float("nan") if each.dtype.is_floating_point else 77)
        return work

    def on_device(self, policy: Policy) -> DeviceOutcome:
        limits = limits_of(policy, DEVICE)
        return attend(self.query, self.sampled, self.scale, policy.max_fetch, limits, self.work)

    def reference(self, policy: Policy) -> Outcome:
        """With every token on the shortlist, as the kernels have it."""
        policy = Policy(policy.target, policy.z, self.tokens + self.tail, policy.max_fetch)
        places = padded(self.resident.sum(-1), self.resident.nonzero()[:, 1], self.tokens)
        at = places.clamp(max=self.tokens - 1)[..., None].expand(-1, -1, self.dim)
        held = (x.gather(1, at) for x in (self.keys, self.values))
        sampled = Sampled(self.sketch, self.inclusion.double(), places, *held)
        tail = (self.tail_keys, self.tail_values)
        return certified_attention(self.query, sampled, tail, self.scale, policy, self._read)

    def _read(self, head: int, at: Tensor) -> tuple[Tensor, Tensor]:
        return self.keys[head, at], self.values[head, at]

    @property
    def dense(self) -> Tensor:
        keys, values = torch.cat([self.keys, self.tail_keys], 1), torch.cat([self.values, self.tail_values], 1)
        return (self.query.float() @ keys.float().mT * self.scale).softmax(-1) @ values.float()
