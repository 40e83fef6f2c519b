"""One round of the planner from its booking to its verify, the cap on verify tokens, and calls that make no sense."""

import pytest

from scheduler.admission import Demand, Limits, LockStep, Policy, Staggered
from scheduler.lifecycle import State, TransitionError
from scheduler.planner import Planner
from tests.pure.planner_world import Engine, Wish

# -- one round ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "named"), [(1, True), (2, True), (2, False)])
@pytest.mark.parametrize("span", [1, 3, 6])
def test_a_lone_round_loads_and_verifies_in_the_iterations_it_booked(span: int, depth: int, named: bool) -> None:
    """Run-ahead must not make it late: pages are promised to others from the iteration after ``free_after`` on."""
    engine = Engine(aim=8, depth=depth, named=named)
    engine.add("a", Wish(span=span))
    engine.run()
    booking = engine.booking("a")
    assert booking is not None
    seen = {"load": booking.load_at} if engine.state("a") is State.LOADING else {}
    for _ in range(booking.verify_at):
        out = engine.run()
        if out.loads:
            seen.setdefault("load", engine.rings.now)
        if out.verifies:
            seen.setdefault("verify", engine.rings.now)
    assert seen == {"load": booking.load_at, "verify": booking.verify_at}


@pytest.mark.parametrize(("depth", "ahead"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("policy", [Staggered(), LockStep(9)], ids=["staggered", "lock-step"])
def test_pages_are_held_only_while_they_are_booked(policy: Policy, depth: int, ahead: bool) -> None:
    """While limits stay and nothing fails, a promised page is there: that is what the ring of pages is for."""
    engine = Engine(policy, window=24, aim=8, limits=Limits(10, 30), depth=depth, named=not ahead, ahead=ahead)
    for i in range(12):
        engine.add(f"r{i}", Wish(span=1 + i % 4, link_ns=2 + i % 3, pages=4 + i % 5))
    for _ in range(200):
        engine.run()
        assert engine.held <= engine.rings.pages.cells[0]
    assert engine.refusals == 0
    assert all(f.rounds for f in engine.requests.values())


def test_a_lone_request_drafts_in_every_iteration_before_its_verify() -> None:
    engine = Engine(aim=6)
    engine.add("a", Wish(span=3, link_ns=10))
    ticks = [engine.run() for _ in range(7)]
    assert [t.drafts for t in ticks] == [["a"]] * 6 + [[]]
    assert [t.loads for t in ticks] == [[]] * 3 + [["a"]] + [[]] * 3
    assert [t.verifies for t in ticks] == [[]] * 6 + [[("a", 6)]]
    assert engine.state("a") is State.WAITING
    assert engine.run().drafts == ["a"], "the next round starts at once"


def test_drafts_that_the_device_knows_need_not_be_named() -> None:
    """With two steps in flight, a verify row follows the last draft at once, or one later when it must name it."""
    for named, wanted in ((False, 6), (True, 7)):
        engine = Engine(aim=6, depth=2, named=named)
        engine.add("a", Wish(span=3))
        ticks = [engine.run() for _ in range(9)]
        assert [i for i, t in enumerate(ticks) if t.verifies == [("a", 6)]] == [wanted]


def test_the_next_round_begins_before_the_result_is_known() -> None:
    """With two steps in flight a request is then in every one of them."""
    engine = Engine(aim=6, depth=2, named=False, ahead=True)
    engine.add("a", Wish(span=3))
    for _ in range(6):
        assert engine.run().drafts == ["a"]
    assert engine.run().verifies == [("a", 6)]
    first = engine.run()
    assert (first.drafts, engine.requests["a"].rounds) == (["a"], 1)
    assert engine.state("a") is State.DRAFTING
    ticks = [engine.run() for _ in range(6)]
    assert [t.drafts for t in ticks] == [["a"]] * 5 + [[]]
    assert ticks[-1].verifies == [("a", 6)]


def test_a_round_that_began_ahead_learns_its_limit_with_the_result() -> None:
    """Before, it reckoned with all drafts accepted."""
    engine = Engine(aim=6, depth=2, named=False, ahead=True)
    engine.add("a", Wish(limit=6))
    engine.run_until(lambda: engine.state("a") is State.VERIFYING, 9)
    engine.requests["a"].wish = Wish(limit=1)
    engine.tick()
    engine.requests["a"].wish = Wish(limit=4)
    engine.take_results()
    round_ = engine.planner.tracks["a"].round
    assert round_ is not None
    assert (round_.issued, round_.limit) == (1, 4)


def test_a_request_without_room_for_drafts_verifies_its_pending_token() -> None:
    engine = Engine()
    engine.add("a", Wish(span=2, limit=0))
    ticks = [engine.run() for _ in range(3)]
    assert [t.drafts for t in ticks] == [[]] * 3
    assert ticks[2].verifies == [("a", 0)]


def test_drafting_stops_at_the_limit() -> None:
    """The reload takes longer than the drafts that are left."""
    engine = Engine()
    engine.add("a", Wish(span=9, limit=3))
    ticks = [engine.run() for _ in range(10)]
    assert sum(len(t.drafts) for t in ticks) == 3
    assert ticks[9].verifies == [("a", 3)]


@pytest.mark.parametrize("depth", [1, 2])
def test_an_end_token_stops_drafting_and_moves_the_verify_forward(depth: int) -> None:
    engine = Engine(aim=12, depth=depth)
    engine.add("a", Wish(span=2))
    engine.run_until(lambda: engine.requests["a"].known == 3, 9, last=lambda _: engine.requests["a"].known == 2)
    issued = engine.requests["a"].issued
    ticks = [engine.run() for _ in range(3)]
    assert [t.drafts for t in ticks] == [[]] * 3
    assert [t.verifies for t in ticks] == [[], [], [("a", issued)]], "two iterations for the reload, the third verifies"


def blocked(wish: Wish) -> Engine:
    """Request "a" is booked behind "wall", which takes the whole link for nine iterations."""
    engine = Engine(aim=9)
    engine.add("wall", Wish(span=9, link_ns=10))
    engine.run()
    engine.add("a", wish)
    engine.run()
    booking = engine.booking("a")
    assert booking is not None
    assert booking.load_at >= 10
    return engine


def test_a_round_that_ended_uses_room_that_was_freed_later() -> None:
    engine = blocked(Wish(link_ns=10))
    engine.run(last=lambda i: i == "a")
    engine.remove("wall", engine.planner.finish)
    engine.run()
    assert [v for v, _ in engine.run().verifies] == ["a"]


def test_a_round_at_its_limit_uses_room_that_was_freed_later() -> None:
    """It has nothing left to draft, just as one that ended."""
    engine = blocked(Wish(link_ns=10, limit=2))
    engine.run()
    assert engine.requests["a"].issued == 2
    engine.remove("wall", engine.planner.finish)
    engine.run()
    assert [v for v, _ in engine.run().verifies] == ["a"]


@pytest.mark.parametrize("limits", [Limits(10, 5), Limits(5, 100)], ids=["fewer pages", "shorter iterations"])
def test_moving_a_verify_forward_never_loses_its_place(limits: Limits) -> None:
    """Limits change in every iteration; what is booked stays booked, also for a round that looks for better."""
    engine = Engine(aim=12)
    engine.add("a", Wish(span=2, link_ns=6, pages=6))
    engine.run()
    before = engine.booking("a")
    engine.run(last=lambda _: True)
    engine.limits = limits
    engine.run()
    after = engine.booking("a")
    assert before is not None
    assert after is not None, "the round has lost its booking"
    assert after.verify_at <= before.verify_at


def test_a_round_whose_pages_are_not_there_drafts_on_and_is_booked_again() -> None:
    engine = Engine(aim=4)
    engine.add("a", Wish(span=2, pages=10))
    for _ in range(3):
        engine.run()
    engine.lent = 95
    assert engine.run().loads == []
    assert (engine.state("a"), engine.booking("a"), engine.refusals) == (State.DRAFTING, None, 1)
    assert sum(engine.rings.link.cells) == 0, "the late booking was given back"
    engine.lent = 0
    ticks = [engine.run() for _ in range(3)]
    assert engine.refusals == 1
    assert [t.verifies for t in ticks] == [[], [], [("a", 6)]]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_round_at_its_limit_verifies_soon(depth: int, limit: int) -> None:
    """A round with nothing left to draft moves to an earlier verify, and never to a later one: re-booking it in every
    iteration must not push it ahead for ever."""

    class Pages:
        def draft_limit(self, request_id: str) -> int:
            return limit

        def draft_length(self, request_id: str) -> int:
            return 25

        def demand(self, request_id: str, anchor: int) -> Demand:
            return Demand(anchor, 1, 1, 1, depth - 1)

        def drafts_ahead(self, request_id: str) -> bool:
            return False

        def take_pages(self, request_id: str) -> bool:
            return True

    planner = Planner(32, Staggered(), 64)
    planner.demote("a")
    planner.demoted("a", 100)
    in_flight: list[int] = []
    for iteration in range(32):
        out = planner.tick(Pages(), Limits(10, 10))
        if out.verifies:
            assert out.verifies == [("a", limit)]
            assert iteration <= limit + depth + 1
            return
        in_flight.append(len(out.drafts))
        if len(in_flight) == depth and in_flight.pop(0):
            planner.drafted("a", last=False)
    raise AssertionError("the round never verified")


# -- the cap on verify tokens ---------------------------------------------------------------------------------


def test_verifies_above_the_cap_wait_and_the_earliest_goes_first() -> None:
    engine = Engine(aim=4, verify_tokens=11)
    for name in "abcd":
        engine.add(name, Wish())
    for _ in range(4):
        engine.run()
    assert engine.run().verifies == [("a", 4), ("b", 4)]
    assert engine.run().verifies == [("c", 4), ("d", 4)]


def test_a_verify_that_was_put_off_goes_before_one_that_is_due_now() -> None:
    engine = Engine(aim=4, verify_tokens=5)
    for name, span in (("a", 6), ("b", 5), ("c", 5)):
        engine.add(name, Wish(span, limit=4))
    verifies = [engine.run().verifies for _ in range(8)]
    assert verifies[5:] == [[("b", 4)], [("c", 4)], [("a", 4)]]


def test_a_verify_larger_than_the_cap_goes_alone() -> None:
    engine = Engine(aim=6, verify_tokens=4)
    for name in "ab":
        engine.add(name, Wish())
    for _ in range(6):
        engine.run()
    assert engine.run().verifies == [("a", 6)]
    assert engine.run().verifies == [("b", 6)]


# -- calls that make no sense -----------------------------------------------------------------------------------


def test_a_result_for_a_request_that_is_not_verifying_is_an_error() -> None:
    engine = Engine()
    engine.add("a", Wish())
    with pytest.raises(TransitionError, match="WAITING to WAITING"):
        engine.planner.verified("a", 5, 9)
    engine.run()
    with pytest.raises(TransitionError, match="DRAFTING to DEMOTING"):
        engine.planner.demote("a")


def test_a_draft_result_without_a_round_is_dropped() -> None:
    engine = Engine()
    engine.add("a", Wish())
    engine.planner.drafted("a", last=True)
    assert engine.run().drafts == ["a"], "the next round has not ended"
