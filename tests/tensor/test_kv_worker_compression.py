"""Compression in the worker: scoring passes, filled slots, and compressors whose failure concerns one request."""

import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import compressors.registry as registry
from compressors import CachedTokens, MethodSpec, Scorer, Shape, create
from compressors.snapkv import SnapKV
from tests.tensor.worker_world import ANCHORS, PT, SCALE, SCORED, SHAPE, World, compress, probe
from vericache.engine.ops import ProbeRow, StepMetadata
from vericache.engine.score_parts import ScorePart


def test_compressing_without_probes(world: World) -> None:
    report = world.step(before=[compress(3)])
    kept = create(ANCHORS, SHAPE, 10).select()
    assert kept.counts.tolist() == [[5, 5], [5, 5]]
    assert report.compressed == {"a": 8} == {"a": len(world.arena.slots[3].pages)}
    world.check_slot(3, kept, (7, 2, 9), 10)


def test_drop_slot_frees_everything(world: World) -> None:
    world.step(before=[compress(3)])
    world.arena.grow_tail(3, PT + 1)
    report = world.step(drops=[3, 5])
    assert not report.failures
    world.check_empty()


def test_a_scoring_pass_reaches_the_compressor(world: World) -> None:
    """What the rows of a pass show layer by layer is what the compression selects from."""
    unwritten = world.begin([probe(2)], {"x": [4], "p": [7, 8, 9]})
    assert unwritten.tolist() == [1, 2, 3]
    world.show(4)
    report = world.step(before=[compress(2, SCORED, probes=1)])
    assert not report.failures

    expected = create(SCORED, SHAPE, 10)
    rng = torch.Generator().manual_seed(5)
    for layer in range(SHAPE.layers):
        query, key = torch.randn(4, 4, 8, generator=rng), torch.randn(4, 2, 8, generator=rng)
        cached = world.layout.tokens(world.caches[layer], torch.tensor([7, 2, 9]))
        expected.observe(layer, 0, query[1:], key[1:], cached, SCALE)
    kept = expected.select()
    assert torch.equal(world.arena.slots[2].counts.long(), kept.counts)
    world.check_slot(2, kept, (7, 2, 9), 10)


def test_a_pass_of_several_rows_keeps_one_compressor(world: World) -> None:
    """KVzip scores chunk by chunk, one row a step; other requests' passes run in between."""
    spec = MethodSpec("kvzip", "per_head", 0.5, 1, 2, (("chunk", 8),))
    expected = create(spec, SHAPE, 10)
    for index in range(2):
        other = ProbeRow("q", "b", 6, index, 10, spec, (1, 3, 4), False, index == 0)
        unwritten = world.begin([probe(2, spec, index, False), other], {"q": [10, 11], "p": [10, 11, 12]})
        assert len(unwritten) == 0
        world.show(5, seed=index)
        rng = torch.Generator().manual_seed(index)
        for layer in range(SHAPE.layers):
            query, key = torch.randn(5, 4, 8, generator=rng), torch.randn(5, 2, 8, generator=rng)
            cached = world.layout.tokens(world.caches[layer], torch.tensor([7, 2, 9]))
            expected.observe(layer, index, query[2:], key[2:], cached, SCALE)
    world.step(before=[compress(2, spec, probes=2)])
    kept = expected.select()
    assert torch.equal(world.arena.slots[2].counts.long(), kept.counts)
    world.check_slot(2, kept, (7, 2, 9), 10)


class ValueNorms(Scorer):
    """Reads keys and values; the larger the product of their norms the more a token matters."""

    name = "value_norms"
    summary = "for tests"
    query_aware = False
    reads_cache = True
    layers_read: ClassVar[list[int]] = []

    def __init__(self, shape: Shape, num_tokens: int, spec: MethodSpec) -> None:
        super().__init__(shape, num_tokens, spec)
        self._scores = torch.zeros(shape.layers, shape.kv_heads, num_tokens)

    def read(self, layer: int, cached: CachedTokens) -> None:
        self.layers_read.append(layer)
        every = torch.arange(self.num_tokens)
        self._scores[layer] = cached.values(every).norm(dim=-1) * cached.keys(every).norm(dim=-1)

    def scores(self) -> Tensor:
        return self._scores


def test_a_method_reads_the_cache_once_a_layer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.METHODS, "value_norms", ValueNorms)
    monkeypatch.setattr(ValueNorms, "layers_read", [])
    spec = MethodSpec("value_norms", ratio=0.5, sinks=1, recent=2)
    assert not world.step(before=[compress(2, spec), compress(4, replace(spec, ratio=1.0), "b")]).failures
    assert ValueNorms.layers_read == [0, 1], "a context that is kept whole needs no scores"
    expected = create(spec, SHAPE, 10)
    for layer, cache in enumerate(world.caches):
        keys, values = world.layout.read(cache, torch.tensor([7, 2, 9]), torch.arange(10))
        expected.read(layer, CachedTokens(lambda p, k=keys: k[:, p], lambda p, v=values: v[:, p]))
    kept = expected.select()
    world.check_slot(2, kept, (7, 2, 9), 10)
    assert kept.positions.tolist() != create(ANCHORS, SHAPE, 10).select().positions.tolist()


