"""What ``scheduler.advice`` recommends, and the model of remote prefix caching."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scheduler import byte_model as model
from scheduler.acceptance import Acceptance
from scheduler.advice import ARENAS, RATIOS, WORTH, Workload, baseline, elastic, modes, recommend
from scheduler.byte_model import Load, Machine, Rounds
from scheduler.remote_model import Remote, remote

GB = 1e9
CARD = Machine(96 * GB, 1600 * GB, 64 * GB)
WORK = Workload(48 * GB, 5 * GB, Acceptance(0.85, 25, 0.2))

machines = st.builds(Machine, st.floats(1e10, 1e12), st.floats(1e11, 1e13), st.floats(1e10, 1e12))
works = st.builds(
    Workload,
    weights=st.floats(1e9, 1e11),
    full=st.floats(1e8, 1e10),
    acceptance=st.builds(Acceptance, st.floats(0, 1), st.integers(1, 60), st.floats(0.05, 1)),
    packed=st.floats(0.1, 1),
    tail=st.floats(0, 5e7),
    batch=st.none() | st.integers(1, 64),
)


@given(machines, works)
def test_nothing_slower_than_plain_or_inexact_is_recommended(machine: Machine, work: Workload) -> None:
    assume(machine.memory > work.weights + work.full)
    choice, base = recommend(machine, work, RATIOS[::3], (4, 25, 62)), baseline(machine, work)
    assert choice.mode in ("plain", "staggered")
    assert choice.prediction.tokens_per_s >= (WORTH if choice.mode == "staggered" else 1) * base.tokens_per_s


@given(machines, works, st.sampled_from(RATIOS), st.integers(1, 62))
def test_every_mode_keeps_to_memory_and_batch(machine: Machine, work: Workload, ratio: float, drafts: int) -> None:
    assume(machine.memory > work.weights + work.full)
    load = work.load(ratio)
    for name, found in modes(machine, work, ratio, drafts).items():
        kept = 0 if name == "plain" else load.kept
        assert load.weights + found.rows * kept + found.contexts * load.full <= machine.memory * (1 + 1e-9)
        assert work.batch is None or found.rows <= work.batch


@pytest.mark.parametrize("arena", ARENAS)
def test_mode_auto_keeps_to_memory(arena: float) -> None:
    load, room = WORK.load(0.2), CARD.memory - WORK.weights
    found = elastic(CARD, WORK, 0.2, 25, arena)
    assert found is None or found.contexts * load.full <= (1 - arena) * room
    few = elastic(CARD, replace(WORK, batch=1), 0.2, 25, arena)
    assert few is None or few.contexts == 0, "what fits stays a plain row"


def test_leaving_out_rows_that_wait_for_the_link_costs_nothing() -> None:
    load, drafts = WORK.load(0.2), 25
    found = modes(CARD, WORK, 0.2, drafts)["staggered"]
    room = model.room_staggered(CARD, load, drafts)
    assert found.rows < room
    rounds = Rounds(drafts, WORK.acceptance.gained(0.2, drafts))
    assert found.tokens_per_s == pytest.approx(model.staggered(CARD, load, rounds, room).tokens_per_s)


def test_a_fast_link_is_worth_drafting_and_a_slow_one_is_not() -> None:
    assert recommend(CARD, WORK).mode == "staggered"
    assert recommend(replace(CARD, link=2 * GB), WORK).mode == "plain"


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"48\.0 GB and the full KV of one request, 5\.0 GB, exceed"):
        recommend(replace(CARD, memory=50 * GB), WORK)


def test_packing_and_tail_are_counted() -> None:
    work = replace(WORK, full=6 * GB, tail=1 * GB, packed=0.25)
    assert work.load(0.2).kept == pytest.approx(0.2 * 0.25 * 5 * GB + 1 * GB)


FAR = Remote(2 * GB, 500)
LOAD = Load(48 * GB, 5 * GB, 1 * GB)


def test_a_remote_request_by_hand() -> None:
    found = remote(CARD, LOAD, Rounds(25, 20), replace(FAR, trip=0.01), 10, 4)
    cycle = 25 * (48 + 10) / 1600 + (48 + 5) / 1600 + 0.01
    assert found.start == pytest.approx(0.5)
    assert found.cycle == pytest.approx(cycle)
    assert found.request == pytest.approx(0.5 + 25 * cycle)
    assert found.verify == pytest.approx(5 / 64)
    assert found.full_request == pytest.approx(2.5 + 500 * (48 + 20) / 1600)
    assert found.gpus == pytest.approx((0.5 / 25 + cycle) * 64 / (10 * 5))


@given(st.integers(1, 50), st.floats(0.1, 1), st.floats(1, 26))
def test_at_the_best_share_verifies_are_made_as_fast_as_they_are_asked_for(
    rows: int, local: float, gained: float
) -> None:
    where = replace(FAR, local_share=local)
    found = remote(CARD, LOAD, Rounds(25, gained), where, rows, 4)
    asked = found.gpus * rows * (where.output / gained) / found.request
    assert asked == pytest.approx(local / found.verify)


@pytest.mark.parametrize("wrong", [{"slow": 0}, {"output": 0}, {"trip": -1}, {"local_share": 0}, {"local_share": 2}])
def test_a_remote_setup_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected a positive slow link"):
        replace(FAR, **wrong)
