"""The worker side: operations in order, and failures that concern one request and nothing else."""

import math
from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import compressors.registry as registry
from compressors import CachedKeys, Kept, MethodSpec, Scorer, Shape, create
from vericache.draft.arena import DraftArena
from vericache.engine.kv_worker import KVWorker
from vericache.engine.ops import (
    Compress,
    DraftRow,
    DropSlot,
    Failure,
    Load,
    Offload,
    Op,
    ProbeRow,
    Row,
    StepMetadata,
    StepReport,
    Transfer,
    VerifyRow,
    WriteBack,
)
from vericache.errors import TransferError
from vericache.store.host import HostStore
from vericache.store.transfer import CpuCopyEngine, Direction, Ticket

SHAPE = Shape(layers=2, kv_heads=2, query_heads=4, head_dim=8)
BLOCK, BLOCKS, PAGES = 4, 12, 10  # tokens of a block, device blocks, host pages
PT = 4  # tokens of an arena page
SCALE = 8**-0.5
ANCHORS = MethodSpec("streaming_llm", ratio=0.5, sinks=1, recent=2)
SCORED = MethodSpec("snapkv", "per_head", 0.5, 1, 3, (("kernel", 1), ("window", 3)))


class PlainLayout:
    """Pages ``[blocks, H, block, 2 * D]`` with a token's key and value side by side."""

    def read(self, cache: Tensor, blocks: Sequence[int], positions: Tensor) -> tuple[Tensor, Tensor]:
        rows = cache[torch.tensor(blocks)[positions // BLOCK], :, positions % BLOCK].transpose(0, 1)
        return rows[..., : SHAPE.head_dim], rows[..., SHAPE.head_dim :]

    def read_keys(self, cache: Tensor, blocks: Sequence[int], positions: Tensor) -> Tensor:
        return self.read(cache, blocks, positions)[0]


class FlakyCopies(CpuCopyEngine):
    """Fails when one of ``bad_pages`` is touched, as a full or broken host would; remembers the order of copies."""

    def __init__(self, caches: list[Tensor], store: HostStore) -> None:
        super().__init__(caches, store)
        self.bad_pages: set[int] = set()
        self.log: list[tuple[Direction, list[int], list[int]]] = []

    def submit(self, direction: Direction, blocks: Sequence[int], pages: Sequence[int]) -> Ticket:
        self.log.append((direction, list(blocks), list(pages)))
        if self.bad_pages & set(pages):
            raise TransferError("the host page is gone")
        return super().submit(direction, blocks, pages)


class World:
    """A worker over a small random cache."""

    def __init__(self, arena_pages: int = 60) -> None:
        rng = torch.Generator().manual_seed(0)
        self.caches = [torch.randn(BLOCKS, 2, BLOCK, 16, generator=rng) for _ in range(SHAPE.layers)]
        self.store = HostStore(PAGES, self.caches)
        self.store.data.copy_(torch.randn(self.store.data.shape, generator=rng))
        self.copies = FlakyCopies(self.caches, self.store)
        self.arena = DraftArena(SHAPE, arena_pages, PT, torch.float32)
        self.layout = PlainLayout()
        self.worker = KVWorker(SHAPE, self.arena, self.layout, self.caches, self.copies)

    def step(self, before: Sequence[Op] = (), after: Sequence[Op] = ()) -> StepReport:
        metadata = StepMetadata((), tuple(before), tuple(after))
        self.worker.run_before(metadata)
        self.worker.run_after(metadata)
        return self.worker.take_report()

    def begin(self, rows: Sequence[Row], batch: dict[str, list[int]]) -> Tensor:
        """``batch``: positions of every row's tokens, in row order."""
        starts = [0]
        for positions in batch.values():
            starts.append(starts[-1] + len(positions))
        return self.worker.begin(rows, list(batch), starts, torch.tensor([p for ps in batch.values() for p in ps]))

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
            keys, values = self.layout.read(self.caches[layer], blocks, torch.arange(context))
            pieces = torch.split(kept.layer(layer), kept.counts[layer].tolist())
            got = self.arena.attend(layer, work, query, SCALE)[0]
            for head in range(4):
                positions = pieces[head // 2]
                weights = (keys[head // 2, positions] @ query[0, head] * SCALE).softmax(0)
                torch.testing.assert_close(got[head], weights @ values[head // 2, positions], rtol=1e-4, atol=1e-5)

    def check_empty(self) -> None:
        assert not self.arena.slots
        assert sorted(self.arena.pool.free) == list(range(len(self.arena.pool.data)))


@pytest.fixture
def world() -> World:
    return World()


def compress(
    slot: int, spec: MethodSpec = ANCHORS, request: str = "a", blocks: tuple[int, ...] = (7, 2, 9)
) -> Compress:
    return Compress(request, slot, blocks, 10, spec)


def probe(slot: int, spec: MethodSpec = SCORED, index: int = 0, replay: bool = True) -> ProbeRow:
    return ProbeRow("p", "a", slot, index, 10, spec, (7, 2, 9), replay)


# -- copies ----------------------------------------------------------------------------------------------------


def test_operations_run_in_order(world: World) -> None:
    """Block 3 is offloaded, then loaded into, then written back: any other order leaves other bytes."""
    old, host = world.image(3), world.store.data[6].clone()
    report = world.step(
        before=[Offload("a", (3,), (1,)), Load("b", (6,), (3,)), Offload("b", (3,), (2,))],
        after=[WriteBack("b", (3,), (6,))],
    )
    assert torch.equal(world.store.data[1], old)
    assert torch.equal(world.image(3), host)
    assert torch.equal(world.store.data[2], host)
    assert [direction for direction, _, _ in world.copies.log] == [
        Direction.TO_HOST,
        Direction.TO_DEVICE,
        Direction.TO_HOST,
        Direction.TO_HOST,
    ]
    page = 2 * 2 * BLOCK * 16 * 4
    assert [(t.op, t.num_bytes) for t in report.transfers] == [
        ("Offload", page),
        ("Load", page),
        ("Offload", page),
        ("WriteBack", page),
    ]
    assert not report.failures


def test_an_id_can_change_hands_within_a_step() -> None:
    """An arena that holds one slot: the drop comes before the compression that needs its pages."""
    world = World(arena_pages=8)
    assert world.step(before=[compress(0)]).compressed == {"a": 8}
    report = world.step(before=[DropSlot(0), compress(1, request="b")])
    assert not report.failures
    assert list(world.arena.slots) == [1]
    (failure,) = world.step(before=[compress(0, request="c"), DropSlot(1)]).failures
    assert failure.op == "Compress"
    assert failure.message.startswith("ArenaFullError: the draft arena has 0 of 8 head pages free, 8 are needed")
    world.check_empty()


def test_a_failed_reload_is_reported_and_its_write_back_skipped(world: World) -> None:
    """The blocks hold no KV then; writing them back would overwrite the only good copy."""
    world.copies.bad_pages = {4}
    host = world.store.data.clone()
    blocks = [world.image(b) for b in (0, 1, 2)]
    report = world.step(
        before=[Load("a", (3, 4), (0, 1)), Load("b", (5,), (2,))],
        after=[WriteBack("a", (0, 1), (3, 4)), WriteBack("b", (8,), (5,))],
    )
    assert report.failures == [Failure("a", "Load", "TransferError: the host page is gone")]
    assert [t.op for t in report.transfers] == ["Load", "WriteBack"]
    assert torch.equal(world.store.data[[3, 4]], host[[3, 4]])
    assert torch.equal(world.image(0), blocks[0])
    assert torch.equal(world.image(1), blocks[1])
    assert torch.equal(world.image(2), host[5])
    assert torch.equal(world.store.data[5], world.image(8))
    assert all(direction is Direction.TO_DEVICE or pages == [5] for direction, _, pages in world.copies.log)

    world.copies.bad_pages = set()
    later = world.step(before=[Load("a", (3, 4), (0, 1))], after=[WriteBack("a", (8, 0), (3, 4))])
    assert not later.failures
    assert torch.equal(world.store.data[3], world.image(8))


def test_a_loss_is_forgotten_with_its_step(world: World) -> None:
    world.copies.bad_pages = {4}
    assert world.step(before=[Load("a", (4,), (0,))]).failures
    report = world.step(after=[WriteBack("a", (1,), (6,))])
    assert [t.op for t in report.transfers] == ["WriteBack"]
    assert torch.equal(world.store.data[6], world.image(1))


@pytest.mark.parametrize("kind", [Offload, WriteBack])
def test_a_failed_copy_to_the_host_stops_nothing_else(world: World, kind: type[Offload] | type[WriteBack]) -> None:
    world.copies.bad_pages = {4}
    report = world.step(after=[kind("a", (0,), (4,)), kind("b", (1,), (5,))])
    assert report.failures == [Failure("a", kind.__name__, "TransferError: the host page is gone")]
    assert torch.equal(world.store.data[5], world.image(1))


def test_a_failed_offload_loses_no_device_blocks(world: World) -> None:
    """Only after a failed reload do the blocks hold nothing worth writing back."""
    world.copies.bad_pages = {4}
    report = world.step(before=[Offload("a", (0,), (4,))], after=[WriteBack("a", (1,), (5,))])
    assert [f.op for f in report.failures] == ["Offload"]
    assert torch.equal(world.store.data[5], world.image(1))


def test_ids_outside_the_cache_are_a_failure_of_their_request(world: World) -> None:
    """Whatever a copy raises: a dead engine would take every other request along."""
    report = world.step(before=[Load("a", (PAGES,), (0,)), Load("b", (1, 2), (3,)), Load("c", (1,), (0,))])
    assert [(f.request_id, f.message.partition(":")[0]) for f in report.failures] == [
        ("a", "IndexError"),
        ("b", "TransferError"),
    ]
    assert torch.equal(world.image(0), world.store.data[1])


def test_reports_are_per_step(world: World) -> None:
    world.copies.bad_pages = {4}
    first = world.step(before=[Load("a", (4,), (0,)), compress(0, request="b")])
    assert len(first.failures) == len(first.compressed) == 1
    assert first.arena_bytes == world.arena.bytes_held > 0
    second = world.step()
    assert second == StepReport(arena_bytes=first.arena_bytes)
    assert world.step(before=[DropSlot(0)]).arena_bytes == 0


def test_ranks_reports_are_combined() -> None:
    """Every failure counts; a request's pages and the arena's bytes are the largest rank's; times the slower's."""
    slow, fast = [Transfer("Load", 10, 0.5)], [Transfer("Load", 10, 0.1), Transfer("Load", 5, 0.2)]
    one = StepReport([Failure("a", "Load", "x")], fast, {"a": 3, "b": 9}, 70)
    two = StepReport([Failure("c", "Load", "y")], slow, {"a": 5, "d": 1}, 60)
    both = StepReport([*one.failures, *two.failures], slow, {"a": 5, "b": 9, "d": 1}, 70)
    assert one.aggregate(two) == both
    assert two.aggregate(one) == StepReport([*two.failures, *one.failures], slow, both.compressed, 70)


# -- compression -------------------------------------------------------------------------------------------------


def test_compressing_without_probes(world: World) -> None:
    report = world.step(before=[compress(3)])
    kept = create(ANCHORS, SHAPE, 10).select()
    assert kept.counts.tolist() == [[5, 5], [5, 5]]
    assert report.compressed == {"a": 8} == {"a": len(world.arena.slots[3].pages)}
    world.check_slot(3, kept, (7, 2, 9), 10)


def test_drop_slot_frees_everything(world: World) -> None:
    world.step(before=[compress(3)])
    world.arena.grow_tail(3, PT + 1)
    report = world.step(before=[DropSlot(3), DropSlot(5)])
    assert not report.failures
    world.check_empty()


def test_a_scoring_pass_reaches_the_compressor(world: World) -> None:
    """What the rows of a pass show layer by layer is what the compression selects from."""
    unwritten = world.begin([probe(2)], {"x": [4], "p": [7, 8, 9]})
    assert unwritten.tolist() == [1, 2, 3]
    world.show(4)
    report = world.step(before=[compress(2, SCORED)])
    assert not report.failures

    expected = create(SCORED, SHAPE, 10)
    rng = torch.Generator().manual_seed(5)
    for layer in range(SHAPE.layers):
        query, key = torch.randn(4, 4, 8, generator=rng), torch.randn(4, 2, 8, generator=rng)
        keys, _ = world.layout.read(world.caches[layer], (7, 2, 9), torch.arange(10))
        expected.observe(layer, 0, query[1:], key[1:], lambda p, k=keys: k[:, p], SCALE)
    kept = expected.select()
    assert torch.equal(world.arena.slots[2].counts.long(), kept.counts)
    world.check_slot(2, kept, (7, 2, 9), 10)


def test_a_pass_of_several_rows_keeps_one_compressor(world: World) -> None:
    """KVzip scores chunk by chunk, one row a step; other requests' passes run in between."""
    spec = MethodSpec("kvzip", "per_head", 0.5, 1, 2, (("chunk", 8),))
    expected = create(spec, SHAPE, 10)
    for index in range(2):
        other = ProbeRow("q", "b", 6, index, 10, spec, (1, 3, 4), False)
        unwritten = world.begin([probe(2, spec, index, False), other], {"q": [10, 11], "p": [10, 11, 12]})
        assert len(unwritten) == 0
        world.show(5, seed=index)
        rng = torch.Generator().manual_seed(index)
        for layer in range(SHAPE.layers):
            query, key = torch.randn(5, 4, 8, generator=rng), torch.randn(5, 2, 8, generator=rng)
            keys, _ = world.layout.read(world.caches[layer], (7, 2, 9), torch.arange(10))
            expected.observe(layer, index, query[2:], key[2:], lambda p, k=keys: k[:, p], SCALE)
    world.step(before=[compress(2, spec)])
    kept = expected.select()
    assert torch.equal(world.arena.slots[2].counts.long(), kept.counts)
    world.check_slot(2, kept, (7, 2, 9), 10)


class Broken(Scorer):
    """Raises where a test wants it to; one instance of a third-party method with a bug."""

    name = "broken"
    summary = "for tests"
    where: ClassVar[str] = ""

    def __init__(self, shape: Shape, num_tokens: int, spec: MethodSpec) -> None:
        super().__init__(shape, num_tokens, spec)
        if self.where == "init":
            raise ValueError("boom")

    def observe(self, layer: int, index: int, query: Tensor, key: Tensor, cached: CachedKeys, scale: float) -> None:
        if self.where == f"observe{layer}":
            raise ValueError("boom")
        if self.where == "outside":
            cached(torch.tensor([99]))

    def scores(self) -> Tensor:
        if self.where == "scores":
            raise ValueError("boom")
        value = math.nan if self.where == "nan" else 1.0
        return torch.full((self.shape.layers, self.shape.kv_heads, self.num_tokens), value)


# (where, message, whether a scoring pass ran before)
BREAKS = [
    ("init", "ValueError: boom", False),
    ("init", "ValueError: boom", True),
    ("observe0", "ValueError: boom", True),
    ("observe1", "ValueError: boom", True),
    ("outside", "IndexError: ", True),
    ("scores", "ValueError: boom", False),
    ("scores", "ValueError: boom", True),
    ("nan", "MethodError: broken returned scores", False),
]


@pytest.mark.parametrize(("where", "message", "with_pass"), BREAKS)
@pytest.mark.parametrize("filled", [True, False])
def test_a_compressor_that_raises_concerns_one_request(
    world: World, monkeypatch: pytest.MonkeyPatch, where: str, message: str, with_pass: bool, filled: bool
) -> None:
    """The forward goes on, the failure is reported when the compression is asked for, the slot is empty (also when
    it was drafting already and is compressed anew), and the next request may use it."""
    monkeypatch.setitem(registry.METHODS, "broken", Broken)
    monkeypatch.setattr(Broken, "where", "")
    if filled:
        world.step(before=[compress(2)])
        world.arena.grow_tail(2, PT + 1)
    monkeypatch.setattr(Broken, "where", where)
    spec = MethodSpec("broken", ratio=0.5, sinks=1, recent=2)
    if with_pass:
        other = ProbeRow("q", "b", 6, 0, 10, SCORED, (1, 3, 4), True)
        world.begin([probe(2, spec), other], {"p": [7, 8, 9], "q": [7, 8, 9]})
        world.show(6)
    report = world.step(before=[compress(2, spec), compress(6, SCORED, "b", (1, 3, 4))])
    (failure,) = report.failures
    assert (failure.request_id, failure.op) == ("a", "Compress")
    assert failure.message.startswith(f"CompressionError: compressor 'broken' failed: {message}")
    assert report.compressed.keys() == {"b"}
    assert list(world.arena.slots) == [6]

    monkeypatch.setattr(Broken, "where", "")
    assert not world.step(before=[compress(2, spec)]).failures  # nothing is left of the failed pass
    world.step(before=[DropSlot(2), DropSlot(6)])
    world.check_empty()


def test_dropping_a_slot_ends_its_scoring_pass(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An aborted request's half-scored compressor must not serve the next owner of the slot."""
    monkeypatch.setitem(registry.METHODS, "broken", Broken)
    monkeypatch.setattr(Broken, "where", "observe0")
    world.begin([probe(2, MethodSpec("broken"))], {"p": [7, 8, 9]})
    world.show(3)
    report = world.step(before=[DropSlot(2), compress(2)])
    assert not report.failures
    world.check_slot(2, create(ANCHORS, SHAPE, 10).select(), (7, 2, 9), 10)


def test_blocks_that_cannot_be_read_leave_the_slot_empty(world: World) -> None:
    (failure,) = world.step(before=[compress(0, blocks=(7, 2))]).failures
    assert failure.message.startswith("IndexError")
    world.check_empty()


# -- a batch -------------------------------------------------------------------------------------------------------


def test_begin_marks_what_must_not_be_written(world: World) -> None:
    """Draft rows own no blocks and replayed probes own their K/V; everything else is written as usual."""
    world.step(before=[compress(0), compress(1, request="b")])
    rows = [
        DraftRow("a#d", "a", 0, 10),
        VerifyRow("b", 1, 10),
        probe(4),
        ProbeRow("new", "c", 5, 0, 10, MethodSpec("kvzip", sinks=1, recent=2), (1, 3, 4), False),
        DraftRow("not in the batch", "z", 9, 10),
    ]
    batch = {"plain": [0, 1], "p": [7, 8, 9], "b": [10, 11, 12], "a#d": [13], "new": [10, 11], "last": [5]}
    unwritten = world.begin(rows, batch)
    assert unwritten.dtype == torch.int64
    assert unwritten.tolist() == [2, 3, 4, 8]
    step = world.worker.runtime.step
    assert step is not None
    assert step.num_rows == 6
    assert step.draft_rows.tolist() == [3]
    assert step.draft_tokens.tolist() == [8]
    assert step.tail is not None
    assert step.tail.tokens.tolist() == [5, 6, 7, 8]
    assert step.tail.offsets.tolist() == [0, 1, 2, 3]
    assert [(lo, hi) for lo, hi, _ in world.worker.runtime.observed] == [(2, 5), (9, 11)]


@pytest.mark.parametrize("rows", [[], [probe(4)]])
def test_batches_without_slots_have_no_step(world: World, rows: list[Row]) -> None:
    unwritten = world.begin(rows, {"x": [0, 1], "p": [7, 8, 9]})
    assert unwritten.tolist() == ([2, 3, 4] if rows else [])
    assert unwritten.dtype == torch.int64
    assert world.worker.runtime.step is None
    assert len(world.worker.runtime.observed) == len(rows)


def test_nothing_of_a_step_outlives_it(world: World) -> None:
    """A dummy batch after this step must not write into tails."""
    world.step(before=[compress(0)])
    world.begin([DraftRow("a#d", "a", 0, 10), probe(4)], {"a#d": [10], "p": [7, 8, 9]})
    assert world.worker.runtime.draft_rows is not None
    world.worker.run_after(StepMetadata())
    assert world.worker.runtime.step is None
    assert not world.worker.runtime.observed