class Broken(Scorer):
    """Raises where a test wants it to; one instance of a third-party method with a bug."""

    name = "broken"
    summary = "for tests"
    query_aware = False
    where: ClassVar[str] = ""

    def __init__(self, shape: Shape, num_tokens: int, spec: MethodSpec) -> None:
        super().__init__(shape, num_tokens, spec)
        if self.where == "init":
            raise ValueError("boom")

    def observe(self, layer: int, index: int, query: Tensor, key: Tensor, cached: CachedTokens, scale: float) -> None:
        if self.where == f"observe{layer}":
            raise ValueError("boom")
        if self.where == "outside":
            cached.keys(torch.tensor([99]))

    def read(self, layer: int, cached: CachedTokens) -> None:
        raise AssertionError("a method that does not declare reads_cache is not asked to read")

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
        other = ProbeRow("q", "b", 6, 0, 10, SCORED, (1, 3, 4), True, True)
        world.begin([probe(2, spec), other], {"p": [7, 8, 9], "q": [7, 8, 9]})
        world.show(6)
    seen = int(with_pass)
    report = world.step(before=[compress(2, spec, probes=seen), compress(6, SCORED, "b", (1, 3, 4), seen)])
    (failure,) = report.failures
    assert (failure.request_id, failure.op) == ("a", "Compress")
    assert failure.message.startswith(f"CompressionError: compressor 'broken' failed: {message}")
    assert report.compressed.keys() == {"b"}
    assert list(world.arena.slots) == [6]

    monkeypatch.setattr(Broken, "where", "")
    assert not world.step(before=[compress(2, spec)]).failures  # nothing is left of the failed pass
    world.step(drops=[2, 6])
    world.check_empty()


class Falsy(SnapKV):
    """A method whose objects are false, as a container that is still empty is."""

    name = "falsy"

    def __len__(self) -> int:
        return 0


def test_nothing_is_skipped_because_it_is_empty(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Public fault 26: the first compression ever, into an arena that holds nothing, over keys and values that are all
    zero, by a method that is false."""
    monkeypatch.setitem(registry.METHODS, "falsy", Falsy)
    for cache in world.caches:
        cache.zero_()
    spec = replace(SCORED, name="falsy")
    world.begin([probe(2, spec)], {"p": [7, 8, 9]})
    world.show(3)
    report = world.step(before=[compress(2, spec, probes=1)])
    assert not report.failures
    counts = world.arena.slots[2].counts
    assert int(counts.sum()) == SHAPE.layers * SHAPE.kv_heads * 5, "half of the context is kept, not all of it"
    assert report.compressed == {"a": len(world.arena.slots[2].pages)}


def test_dropping_a_slot_ends_its_scoring_pass(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An aborted request's half-scored compressor must not serve the next owner of the slot."""
    monkeypatch.setitem(registry.METHODS, "broken", Broken)
    monkeypatch.setattr(Broken, "where", "observe0")
    world.begin([probe(2, MethodSpec("broken"))], {"p": [7, 8, 9]})
    world.show(3)
    report = world.step(drops=[2], before=[compress(2)])
    assert not report.failures
    world.check_slot(2, create(ANCHORS, SHAPE, 10).select(), (7, 2, 9), 10)


def test_a_pass_can_start_in_a_slot_emptied_in_the_same_step(world: World) -> None:
    """The slot's former owner ended in the step before; the new owner's first scoring row must survive the drop."""
    world.step(before=[compress(2)])
    batch = {"p": [7, 8, 9]}
    metadata = StepMetadata((2,), (probe(2),))
    world.worker.match(metadata, list(batch), [0, 3])
    world.show(3)
    world.worker.run_before(metadata)
    world.worker.run_after(metadata)
    assert not world.arena.slots
    assert not world.step(before=[compress(2, SCORED, probes=1)]).failures


def test_missing_scoring_rows_are_an_error(world: World) -> None:
    """Never select from scores nobody has computed: it would only cost acceptance, and nobody would notice."""
    (failure,) = world.step(before=[compress(2, SCORED, probes=1)]).failures
    assert "0 scoring rows were seen, expected 1" in failure.message
    world.check_empty()


def test_blocks_that_cannot_be_read_leave_the_slot_empty(world: World) -> None:
    (failure,) = world.step(before=[compress(0, blocks=(7, 2))]).failures
    assert failure.message.startswith("IndexError")
    world.check_empty()


def test_scores_that_are_held_take_the_place_of_rows(world: World) -> None:
    """One context is scored and its first chunk held; another that begins alike is scored from there on."""
    spec = MethodSpec("kvzip", "per_head", 0.5, 1, 2, (("chunk", 8),))
    expected = create(spec, SHAPE, 10)
    for index in range(2):
        world.begin([probe(2, spec, index, False)], {"p": [10, 11, 12]})
        world.show(3, seed=index)
        rng = torch.Generator().manual_seed(index)
        for layer in range(SHAPE.layers):
            query, key = torch.randn(3, 4, 8, generator=rng), torch.randn(3, 2, 8, generator=rng)
            cached = world.layout.tokens(world.caches[layer], torch.tensor([7, 2, 9]))
            expected.observe(layer, index, query, key, cached, SCALE)
    parts = (ScorePart(1, 0, 8),)
    assert not world.step(before=[replace(compress(2, spec, probes=2), keep=parts)]).failures
    kept = expected.select()
    world.check_slot(2, kept, (7, 2, 9), 10)

    last = replace(probe(3, spec, 1, False), first=True)
    world.begin([last], {"p": [10, 11, 12]})
    world.show(3, seed=1)
    assert not world.step(before=[replace(compress(3, spec, "b", probes=1), known=parts)]).failures
    world.check_slot(3, kept, (7, 2, 9), 10)

    again = replace(compress(3, spec, "b", probes=0), known=(*parts, ScorePart(2, 8, 10)), forget=(1,))
    (failure,) = world.step(drops=[3], before=[again]).failures
    assert "KeyError: 1" in failure.message, "what was dropped is not there"
