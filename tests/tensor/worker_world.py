"""A worker under test over a small random cache, with host copies that a test can make fail."""

from collections.abc import Sequence

import torch
from torch import Tensor

from compressors import Kept, MethodSpec, Shape
from vericache.draft.arena import DraftArena
from vericache.draft.formats import Plain
from vericache.draft.kept import KeptPages
from vericache.draft.runtime import HostRuntime
from vericache.engine.kv_worker import KVWorker
from vericache.engine.ops import Compress, Op, ProbeRow, Row, StepMetadata, StepReport
from vericache.engine.pages import PageLayout, place_elements
from vericache.errors import TransferError
from vericache.store.host import HostStore
from vericache.store.transfer import Copied, CpuCopyEngine, Direction, KeptRows

SHAPE = Shape(layers=2, kv_heads=2, query_heads=4, head_dim=8)
BLOCK, BLOCKS, PAGES = 4, 12, 10  # tokens of a block, device blocks, host pages
PT = 4  # tokens of an arena page
SCALE = 8**-0.5
ANCHORS = MethodSpec("streaming_llm", ratio=0.5, sinks=1, recent=2)
SCORED = MethodSpec("snapkv", "per_head", 0.5, 1, 3, (("kernel", 1), ("window", 3)))


class PlainLayout(PageLayout):
    """Pages ``[blocks, H, block, 2 * D]`` with a token's key and value side by side."""

    def read(self, cache: Tensor, blocks: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        rows = cache[blocks[positions // BLOCK], :, positions % BLOCK].transpose(0, 1)
        return rows[..., : SHAPE.head_dim], rows[..., SHAPE.head_dim :]

    def place(self, caches: list[Tensor], kept: KeptPages, blocks: Tensor, first: int, whole: int) -> Tensor:
        return place_elements(caches, kept, blocks, first, whole, torch.arange(BLOCK * 16).view(BLOCK, 16))

    def read_keys(self, cache: Tensor, blocks: Tensor, positions: Tensor) -> Tensor:
        return self.read(cache, blocks, positions)[0]

    def read_values(self, cache: Tensor, blocks: Tensor, positions: Tensor) -> Tensor:
        return self.read(cache, blocks, positions)[1]


class FlakyCopies(CpuCopyEngine):
    """Fails when one of ``bad_pages`` is touched, as a full or broken host would; remembers the order of copies."""

    def __init__(self, caches: list[Tensor], store: HostStore) -> None:
        super().__init__(caches, store)
        self.bad_pages: set[int] = set()
        self.log: list[tuple[Direction, list[int], list[int]]] = []

    def submit(
        self, direction: Direction, blocks: Sequence[int], pages: Sequence[int], kept: KeptRows | None = None
    ) -> Copied:
        self.log.append((direction, list(blocks), list(pages)))
        if self.bad_pages & set(pages):
            raise TransferError("the host page is gone")
        return super().submit(direction, blocks, pages, kept)


class World:
    """A worker over a small random cache."""

    def __init__(self, arena_pages: int = 60) -> None:
        rng = torch.Generator().manual_seed(0)
        self.caches = [torch.randn(BLOCKS, 2, BLOCK, 16, generator=rng) for _ in range(SHAPE.layers)]
        self.store = HostStore(PAGES, self.caches)
        self.store.data.copy_(torch.randn(self.store.data.shape, generator=rng))
        self.copies = FlakyCopies(self.caches, self.store)
        self.arena = DraftArena(SHAPE, arena_pages, Plain(PT, SHAPE.head_dim, torch.float32))
        self.layout = PlainLayout()
        self.runtime = HostRuntime(self.arena)
        self.worker = KVWorker(SHAPE, self.runtime, self.layout, self.caches, self.copies)

    def step(self, before: Sequence[Op] = (), after: Sequence[Op] = (), drops: Sequence[int] = ()) -> StepReport:
        metadata = StepMetadata(tuple(drops), (), tuple(before), tuple(after))
        self.worker.run_before(metadata)
        self.worker.run_after(metadata)
        return self.worker.take_report()

    def begin(self, rows: Sequence[Row], batch: dict[str, list[int]], drops: Sequence[int] = ()) -> Tensor:
        """``batch``: positions of every row's tokens, in row order. Returns the tokens whose K/V stay unwritten."""
        starts = [0]
        for positions in batch.values():
            starts.append(starts[-1] + len(positions))
        metadata = StepMetadata(tuple(drops), tuple(rows))
        found = self.worker.match(metadata, list(batch), starts)
        self.runtime.begin(found.slots, starts, [p for ps in batch.values() for p in ps], found.observed)
        return torch.tensor(
            [t for lo, hi, u in zip(starts, starts[1:], found.unwritten, strict=False) if u for t in range(lo, hi)],
            dtype=torch.int64,
        )

    def show(self, tokens: int, seed: int = 5) -> None:
        """Every layer's forward of a batch of ``tokens`` tokens, as the attention backend reports it."""
        rng = torch.Generator().manual_seed(seed)
        for layer in range(SHAPE.layers):
            query, key = torch.randn(tokens, 4, 8, generator=rng), torch.randn(tokens, 2, 8, generator=rng)
            self.worker.runtime.observe(layer, query, key, self.caches[layer], SCALE)

    def image(self, block: int) -> Tensor:
        return torch.stack([cache[block] for cache in self.caches]).clone()

    def check_slot(self, slot: int, kept: Kept, blocks: Sequence[int], context: int) -> None:
        """The slot answers like a dense softmax over the kept tokens of the context."""
        query = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(1))
        work = self.arena.work([slot], [0])
        for layer in range(SHAPE.layers):
            keys, values = self.layout.read(self.caches[layer], torch.tensor(blocks), torch.arange(context))
            pieces = torch.split(kept.layer(layer), kept.counts[layer].tolist())
            got = self.arena.attend(layer, work, query, SCALE)[0]
            for head in range(4):
                positions = pieces[head // 2]
                weights = (keys[head // 2, positions] @ query[0, head] * SCALE).softmax(0)
                torch.testing.assert_close(got[head], weights @ values[head // 2, positions], rtol=1e-4, atol=1e-5)

    def check_empty(self) -> None:
        assert not self.arena.slots
        assert sorted(self.arena.pool.free) == list(range(len(self.arena.pool.data)))


def compress(
    slot: int, spec: MethodSpec = ANCHORS, request: str = "a", blocks: tuple[int, ...] = (7, 2, 9), probes: int = 0
) -> Compress:
    return Compress(request, slot, blocks, 10, spec, probes)


def probe(slot: int, spec: MethodSpec = SCORED, index: int = 0, replay: bool = True) -> ProbeRow:
    return ProbeRow("p", "a", slot, index, 10, spec, (7, 2, 9), replay, index == 0)
