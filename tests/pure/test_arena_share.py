"""How much memory the draft arena gets: the decision at start, without a machine."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scheduler.acceptance import USUAL, Acceptance
from scheduler.advice import WORTH, Workload, baseline, elastic
from scheduler.arena import LARGEST, SAFE, auto_share, foreseen, loads
from scheduler.byte_model import Machine
from vericache.config import VeriCacheConfig
from vericache.engine.share import ON_CPU, Chosen, Facts, choose, fixed

TOKEN = 131072.0  # bytes of a token's KV, 8B shape
BANDWIDTH = 4.2e12
# As measured on an H200 with an arena of a quarter: 0.98 to 0.70 of plain vLLM at every load, and not one demotion.
SMALL = Facts(8 * 8256 * TOKEN, 16e9, TOKEN, 1.0, 8264, 80, BANDWIDTH, BANDWIDTH / 80)
LARGE = replace(SMALL, memory=110e9, longest=65536, seats=256)
ENOUGH: dict[str, Any] = {"host_memory_gib": 256.0}


def at(facts: Facts, rho: float) -> Facts:
    return replace(facts, link=facts.bandwidth / rho)


def chosen(facts: Facts, **settings: Any) -> Chosen:
    return choose(VeriCacheConfig(**{**ENOUGH, **settings}), facts)


@pytest.mark.parametrize("context", [None, 6000, 8000])
def test_a_slow_link_and_room_for_few_contexts_get_no_arena(context: int | None) -> None:
    found = chosen(SMALL, expected_context=context)
    assert found.fraction == 0
    assert f"requests of {context or 4132} tokens" in found.why
    assert "no arena pays at every load; the best one, 0." in found.why


def test_a_fast_link_gets_a_large_arena_and_a_slow_one_a_small_one() -> None:
    shares = [chosen(at(LARGE, rho)).fraction for rho in (10, 25, 60, 80)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] >= 0.5
    assert 0 < shares[-1] <= 0.2
    assert chosen(at(LARGE, 1000)).fraction == 0


def test_drafts_that_host_memory_cannot_hold_are_not_reckoned_with() -> None:
    assert chosen(at(LARGE, 10), host_memory_gib=4.0).fraction == 0


def test_a_gain_within_the_margin_is_none() -> None:
    """Rho alone takes the prediction from clearly above to below it."""
    predicted = {}
    for rho in range(20, 400, 20):
        machine = Machine(126e9, BANDWIDTH, BANDWIDTH / rho)
        found = auto_share(machine, Workload(16e9, 32768 * TOKEN, USUAL), 0.25, 25)
        assert found.fraction == 0 or (found.speedup >= WORTH and found.worst >= SAFE)
        predicted[rho] = found
    assert predicted[20].fraction
    refused = predicted[380].refused
    assert refused is not None
    assert refused.speedup < WORTH


@pytest.mark.parametrize("facts", [SMALL, LARGE, at(LARGE, 10), at(SMALL, 1000)])
def test_who_needs_an_arena_gets_one(facts: Facts) -> None:
    """Mode draft, and clients that may ask for more than every server allows."""
    for asks in ({"mode": "draft"}, {"request_options": ("mode", "epsilon")}, {"request_options": ("compressor",)}):
        found = chosen(facts, **asks)
        one = facts.token * (0.25 * (facts.longest - 576) + 576)  # of the longest request, with its tail
        assert one <= found.fraction * facts.memory
        assert (1 - found.fraction) * facts.memory >= facts.longest * facts.token, "its verify fits beside it"


def test_options_that_every_server_allows_ask_for_nothing() -> None:
    assert chosen(SMALL, request_options=("mode", "draft_length")).fraction == 0


def test_a_context_that_does_not_fit_gets_no_arena() -> None:
    facts = replace(SMALL, memory=4000 * TOKEN)
    assert chosen(facts).fraction == 0
    assert chosen(facts, mode="draft").fraction > 0
    assert chosen(facts, request_options=("mode", "epsilon")).fraction > 0


def test_what_needs_no_measurement() -> None:
    assert fixed(VeriCacheConfig(), on_cpu=True) == ON_CPU
    assert fixed(VeriCacheConfig(), on_cpu=False) is None
    for on_cpu in (True, False):
        known = fixed(VeriCacheConfig(arena_fraction=0.3), on_cpu)
        assert known is not None
        assert known.fraction == 0.3
        off = fixed(VeriCacheConfig(mode="off"), on_cpu)
        assert off is not None
        assert off.fraction == 0


@pytest.mark.parametrize("rho", [10, 25, 60, 80])
@pytest.mark.parametrize("share", [0.2, 0.64, 0.85])
@pytest.mark.parametrize("batch", [None, 4, 12])
def test_mode_auto_is_never_predicted_slower_than_plain(rho: int, share: float, batch: int | None) -> None:
    """At no load, of which every one is looked at here."""
    machine = Machine(96e9, 1.6e12, 1.6e12 / rho)
    work = Workload(48e9, 5e9, Acceptance(share, 25, 0.2), batch=batch)
    found = auto_share(machine, work, 0.2, 25)
    if not found.fraction:
        return
    assert found.speedup >= WORTH
    for requests in range(1, (batch or 40) + 1):
        one = replace(work, batch=requests)
        auto = elastic(machine, one, 0.2, 25, found.fraction)
        assert auto is not None
        assert auto.tokens_per_s >= SAFE * baseline(machine, one).tokens_per_s


@given(st.integers(1, 5000), st.floats(0.01, 0.9), st.none() | st.integers(1, 6000))
def test_loads_are_few_and_hold_the_number_that_fills_memory(full: int, share: float, batch: int | None) -> None:
    found = loads(full, share, batch)
    assert len(found) < 80
    assert found == sorted(set(found))
    assert all(n <= (batch or n) for n in found)
    assert (batch is not None and batch < full) or full in found


@given(st.floats(1e9, 1e12), st.floats(1e9, 1e12), st.integers(1, 64))
def test_a_share_is_one(memory: float, link: float, seats: int) -> None:
    facts = replace(SMALL, memory=memory, link=link, seats=seats)
    assume(memory > facts.longest * TOKEN)
    assert 0 <= chosen(facts).fraction < 1
    assert 0 < chosen(facts, mode="draft").fraction < 1
    machine = Machine(memory + 16e9, BANDWIDTH, link)
    assert 0 <= foreseen(machine, Workload(16e9, 8e8, USUAL), 0.25, 25, LARGEST).worst <= 1.0001
