"""Requests with a common prefix verify together, on one reload of it, and hold up nobody else."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.admission import Demand, Limits, LockStep, Policy, Prefix, Staggered
from scheduler.lifecycle import State
from scheduler.rings import Rings
from scheduler.sharing import join, lead
from tests.pure.planner_world import Engine, Wish

PREFIX = Prefix("document", 36, 20)
SHARER = Wish(span=4, link_ns=10, pages=24, limit=12, prefix=PREFIX)  # of which 4 ns and 4 pages are its own
MODES = [(1, False), (2, False), (2, True)]


def world(policy: Policy | None = None, depth: int = 1, ahead: bool = False, pages: int = 100) -> Engine:
    policy = policy or Staggered()
    return Engine(policy, 32, 8, limits=Limits(10, pages), depth=depth, named=not ahead, ahead=ahead)


def sharers(engine: Engine, count: int, wish: Wish = SHARER) -> list[str]:
    names = [f"s{i}" for i in range(count)]
    for name in names:
        engine.add(name, wish)
    return names


@pytest.mark.parametrize(("depth", "ahead"), MODES)
@pytest.mark.parametrize("policy", [Staggered(), LockStep(9)], ids=["staggered", "lock-step"])
def test_sharers_verify_together_on_one_reload(policy: Policy, depth: int, ahead: bool) -> None:
    engine = world(policy, depth, ahead)
    names = sharers(engine, 5)
    engine.run()
    assert sum(engine.rings.link.cells) == 36 + 5 * 4, "the prefix is counted once"
    assert max(engine.rings.pages.cells) == 20 + 5 * 4
    for _ in range(200):
        out = engine.run()
        assert {i for i, _ in out.verifies} in (set(), set(names))
        engine.check()
        assert engine.held <= engine.rings.pages.cells[0]
    rounds = {engine.requests[name].rounds for name in names}
    assert max(rounds) - min(rounds) <= 1
    assert engine.reloads <= max(rounds) + 1
    assert not engine.refusals


@pytest.mark.parametrize(("depth", "ahead"), MODES)
def test_who_comes_later_verifies_with_the_others_as_soon_as_that_fits(depth: int, ahead: bool) -> None:
    """It drafts until their verify, where its own part fits in behind the start of their reload; else it begins with
    their next round."""
    engine = world(depth=depth, ahead=ahead)
    sharers(engine, 2)
    for _ in range(3):
        engine.run()
    engine.add("late", SHARER)
    engine.run_until(lambda: engine.requests["late"].rounds, 24)
    engine.reloads, before = 0, engine.requests["late"].rounds
    for _ in range(100):
        engine.run()
        assert engine.held <= engine.rings.pages.cells[0]
    assert engine.reloads <= engine.requests["late"].rounds - before + 1


@pytest.mark.parametrize("how", ["finish", "reside"])
@pytest.mark.parametrize("state", [State.DRAFTING, State.LOADING, State.VERIFYING], ids=lambda s: s.name)
@pytest.mark.parametrize("leaving", [["s0"], ["s1", "s2"], ["s0", "s1", "s2"]], ids=len)
def test_what_is_shared_stays_booked_until_the_last_one_leaves(leaving: list[str], state: State, how: str) -> None:
    engine = world(depth=2)
    names = sharers(engine, 3)
    for _ in range(20):
        engine.tick()
        if engine.state("s0") is state:
            break
        engine.take_results()
    else:
        pytest.fail("state not reached")
    for name in leaving:
        engine.remove(name, getattr(engine.planner, how))
        engine.check()
    rest = [name for name in names if name not in leaving]
    if rest:
        engine.run_until(lambda: all(engine.requests[name].rounds >= 2 for name in rest), 60)
    for name in rest:
        engine.remove(name, engine.planner.finish)
    engine.check_empty()


def test_a_party_is_as_large_as_one_verify_and_the_pages_allow() -> None:
    engine = world()
    engine.planner.verify_tokens = engine.verify_tokens = 3 * 9
    sharers(engine, 7)
    for _ in range(100):
        assert len(engine.run().verifies) <= 3
        assert engine.held <= engine.rings.pages.cells[0], "no verify is put off"
    assert min(f.rounds for f in engine.requests.values()) >= 3

    engine = world(pages=20 + 2 * 4)
    sharers(engine, 5)
    for _ in range(100):
        assert len(engine.run().verifies) <= 2
        assert engine.held <= 28
    assert min(f.rounds for f in engine.requests.values()) >= 2


def test_a_party_takes_nobody_along_past_a_request_that_has_waited_for_a_window() -> None:
    """Its own reload has room beside one round of the sharers, not beside all of them."""
    engine = world(pages=32)
    engine.add("old", Wish(span=1, link_ns=1, pages=33))  # too large, for now
    for _ in range(3 * engine.window):
        engine.run()
    engine.add("s0", SHARER)
    engine.planner.tracks["s0"].waiting_since = -1  # the very oldest
    sharers_behind = ["s1", "s2"]
    for name in sharers_behind:
        engine.add(name, SHARER)
    engine.requests["old"].wish = Wish(span=1, link_ns=1, pages=8)
    engine.tick()
    assert engine.booking("s0") is not None
    assert engine.booking("old") is not None
    s0, old = engine.booking("s0"), engine.booking("old")
    assert s0 is not None
    assert s0.shared is not None
    assert old is not None
    assert old.load_at <= s0.verify_at, "nobody behind it was served first"


@pytest.mark.parametrize(("depth", "ahead"), MODES)
def test_no_request_waits_for_ever(depth: int, ahead: bool) -> None:
    """Sharers of two prefixes, and others, on a link that is too slow for all."""
    engine = Engine(Staggered(), 32, 6, 64, Limits(100, 60), depth=depth, named=not ahead, ahead=ahead)
    for i in range(30):
        prefix = (Prefix("a", 200, 20), Prefix("b", 500, 30), None)[i % 3]
        span = (3, 6, 12)[i % 3]
        engine.add(f"r{i}", Wish(span, 100, 20 + 10 * (i % 3) + i % 8, 1 + i % 20, prefix))
    last, waits = dict.fromkeys(engine.requests, 0), Counter[str]()
    for turn in range(1200):
        for name, _ in engine.run().verifies:
            waits[name] = max(waits[name], engine.rings.now - last[name])
            last[name] = engine.rings.now
        if turn % 20 == 0:
            engine.check()
    assert max(waits[name] for name in engine.requests) <= 10 * engine.window
    assert set(waits) == set(engine.requests)


@given(st.data())
def test_a_joint_booking_is_the_prefix_once_and_each_ones_own_part(data: st.DataObject) -> None:
    limits, rings = Limits(10, 60), Rings(24)
    prefix = Prefix("k", data.draw(st.integers(0, 40)), data.draw(st.integers(0, 20)))
    demands = []
    for _ in range(data.draw(st.integers(1, 5))):
        link_ns = prefix.link_ns + data.draw(st.integers(0, 15))
        pages = prefix.pages + data.draw(st.integers(0, 10))
        demands.append(
            Demand(data.draw(st.integers(1, 20)), max(1, -(-link_ns // 10)), link_ns, pages, 1, prefix=prefix)
        )
    for _ in range(data.draw(st.integers(0, 6))):  # something is booked already
        lead(rings, Staggered(), [Demand(data.draw(st.integers(1, 20)), 2, 17, 5, 1)], limits)
    before = sum(rings.link.cells)
    booked = lead(rings, Staggered(), demands, limits)
    more = [join(rings, booked[0].shared, d, limits) for d in demands[len(booked) :]] if booked else []
    bookings = booked + [b for b in more if b is not None]
    inside = demands[: len(booked)] + [d for d, b in zip(demands[len(booked) :], more, strict=False) if b is not None]
    if bookings:
        beside = sum(d.link_ns - prefix.link_ns for d in inside)
        assert sum(rings.link.cells) - before == prefix.link_ns + beside
        assert len({b.verify_at for b in bookings}) == 1
        assert [b.pages for b in bookings] == [d.pages - prefix.pages for d in inside]
        assert bookings[0].shared is not None
        assert bookings[0].shared.users == len(bookings)
        assert min(b.load_at for b in bookings) >= bookings[0].shared.booking.load_at
    assert max(rings.link.cells) <= limits.link_ns
    assert max(rings.pages.cells) <= limits.pages
    for booking in data.draw(st.permutations(bookings)):
        rings.cancel(booking)
    assert sum(rings.link.cells) == before
