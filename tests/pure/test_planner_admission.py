"""Whom the planner admits to its next round, in which order, and that nobody waits for ever."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.admission import Demand, Limits, LockStep, Policy, Staggered, book
from scheduler.rings import Rings
from tests.pure.planner_world import Engine, Wish


def test_waiting_requests_are_admitted_oldest_first() -> None:
    engine = Engine(limits=Limits(10, 3))
    engine.add("first", Wish(span=12, pages=3))
    engine.run()
    for name in ("second", "third"):
        engine.add(name, Wish(span=12, pages=3))
        engine.run()
    order: list[str] = []
    for _ in range(3 * engine.window):
        order += [i for i, _ in engine.run().verifies]
    assert order[:3] == ["first", "second", "third"]


# Few different values, so that one demand is often larger than another in one respect and smaller in none.
demands = st.builds(
    Wish, st.sampled_from([1, 2, 5, 12]), st.sampled_from([0, 4, 10]), st.sampled_from([1, 5, 12]), st.integers(0, 15)
)


@pytest.mark.parametrize("policy", [Staggered(), LockStep(5)], ids=["staggered", "lock-step"])
@given(wishes=st.lists(demands, max_size=14))
@settings(max_examples=200)
def test_admission_equals_asking_for_every_request_in_turn(policy: Policy, wishes: list[Wish]) -> None:
    """Demands that are skipped because a smaller one was just refused would have been refused as well."""
    engine = Engine(policy, limits=Limits(10, 12))
    for i, wish in enumerate(wishes):
        engine.add(f"r{i}", wish)
    rings: Rings = copy.deepcopy(engine.rings)
    rings.advance()
    anchors = [min(engine.aim, w.limit) for w in wishes]
    expected = [
        book(rings, policy, Demand(x, w.span, w.span * w.link_ns, w.pages), engine.limits)
        for x, w in zip(anchors, wishes, strict=True)
    ]
    engine.tick()
    assert [engine.booking(f"r{i}") for i in range(len(wishes))] == expected


def crowd(engine: Engine, size: int, wish: Wish) -> None:
    for i in range(size):
        engine.add(f"small{i}", wish)


def test_nobody_overtakes_a_request_that_has_waited_for_a_whole_window() -> None:
    """Small demands fill every iteration as it comes into the window; a long one would never find two in a row."""
    engine = Engine()
    crowd(engine, 24, Wish(link_ns=6))
    for _ in range(3 * engine.window):
        engine.run()
    engine.add("long", Wish(span=5, link_ns=6))
    engine.run_until(lambda: engine.requests["long"].rounds, 4 * engine.window)


def test_a_round_that_lost_its_pages_is_not_overtaken_for_ever() -> None:
    """It has drafted already, so it has waited longer than any request that is admitted now."""
    engine = Engine()
    engine.add("long", Wish(span=2, link_ns=6, pages=10))
    engine.run()
    crowd(engine, 24, Wish(link_ns=6))
    engine.lent = 95
    engine.run_until(lambda: engine.refusals, engine.window)
    engine.lent = 0
    engine.run_until(lambda: engine.requests["long"].rounds, 10 * engine.window)


def test_a_request_that_cannot_fit_holds_up_nobody() -> None:
    """Its pages exceed the limit by itself, so waiting for others to leave does not help it."""
    engine = Engine()
    engine.add("huge", Wish(pages=101))
    engine.add("small", Wish())
    for _ in range(3 * engine.window):
        engine.run()
    before = engine.requests["small"].rounds
    for _ in range(3 * engine.window):
        engine.run()
    assert engine.requests["small"].rounds > before


@pytest.mark.parametrize(("depth", "ahead"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("policy", [Staggered(), LockStep(7)], ids=["staggered", "lock-step"])
def test_no_request_waits_for_ever(policy: Policy, depth: int, ahead: bool) -> None:
    """30 requests of mixed sizes, each of which fits alone, and small ones that keep coming. Once the oldest has
    waited for a window, the rings empty within another one; a third of the requests needs most of a ring alone."""
    window, limits = 32, Limits(100, 60)
    engine = Engine(policy, window, aim=6, verify_tokens=64, limits=limits, depth=depth, named=not ahead, ahead=ahead)
    for i in range(30):
        span = (1, 2, 5, 12, window - depth)[i % 5]
        engine.add(f"r{i}", Wish(span, (1, 30, 60, 100)[i % 4], (1, 8, 35, 60)[i // 5 % 4], limit=1 + i % 20))
    started = dict.fromkeys(engine.requests, 0)
    waits: list[int] = []
    for turn in range(4000):
        if turn % 5 == 0 and len(engine.requests) < 40:
            name = f"new{turn}"
            engine.add(name, Wish(1, 10, 2))
            started[name] = engine.rings.now
        out = engine.run()
        for name, _ in out.verifies:
            waits.append(engine.rings.now - started[name])
            started[name] = engine.rings.now
            if name.startswith("new") and name in engine.requests and engine.requests[name].rounds >= 3:
                engine.remove(name, engine.planner.finish)
    waits += [engine.rings.now - started[name] for name in engine.requests]
    engine.check()
    assert max(waits) <= 10 * window
    assert all(f.rounds for name, f in engine.requests.items() if name.startswith("r"))


def test_the_planner_says_when_a_request_has_waited_for_a_window() -> None:
    """The engine then keeps pages for rounds that it would have kept for a new request."""
    engine = Engine(window=8, limits=Limits(10, 5))
    engine.add("a", Wish(pages=6))
    for _ in range(8):
        engine.run()
        assert not engine.planner.late
    engine.run()
    assert engine.planner.late
    engine.limits = Limits(10, 6)
    engine.pool = 6
    engine.run()
    assert not engine.planner.late, "it has a booking"
    engine.lent, engine.limits = 6, Limits(10, 5)
    engine.run_until(lambda: engine.planner.late, 30)
