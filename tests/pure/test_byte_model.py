"""The byte model against worked examples, and what must hold for any numbers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler import byte_model as model
from scheduler.acceptance import Acceptance, accepted, chance_of
from scheduler.byte_model import Load, Machine, Rounds

GB = 1e9
CARD = Machine(96 * GB, 1600 * GB, 64 * GB)  # rho 25
MISTRAL = Load(48 * GB, 5 * GB, 1 * GB)  # 24B in bfloat16, c = 0.2
QWEN = Load(64 * GB, 5 * GB, 1 * GB)  # 32B

sizes = st.floats(1e6, 1e12)
rates = st.floats(1e9, 1e14)
machines = st.builds(Machine, sizes, rates, rates)
# Of what is kept, reloads leave out nothing, or some, or nearly all.
loads = st.tuples(sizes, sizes, st.floats(0.01, 1), st.sampled_from([0, 0.5, 0.95])).map(
    lambda v: Load(v[0], v[1], v[1] * v[2], v[1] * v[2] * v[3])
)
rounds = st.integers(1, 200).flatmap(lambda x: st.builds(Rounds, st.just(x), st.floats(1, x + 1)))
rows = st.integers(1, 500)
faster = st.floats(1, 100)


def yields(gamma: float, drafts: int) -> Rounds:
    return Rounds(drafts, 1 + gamma * drafts)


def test_times_of_the_worked_example() -> None:
    found = model.staggered(CARD, MISTRAL, yields(0.85, 25), 6)
    assert found.gpu == pytest.approx(34.5e-3)
    assert found.transfer == pytest.approx(18.75e-3)
    saving = model.staggered(CARD, replace(MISTRAL, saved=1 * GB), yields(0.85, 25), 6)
    assert (saving.gpu, saving.transfer) == (found.gpu, pytest.approx(0.8 * 18.75e-3))
    assert model.balance(CARD, MISTRAL, 25, 6) == pytest.approx(24 / 25 - 48 / 30)


@pytest.mark.parametrize(
    ("load", "gamma", "drafts", "batch", "tokens_per_s", "speedup"),
    [
        (MISTRAL, 0.85, 25, 6, 149, 0.96),
        (MISTRAL, 0.85, 25, 10, 228, 1.47),
        (MISTRAL, 0.85, 25, 20, 274, 1.77),
        (MISTRAL, 0.75, 40, 30, 387, 2.5),
        (QWEN, 0.85, 25, 20, 274, 2.7),
    ],
)
def test_throughput_over_plain_vllm_that_fills_its_memory(
    load: Load, gamma: float, drafts: int, batch: int, tokens_per_s: float, speedup: float
) -> None:
    assert model.room_staggered(CARD, load, drafts) >= batch
    found = model.staggered(CARD, load, yields(gamma, drafts), batch).tokens_per_s
    base = model.plain(CARD, load, model.room_plain(CARD, load)).tokens_per_s
    assert found == pytest.approx(tokens_per_s, rel=0.005)
    assert found / base == pytest.approx(speedup, rel=0.02)


@pytest.mark.parametrize(
    ("memory", "rho", "weights", "tokens"),
    [(96, 25, 48, 12.5), (96, 25, 64, 8.3), (188, 60, 140, 15.3), (141, 78, 64, 42.6), (141, 87, 16, 77)],
)
def test_tokens_per_verify_that_a_busy_link_needs(memory: float, rho: float, weights: float, tokens: float) -> None:
    found = model.link_limit(Machine(memory * GB, rho * GB, GB), Load(weights * GB, GB, GB / 4))
    assert found == pytest.approx(tokens, rel=0.01)


@given(machines, loads, rounds, rows, faster)
def test_nothing_gets_slower_with_bandwidth(
    machine: Machine, load: Load, rounds: Rounds, rows: int, times: float
) -> None:
    for better in (replace(machine, bandwidth=machine.bandwidth * times), replace(machine, link=machine.link * times)):
        for mode in (model.staggered, model.lockstep):
            assert (
                mode(better, load, rounds, rows).tokens_per_s >= 0.999 * mode(machine, load, rounds, rows).tokens_per_s
            )
        for stock in (model.plain, model.short):
            assert stock(better, load, rows).tokens_per_s >= 0.999 * stock(machine, load, rows).tokens_per_s


@given(machines, loads, rounds, rows)
def test_more_rows_never_make_plain_or_staggered_slower(
    machine: Machine, load: Load, rounds: Rounds, rows: int
) -> None:
    few, more = (model.staggered(machine, load, rounds, n).tokens_per_s for n in (rows, rows + 1))
    assert more >= 0.999 * few
    assert model.plain(machine, load, rows + 1).tokens_per_s >= model.plain(machine, load, rows).tokens_per_s


@given(machines, loads, rounds, rows)
def test_drafting_is_never_faster_than_the_lossy_cache_alone_nor_its_link(
    machine: Machine, load: Load, rounds: Rounds, rows: int
) -> None:
    found = model.staggered(machine, load, rounds, rows)
    assert found.tokens_per_s <= 1.001 * model.short(machine, load, rows).tokens_per_s
    assert found.tokens_per_s <= 1.001 * rounds.gained * machine.link / load.moved
    assert found.link_busy <= 1
    assert model.lockstep(machine, load, rounds, rows).link_busy <= 1.001


@given(machines, loads, st.integers(1, 200), rows)
def test_below_c_star_the_link_is_the_limit(machine: Machine, load: Load, drafts: int, rows: int) -> None:
    found = model.staggered(machine, load, Rounds(drafts, 1), rows)
    distance = load.c - model.balance(machine, load, drafts, rows)
    if abs(distance) > 1e-6 * max(1, machine.rho, load.weights / (rows * load.full)):
        assert (found.transfer > found.gpu) == (distance < 0)


@given(machines, loads, rows)
def test_the_least_draft_length_is_the_least_that_is_bound_by_memory(machine: Machine, load: Load, rows: int) -> None:
    least = model.least_drafts(machine, load, rows)

    def slack(drafts: int) -> float:
        found = model.staggered(machine, load, Rounds(drafts, 1), rows)
        return found.gpu / found.transfer

    assert slack(least) >= 1 - 1e-9
    assert least == 1 or slack(least - 1) <= 1 + 1e-9


@given(machines, loads, rounds, rows, st.floats(0.1, 1e6))
def test_at_break_even_the_rate_is_the_one_asked_for(
    machine: Machine, load: Load, rounds: Rounds, rows: int, rate: float
) -> None:
    found = model.staggered(machine, load, rounds, rows)
    gained = model.break_even(found, rounds.drafts, rate)
    assert found.tokens_per_s / rounds.gained * gained == pytest.approx(rate)


@given(machines, loads, st.integers(1, 200))
def test_what_is_said_to_fit_fits_and_one_more_does_not(machine: Machine, load: Load, drafts: int) -> None:
    fit = model.room_staggered(machine, load, drafts)
    assert fit <= model.room_short(machine, load)

    def needed(rows: int) -> float:
        contexts = model.staggered(machine, load, Rounds(drafts, 1), rows).contexts
        return load.weights + rows * load.kept + contexts * load.full

    assert fit == 0 or needed(fit) <= machine.memory
    assert needed(fit + 1) > machine.memory * (1 - 1e-9)


@given(machines, loads, st.integers(1, 200))
def test_rows_in_use_are_the_fewest_that_keep_the_link_busy(machine: Machine, load: Load, drafts: int) -> None:
    def busy(rows: int) -> float:
        return model.staggered(machine, load, Rounds(drafts, 1), rows).link_busy

    enough = model.rows_in_use(machine, load, drafts)
    if enough is None:
        assert busy(10**6) < 1 + 1e-9
    else:
        assert busy(enough) > 1 - 1e-9
        assert enough == 1 or busy(enough - 1) < 1 + 1e-9


@given(st.floats(0, 1), st.integers(1, 200))
def test_the_chance_gives_back_the_accepted_share(share: float, drafts: int) -> None:
    assert accepted(chance_of(share, drafts), drafts) == pytest.approx(share * drafts, abs=1e-6)


@given(st.floats(0, 1), st.integers(1, 100), st.floats(0.01, 1), st.floats(0.01, 1), st.integers(1, 99))
def test_acceptance_is_what_was_given_and_grows_with_ratio_and_length(
    share: float, drafts: int, ratio: float, other: float, length: int
) -> None:
    acceptance = Acceptance(share, drafts, ratio)
    assert acceptance.gained(ratio, drafts) == pytest.approx(1 + share * drafts, abs=1e-6)
    assert 1 <= acceptance.gained(other, length) <= acceptance.gained(other, length + 1) <= length + 2
    low, high = sorted((ratio, other))
    assert acceptance.gained(low, length) <= acceptance.gained(high, length) + 1e-9


@pytest.mark.parametrize("values", [(0, 1, 1), (1, -1, 1), (1, 1, float("inf")), (1, 1, float("nan"))])
def test_a_machine_without_a_size_or_rate_is_refused(values: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="must be positive and finite"):
        Machine(*values)


@pytest.mark.parametrize("values", [(0, 1), (25, 27), (25, 0.5)])
def test_a_round_that_cannot_be_is_refused(values: tuple[int, float]) -> None:
    with pytest.raises(ValueError, match="at least 1 draft and yields"):
        Rounds(*values)


def test_a_reload_leaves_something_to_load() -> None:
    with pytest.raises(ValueError, match="a reload leaves out 5"):
        Load(1.0, 5.0, 5.0, 5.0)
