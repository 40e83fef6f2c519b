"""The simulated engine: books that balance, predictions that agree with the byte model, auto that never loses."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.byte_model import Load as Bytes
from scheduler.byte_model import Machine, plain
from scheduler.lifecycle import State
from scheduler.simulated import Setup
from scheduler.simulator import Engine
from scheduler.workload import Job, Shape, poisson, trace
from vericache.simulate.study import Load, Study, variants, with_arena

GB = 1e9
CARD = Machine(130 * GB, 4200 * GB, 168 * GB)  # rho 25
SETUP = Setup(CARD, "auto", 16 * GB, 131072.0)
SHAPE = Shape(32768, 512, 0.975)


def rate(setup: Setup, requests: int, seconds: float = 4.0, shape: Shape = SHAPE) -> float:
    return Study(setup, shape, seconds).run(Load(requests)).rate


@given(st.sampled_from(("plain", "lockstep", "staggered", "auto")), st.integers(0, 2**32), st.integers(1, 12))
@settings(max_examples=12)
def test_every_request_ends_and_every_page_comes_back(mode: str, seed: int, count: int) -> None:
    rng = random.Random(seed)
    machine = Machine(3 * GB, 1000 * GB, rng.choice([10, 50, 100]) * GB)
    residual = rng.random() < 0.5
    setup = Setup(machine, mode, 1 * GB, 131072.0, window=16, draft_length=8, tail_tokens=64, residual=residual)
    engine = Engine(setup, rng)
    shape = Shape(3000, 80, 0.9, 0.5, common=rng.choice([0, 1000, 1500]), sharers=rng.randint(1, 4))
    jobs = [shape.job(i, rng, rng.uniform(0, 0.5)) for i in range(count)]
    engine.add(jobs)
    for _ in range(20_000):
        if not engine.busy:
            break
        engine.step()
        # Growth is settled at the next forward pass, or when a row's pages have left, if that came first.
        leaving = sum(engine.planner.tracks[name].state is State.DEMOTING for name in engine.out)
        assert -len(engine.running) - leaving <= engine.free <= setup.pages
        assert sum(r.reserved for r in engine.out.values()) <= engine.arena
    assert not engine.busy
    assert engine.tally.tokens == sum(job.output for job in jobs)
    assert all(job.ended is not None and job.ended >= (job.first or 0) >= job.arrival for job in jobs)
    assert not engine.planner.tracks
    assert not any(engine.planner.rings.link.cells)
    assert not any(engine.planner.rings.pages.cells)
    assert engine.free == setup.pages


def test_plain_agrees_with_the_byte_model() -> None:
    """Rows that all fit, of one size: the model's tokens per second, but for the growth of contexts."""
    found = rate(replace(SETUP, mode="plain"), 20, shape=replace(SHAPE, spread=0.0))
    full = 131072.0 * (32768 + 256)
    expected = plain(CARD, Bytes(16 * GB, full, full), 20).tokens_per_s
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("rho", [10, 25, 60, 80])
@pytest.mark.parametrize("requests", [1, 8, 20, 26, 40, 260])
def test_auto_is_never_slower_than_plain(rho: int, requests: int) -> None:
    """From one request to ten times what memory holds, in the arena that the byte model finds best."""
    card = replace(CARD, link=CARD.bandwidth / rho)
    auto, base = with_arena(replace(SETUP, machine=card), SHAPE), replace(SETUP, machine=card, mode="plain")
    assert rate(auto, requests) >= 0.995 * rate(base, requests)


def test_always_drafting_is_slower_where_the_link_is() -> None:
    card = replace(CARD, link=CARD.bandwidth / 80)
    both = [rate(replace(SETUP, machine=card, mode=mode), 27) for mode in ("staggered", "plain")]
    assert both[0] < 0.7 * both[1]


def test_at_low_load_auto_is_plain_step_by_step() -> None:
    outcomes = [Study(replace(SETUP, mode=mode), SHAPE, 2.0).run(Load(6)) for mode in ("plain", "auto")]
    assert outcomes[0].tally == outcomes[1].tally
    assert outcomes[0].trace == outcomes[1].trace


def test_a_fleet_is_as_fast_as_its_engines() -> None:
    one, two = (Study(SETUP, SHAPE, 2.0, engines=n).run(Load(6 * n)) for n in (1, 2))
    assert two.engines == 2
    assert two.rate == pytest.approx(2 * one.rate, rel=0.05)


def test_arrivals() -> None:
    rng = random.Random(3)
    jobs = list(poisson(SHAPE, 5.0, 100.0, rng))
    assert 400 < len(jobs) < 600
    outcome = Study(SETUP, replace(SHAPE, output=64), 1.0).run(Load(None, jobs[:40]))
    assert len(outcome.ended) == 40
    assert outcome.figures()["request_s"] > 0


def test_a_trace_is_read_and_a_bad_row_named() -> None:
    assert trace([["1.5", "100", "20"], ["0", "50", "10", "0.8"]], 0.9) == [
        Job("r1", 50, 10, 0.8, 0.0),
        Job("r0", 100, 20, 0.9, 1.5),
    ]
    with pytest.raises(ValueError, match=r"row 2 .*expected arrival"):
        trace([["1", "2", "3"], ["1", "two", "3"]], 0.9)


def test_variants_are_named() -> None:
    assert [name for name, _ in variants(SETUP, False)] == ["plain", "lockstep", "staggered", "auto"]
    assert len(dict(variants(SETUP, True))) == 10
    assert not [name for name in dict(variants(replace(SETUP, packed=0.3), True)) if "residual" in name]


def test_requests_about_one_document_need_the_link_less() -> None:
    """Always drafting, where the link is the limit: faster, with fewer bytes for each accepted draft."""
    shape, found = Shape(32768, 512, 0.975, common=24000, sharers=4), []
    for shared in (True, False):
        setup = with_arena(replace(SETUP, mode="staggered", shared=shared), shape)
        outcome = Study(setup, shape, 2.0).run(Load(52))
        found.append((outcome.rate, outcome.tally.link / outcome.tally.right))
    assert found[0][0] > 1.3 * found[1][0]
    assert found[0][1] < 0.7 * found[1][1]


def test_reloads_of_what_is_not_kept_need_the_link_less() -> None:
    """Always drafting, half of the context kept, where the link is the limit: half the bytes, and faster."""
    card, found = replace(CARD, link=CARD.bandwidth / 60), []
    for residual in (True, False):
        setup = replace(SETUP, machine=card, mode="staggered", ratio=0.5, draft_policy="fixed", residual=residual)
        outcome = Study(setup, replace(SHAPE, spread=0.0), 6.0).run(Load(27))
        found.append((outcome.rate, outcome.tally.link / outcome.tally.reloads))
    assert found[0][0] > 1.2 * found[1][0]
    assert found[0][1] == pytest.approx(0.5 * found[1][1], rel=0.03)


@pytest.mark.parametrize("rho", [10, 60])
@pytest.mark.parametrize("requests", [8, 26, 260])
def test_auto_with_smaller_reloads_is_never_slower_than_plain(rho: int, requests: int) -> None:
    card = replace(CARD, link=CARD.bandwidth / rho)
    auto = with_arena(replace(SETUP, machine=card, residual=True), SHAPE)
    assert rate(auto, requests) >= 0.995 * rate(replace(SETUP, machine=card, mode="plain"), requests)


def test_packed_tokens_cannot_stand_in_for_the_hosts() -> None:
    with pytest.raises(ValueError, match="residual reloads need tokens as they are"):
        replace(SETUP, residual=True, packed=0.3)
