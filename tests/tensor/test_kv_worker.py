"""The worker's operations in order, failures of copies that concern one request, and what a batch must not write."""

from dataclasses import replace

import pytest
import torch

from compressors import MethodSpec
from tests.tensor.worker_world import BLOCK, PAGES, World, compress, probe
from vericache.engine.ops import (
    DraftRow,
    Failure,
    Load,
    Offload,
    ProbeRow,
    Row,
    StepMetadata,
    StepReport,
    Transfer,
    VerifyRow,
    WriteBack,
)
from vericache.store.transfer import Direction

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
    report = world.step(drops=[0], before=[compress(1, request="b")])
    assert not report.failures
    assert list(world.arena.slots) == [1]
    (failure,) = world.step(before=[compress(0, request="c")]).failures
    assert failure.op == "Compress"
    assert failure.message.startswith("ArenaFullError: the draft arena has 0 of 8 head pages free, 8 are needed")
    world.step(drops=[1])
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
    assert world.step(drops=[0]).arena_bytes == 0


def test_ranks_reports_are_combined() -> None:
    """Every failure counts; a request's sizes and the arena's bytes are the largest rank's; times the slower's."""
    slow, fast = [Transfer("Load", 10, 0.5)], [Transfer("Load", 10, 0.1), Transfer("Load", 5, 0.2)]
    one = StepReport([Failure("a", "Load", "x")], fast, {"a": 3, "b": 9}, {"a": 80}, 70)
    two = StepReport([Failure("c", "Load", "y")], slow, {"a": 5, "d": 1}, {"a": 20, "d": 40}, 60)
    both = StepReport([*one.failures, *two.failures], slow, {"a": 5, "b": 9, "d": 1}, {"a": 80, "d": 40}, 70)
    assert one.aggregate(two) == both
    assert two.aggregate(one) == replace(both, failures=[*two.failures, *one.failures])


# -- a batch -------------------------------------------------------------------------------------------------------


def test_begin_marks_what_must_not_be_written(world: World) -> None:
    """Draft rows own no blocks and replayed probes own their K/V; everything else is written as usual."""
    world.step(before=[compress(0), compress(1, request="b")])
    rows = [
        DraftRow("a#d", "a", 0, 10),
        VerifyRow("b", 1, 10),
        probe(4),
        ProbeRow("new", "c", 5, 0, 10, MethodSpec("kvzip", sinks=1, recent=2), (1, 3, 4), False, True),
        DraftRow("not in the batch", "z", 9, 10),
    ]
    batch = {"plain": [0, 1], "p": [7, 8, 9], "b": [10, 11, 12], "a#d": [13], "new": [10, 11], "last": [5]}
    unwritten = world.begin(rows, batch)
    assert unwritten.dtype == torch.int64
    assert unwritten.tolist() == [2, 3, 4, 8]
    step = world.runtime.step
    assert step is not None
    assert step.num_rows == 6
    assert step.arena_rows.tolist() == [3]
    assert step.draft_tokens.tolist() == [8]
    assert step.tail is not None
    assert step.tail.tokens.tolist() == [5, 6, 7, 8]
    assert step.tail.offsets.tolist() == [0, 1, 2, 3]
    assert [(lo, hi) for lo, hi, _ in world.runtime.observed] == [(2, 5), (9, 11)]


@pytest.mark.parametrize("rows", [[], [probe(4)]])
def test_batches_without_slots_have_no_step(world: World, rows: list[Row]) -> None:
    unwritten = world.begin(rows, {"x": [0, 1], "p": [7, 8, 9]})
    assert unwritten.tolist() == ([2, 3, 4] if rows else [])
    assert unwritten.dtype == torch.int64
    assert world.runtime.step is None
    assert len(world.runtime.observed) == len(rows)


def test_nothing_of_a_step_outlives_it(world: World) -> None:
    """A dummy batch after this step must not write into tails."""
    world.step(before=[compress(0)])
    world.begin([DraftRow("a#d", "a", 0, 10), probe(4)], {"a#d": [10], "p": [7, 8, 9]})
    assert world.runtime.step is not None
    world.worker.run_after(StepMetadata())
    assert world.runtime.step is None
    assert not world.runtime.observed
