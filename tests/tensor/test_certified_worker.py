"""Certified rows on the worker, over a small random cache: the answer is dense attention's within epsilon, absent
tokens come from the host store, and everything is counted."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.tensor.worker_world import SCALE, SCORED, SHAPE, World, probe
from vericache.certified.attention import Outcome, Policy
from vericache.certified.certificate import Bound, Target
from vericache.engine.certified_worker import CertifiedWorker, true_errors
from vericache.engine.kv_worker import KVWorker
from vericache.engine.ops import CertifiedRow, Compress, Offload

CONTEXT, BLOCKS, PAGES = 10, (7, 2, 9), (5, 1, 3)
SAMPLE = replace(SCORED, counts="uniform", selector="poisson")


class CertifiedWorld(World):
    """A world whose worker serves certified rows, every one of them measured."""

    def __init__(self) -> None:
        super().__init__()
        self.certified = CertifiedWorker(self.arena, self.layout, self.caches, self.store, measured=1.0)
        self.worker = KVWorker(SHAPE, self.runtime, self.layout, self.caches, self.copies, self.certified)

    def demote(self, bound: Bound = "denominator") -> None:
        self.begin([probe(0, SAMPLE)], {"p": [7, 8, 9]})
        self.show(3)
        compress = Compress("a", 0, BLOCKS, CONTEXT, SAMPLE, 1, pages=PAGES, bound=bound)
        report = self.step(before=[Offload("a", BLOCKS, PAGES), compress])
        assert not report.failures
        self.context = [self.layout.read(c, torch.tensor(BLOCKS), torch.arange(CONTEXT)) for c in self.caches]
        for cache in self.caches:  # vLLM uses the blocks for others
            cache.fill_(float("nan"))

    def row(self, eps: float, count: int = 2, bound: Bound = "denominator") -> tuple[list[Tensor], list[Tensor]]:
        """Outputs ``[Hq, D]`` by layer of the row at position CONTEXT + count - 1, and what dense attention gives."""
        rng = torch.Generator().manual_seed(7)
        policy = Policy(Target(eps, 0.1, bound), max_fetch=1.0)
        outputs, dense = [], []
        tail = [torch.randn(2, count, SHAPE.kv_heads, SHAPE.head_dim, generator=rng) for _ in range(SHAPE.layers)]
        for i in range(count):
            unwritten = self.begin([CertifiedRow("a", 0, CONTEXT, policy)], {"x": [0, 1], "a": [CONTEXT + i]})
            assert unwritten.tolist() == [2]
            outputs, dense = [], []
            for layer in range(SHAPE.layers):
                key, value = tail[layer][:, i]
                self.runtime.write(layer, key.expand(3, -1, -1), value.expand(3, -1, -1))
                query = torch.randn(3, SHAPE.query_heads, SHAPE.head_dim, generator=rng)
                output = torch.zeros_like(query)
                self.runtime.attend(layer, query, output, SCALE)
                assert not output[:2].any()
                keys, values = (
                    torch.cat([a, b.transpose(0, 1)], 1)
                    for a, b in zip(self.context[layer], tail[layer][:, : i + 1], strict=True)
                )
                grouped = query[2].unflatten(0, (SHAPE.kv_heads, -1))
                dense.append(((grouped @ keys.mT * SCALE).softmax(-1) @ values).flatten(0, 1))
                outputs.append(output[2])
        return outputs, dense


def test_without_an_error_a_row_is_dense_attention() -> None:
    world = CertifiedWorld()
    world.demote()
    outputs, dense = world.row(1e-12)
    for got, expected in zip(outputs, dense, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    decided = world.worker.take_report().certified["a"]
    assert decided.decisions == 2 * SHAPE.layers * SHAPE.kv_heads
    assert decided.tokens > 0
    assert decided.num_bytes == decided.tokens * 2 * SHAPE.head_dim * 4
    assert len(decided.measured) == decided.decisions
    assert max(decided.measured) < 1e-5
    assert decided.certificates == (0.0,)


def test_a_loose_target_fetches_less_and_says_how_far_off_it_was() -> None:
    world = CertifiedWorld()
    world.demote()
    world.row(1e-12)
    strict = world.worker.take_report().certified["a"]
    world.row(0.9)
    loose = world.worker.take_report().certified["a"]
    assert loose.tokens < strict.tokens
    assert max(loose.measured) > 0
    assert max(loose.certificates) <= 0.9


def test_the_measured_error_is_that_of_what_is_certified() -> None:
    """Of two heads, the larger of their queries' errors."""
    exact, log_total = torch.tensor([[[3.0, 4.0], [0.0, 1.0]], [[1.0, 0.0], [2.0, 0.0]]]), torch.zeros(2, 2)
    off = torch.tensor([[0.1, 0.3], [0.0, 0.2]])
    total = torch.tensor([[0.5, 1.25], [1.0, 1.5]], dtype=torch.float64)
    none = torch.zeros(2, dtype=torch.int64)
    outcome = Outcome(exact * (1 + off[..., None]), off.double(), total.log(), none, none > 0, none > 0)
    assert true_errors(outcome, exact, log_total, "output") == pytest.approx([0.3, 0.2])
    assert true_errors(outcome, exact, log_total, "denominator") == pytest.approx([0.5, 0.5])


def test_norms_of_values_are_held_where_the_output_is_certified() -> None:
    held = []
    for bound in get_args(Bound):
        world = CertifiedWorld()
        world.demote(bound)
        held.append(world.certified.bytes_held)
    assert held[1] - held[0] == 2 * SHAPE.layers * SHAPE.kv_heads * CONTEXT


def test_a_row_whose_output_is_certified() -> None:
    world = CertifiedWorld()
    world.demote("output")
    outputs, dense = world.row(0.2, bound="output")
    for got, expected in zip(outputs, dense, strict=True):
        grouped = [x.unflatten(0, (SHAPE.query_heads, -1)) for x in (got - expected, expected)]
        assert (grouped[0].norm(dim=-1) <= 0.2 * grouped[1].norm(dim=-1)).all()
    decided = world.worker.take_report().certified["a"]
    assert decided.decisions == len(decided.measured)
    assert max(decided.measured) <= max(*decided.certificates, 1e-5)
    assert max(decided.certificates) <= 0.2


def test_a_dropped_slot_leaves_nothing() -> None:
    world = CertifiedWorld()
    world.demote()
    assert world.certified.bytes_held > 0
    report = world.step(drops=[0])
    assert report.arena_bytes == 0
    world.check_empty()
