"""The planner against a model of the engine around it: a finite page pool, steps in flight, results that come late."""

import copy
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.admission import Demand, Limits, LockStep, Policy, Staggered, book
from scheduler.lifecycle import State, TransitionError
from scheduler.planner import Planner, Tick
from scheduler.rings import Booking, Rings

DRAFTING = (State.DRAFTING, State.LOADING)


@dataclass(frozen=True)
class Wish:
    """What a request asks for in its next round."""

    span: int = 1
    link_ns: int = 1
    pages: int = 1
    limit: int = 50


@dataclass
class Fake:
    """The engine's own books about one request, kept apart from the planner's."""

    wish: Wish
    held: int = 0  # transient pages
    issued: int = 0
    known: int = 0
    loaded: bool = False
    rounds: int = 0

    def begin_round(self) -> None:
        self.issued, self.known, self.loaded = 0, 0, False


class SpyRings(Rings):
    """Remembers every booking, and checks the limits in force at the moment it is made."""

    def __init__(self, window: int, limits: Limits, link_may_overflow: bool) -> None:
        super().__init__(window)
        self.limits, self.link_may_overflow = limits, link_may_overflow
        self.live: list[Booking] = []
        self.booked, self.cancelled = Counter[int](), Counter[int]()
        self._objects: list[Booking] = []  # they are counted by identity, so none may be freed
        self._returned: list[tuple[int, ...]] = []  # given back in this iteration

    def advance(self) -> None:
        super().advance()
        self._returned.clear()

    def book(self, booking: Booking) -> Booking:
        super().book(booking)
        self.booked[id(booking)] += 1
        self.live.append(booking)
        self._objects.append(booking)
        assert booking.load_at > self.now, "the current iteration is already being planned"
        if self._key(booking) in self._returned:
            return booking  # an older promise is renewed, made under the limits of its time
        assert self.pages.peak(booking.load_at, booking.free_after) <= self.limits.pages
        if not self.link_may_overflow:
            assert self.link.peak(booking.load_at, booking.verify_at) <= self.limits.link_ns
        return booking

    def cancel(self, booking: Booking) -> None:
        super().cancel(booking)
        self.cancelled[id(booking)] += 1
        self.live = [b for b in self.live if b is not booking]
        self._returned.append(self._key(booking))

    @staticmethod
    def _key(booking: Booking) -> tuple[int, ...]:
        return booking.load_at, booking.verify_at, booking.free_after, booking.link_ns, booking.pages


@dataclass
class Step:
    """A tick in flight: whose rows it holds, by object, so that results of departed requests are dropped."""

    drafts: list[tuple[str, Fake]]
    verifies: list[tuple[str, Fake, int]]


@dataclass
class Engine:
    """Drives a planner as vLLM's loop does, and is the ``Host`` it asks. ``depth`` steps run at a time: with two,
    a step is planned before the result of the one before it is known."""

    policy: Policy = field(default_factory=Staggered)
    window: int = 16
    draft_length: int = 4
    verify_tokens: int = 1000
    limits: Limits = field(default_factory=lambda: Limits(10, 100))
    depth: int = 1
    lent: int = 0  # pages of the pool that are away for other uses

    def __post_init__(self) -> None:
        self.pool = self.limits.pages
        self.planner = Planner(self.window, self.policy, self.draft_length, self.verify_tokens)
        self.rings = SpyRings(self.window, self.limits, isinstance(self.policy, LockStep))
        self.planner.rings = self.rings
        self.requests: dict[str, Fake] = {}
        self.in_flight: deque[Step] = deque()
        self.refusals = 0

    # -- what the planner asks

    def draft_limit(self, request_id: str) -> int:
        return self.requests[request_id].wish.limit

    def demand(self, request_id: str, anchor: int) -> Demand:
        wish = self.requests[request_id].wish
        return Demand(anchor, wish.span, wish.link_ns, wish.pages, self.depth - 1)

    def take_pages(self, request_id: str) -> bool:
        fake = self.requests[request_id]
        assert fake.held == 0, "transient pages are taken once per round"
        if fake.wish.pages > self.free:
            self.refusals += 1
            return False
        fake.held = fake.wish.pages
        return True

    @property
    def held(self) -> int:
        return sum(f.held for f in self.requests.values())

    @property
    def free(self) -> int:
        return self.pool - self.lent - self.held

    # -- what happens to requests

    def state(self, request_id: str) -> State:
        return self.planner.tracks[request_id].state

    def booking(self, request_id: str) -> Booking | None:
        round_ = self.planner.tracks[request_id].round
        return round_.booking if round_ is not None else None

    def add(self, request_id: str, wish: Wish, offloaded: bool = True) -> None:
        self.requests[request_id] = Fake(wish)
        self.planner.demote(request_id)
        if offloaded:
            self.offloaded(request_id)

    def offloaded(self, request_id: str) -> None:
        self.requests[request_id].held = 0
        self.planner.demoted(request_id, 0)

    def remove(self, request_id: str, how: Callable[[str], None]) -> None:
        """``how`` is the planner's ``finish`` or ``reside``."""
        how(request_id)
        del self.requests[request_id]

    # -- the loop

    def tick(self) -> Tick:
        """Plan one step and check everything a step promises."""
        planner, before = self.planner, {i: t.state for i, t in self.planner.tracks.items()}
        self.rings.limits = self.limits
        out = planner.tick(self, self.limits)
        rows = out.drafts + [i for i, _ in out.verifies]
        assert len(set(rows)) == len(rows), "one row per request and iteration"
        assert len(set(out.loads)) == len(out.loads)
        for request_id, track in planner.tracks.items():
            if before[request_id] is State.WAITING and track.state in DRAFTING:
                self.requests[request_id].begin_round()
                assert track.round is not None
                assert track.round.limit == self.draft_limit(request_id)
        for request_id in out.loads:
            fake = self.requests[request_id]
            assert before[request_id] is State.DRAFTING
            assert fake.held == fake.wish.pages
            fake.loaded = True
        for request_id in out.drafts:
            self.requests[request_id].issued += 1
            assert self.state(request_id) in DRAFTING
            assert self.requests[request_id].issued <= self.draft_limit(request_id)
        for request_id, drafts in out.verifies:
            fake, booking = self.requests[request_id], self.booking(request_id)
            assert self.state(request_id) is State.VERIFYING
            assert drafts == fake.issued == fake.known, "a verify carries exactly the drafts issued and known"
            assert fake.loaded
            assert booking is not None
            assert booking.verify_at <= planner.rings.now
        tokens = [1 + n for _, n in out.verifies]
        assert sum(tokens) <= self.verify_tokens or len(tokens) == 1
        for request_id, fake in self.requests.items():
            booking = self.booking(request_id)
            if self.state(request_id) is State.LOADING and booking and booking.verify_at <= planner.rings.now:
                idle = fake.issued == fake.known and request_id not in rows
                assert not idle or sum(tokens) + 1 + fake.issued > self.verify_tokens, "due, ready and not verified"
        self.in_flight.append(
            Step([(i, self.requests[i]) for i in out.drafts], [(i, self.requests[i], n) for i, n in out.verifies])
        )
        return out

    def results(self) -> Iterator[tuple[str, int | None]]:
        """The rows of the oldest step whose requests are still there: (request, None for a draft row)."""
        step = self.in_flight.popleft()
        yield from ((i, None) for i, fake in step.drafts if self.requests.get(i) is fake)
        yield from ((i, n) for i, fake, n in step.verifies if self.requests.get(i) is fake)

    def drafted(self, request_id: str, last: bool = False) -> None:
        self.requests[request_id].known += 1
        self.planner.drafted(request_id, last)

    def verified(self, request_id: str) -> None:
        fake = self.requests[request_id]
        fake.held = 0
        fake.rounds += 1
        self.planner.verified(request_id, 0)

    def run(self, last: Callable[[str], bool] = lambda _: False) -> Tick:
        """One turn of the loop in which every row succeeds; ``last`` says whose draft was an end token."""
        out = self.tick()
        self.take_results(last)
        return out

    def take_results(self, last: Callable[[str], bool] = lambda _: False) -> None:
        while len(self.in_flight) >= self.depth:
            for request_id, drafts in self.results():
                if drafts is None:
                    self.drafted(request_id, last(request_id))
                else:
                    self.verified(request_id)

    def run_until(
        self, reached: Callable[[], object], within: int, last: Callable[[str], bool] = lambda _: False
    ) -> None:
        """Turns of the loop, and a failure when ``within`` of them are not enough."""
        for _ in range(within):
            self.run(last)
            if reached():
                return
        pytest.fail(f"not reached within {within} iterations")

    # -- what must hold at any time

    def check(self) -> None:
        rings, tracks = self.rings, self.planner.tracks
        for i in range(self.window):
            now = rings.now + i
            assert rings.link.cells[i] == sum(b.link_ns for b in rings.live if b.load_at <= now <= b.verify_at)
            assert rings.pages.cells[i] == sum(b.pages for b in rings.live if b.load_at <= now <= b.free_after)
        owned = {id(t.round.booking) for t in tracks.values() if t.round is not None and t.round.booking is not None}
        assert owned == {id(b) for b in rings.live}, "every booking belongs to a round"
        assert rings.booked - rings.cancelled == Counter(owned), "every other booking was released once"
        assert 0 <= self.held <= self.pool
        assert set(tracks) == set(self.requests)
        for request_id, fake in self.requests.items():
            state, round_ = self.state(request_id), tracks[request_id].round
            assert (round_ is not None) == (state in (*DRAFTING, State.VERIFYING))
            assert (fake.held > 0) == (state in (State.LOADING, State.VERIFYING)) or state is State.DEMOTING
            if round_ is not None:
                assert (round_.issued, round_.known) == (fake.issued, fake.known)

    def check_empty(self) -> None:
        """After the last request has gone nothing may be left behind."""
        assert not self.planner.tracks
        assert self.rings.link.cells == self.rings.pages.cells == [0] * self.window
        assert self.rings.booked == self.rings.cancelled, "every booking was released once"


# -- any order of events -----------------------------------------------------------------------------------

# The details of a turn come from a generator with a drawn seed: many small draws would make the machine slow.
chances = st.randoms(use_true_random=True)
LINK, POOL = 20, 12


class PlannerMachine(RuleBasedStateMachine):
    """Requests come, draft, fail, end and are aborted in every state, in any order. Limits stay."""

    limits_vary = False

    @initialize(
        lock_step=st.booleans(),
        depth=st.integers(1, 2),
        window=st.integers(4, 14),
        draft_length=st.integers(1, 8),
        verify_tokens=st.integers(2, 24),
    )
    def start(self, lock_step: bool, depth: int, window: int, draft_length: int, verify_tokens: int) -> None:
        policy = LockStep(min(draft_length, window - 3) + 1) if lock_step else Staggered()
        self.engine = Engine(policy, window, draft_length, verify_tokens, Limits(LINK, POOL), depth)
        self.added = 0

    def _wish(self, chance: Random) -> Wish:
        """Often small, so that several rounds run at a time; sometimes all there is."""
        longest, room = self.engine.window - self.engine.depth, self.engine.window - 1
        span = min(chance.randint(1, longest), chance.randint(1, longest))
        link_ns, pages = chance.randint(0, LINK), min(chance.randint(1, POOL), chance.randint(1, POOL))
        return Wish(span, link_ns, pages, chance.randint(0, room))

    def _add(self, chance: Random) -> None:
        self.added += 1
        self.engine.add(f"r{self.added}", self._wish(chance), offloaded=False)

    @rule(chance=chances, count=st.integers(1, 4))
    def add(self, chance: Random, count: int) -> None:
        for _ in range(count if len(self.engine.requests) < 12 else 0):
            self._add(chance)

    @rule(chance=chances, turns=st.integers(1, 20))
    def run(self, chance: Random, turns: int) -> None:
        """As many turns of the loop: plan a step, and take in the results that are due by then."""
        for _ in range(turns):
            if len(self.engine.requests) < 3:
                self._add(chance)
            for name in self._in(State.DEMOTING):
                if chance.random() < 0.6:
                    self.engine.requests[name].wish = self._wish(chance)
                    self.engine.offloaded(name)
            self.engine.tick()
            self.engine.check()
            while len(self.engine.in_flight) >= self.engine.depth:
                self._take_results(chance)
                self.engine.check()

    @precondition(lambda self: self.engine.in_flight)
    @rule(chance=chances)
    def catch_up(self, chance: Random) -> None:
        """The result of the step in flight is known before the next one is planned."""
        self._take_results(chance)

    def _in(self, state: State) -> list[str]:
        return [i for i, t in self.engine.planner.tracks.items() if t.state is state]

    def _take_results(self, chance: Random) -> None:
        engine = self.engine
        for name, drafts in list(engine.results()):
            if drafts is None:
                engine.drafted(name, last=chance.random() < 0.1)
                continue
            outcome = chance.choices(["wait", "compress anew", "fail", "end"], [6, 2, 1, 1])[0]
            if outcome == "wait":  # any number of drafts was accepted, so the next round asks for anything
                engine.verified(name)
                engine.requests[name].wish = self._wish(chance)
            elif outcome == "compress anew":
                engine.planner.demote(name)
            else:
                engine.remove(name, engine.planner.reside if outcome == "fail" else engine.planner.finish)

    @rule(chance=chances, abort=st.booleans())
    def leave(self, chance: Random, abort: bool) -> None:
        """An abort or a failure, in whatever state the request is."""
        if states := sorted({t.state.name for t in self.engine.planner.tracks.values()}):
            names = self._in(State[chance.choice(states)])
            self.engine.remove(
                chance.choice(names), self.engine.planner.finish if abort else self.engine.planner.reside
            )

    @rule(pages=st.sampled_from([0, 0, POOL // 3, POOL]))
    def lend(self, pages: int) -> None:
        """Plain rows take pages that were promised to rounds."""
        self.engine.lent = pages

    @precondition(lambda self: self.limits_vary)
    @rule(link_ns=st.integers(1, 2 * LINK), pages=st.integers(-2, POOL))
    def change_limits(self, link_ns: int, pages: int) -> None:
        self.engine.limits = Limits(link_ns, pages)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check()
        if not self.limits_vary:
            assert max(self.engine.rings.pages.cells) <= POOL
            assert max(self.engine.rings.link.cells) <= LINK or isinstance(self.engine.policy, LockStep)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            for name in list(self.engine.requests):
                self.engine.remove(name, self.engine.planner.finish)
            self.engine.check_empty()


class VaryingLimitsMachine(PlannerMachine):
    """The same while both limits change between any two iterations, as measured rates and free memory do."""

    limits_vary = True


TestPlanner = PlannerMachine.TestCase
TestPlanner.settings = settings(max_examples=200, stateful_step_count=25, deadline=None)
TestPlannerWithVaryingLimits = VaryingLimitsMachine.TestCase
TestPlannerWithVaryingLimits.settings = settings(max_examples=200, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("how", ["finish", "reside"])
@pytest.mark.parametrize("state", list(State)[1:-1], ids=lambda s: s.name)
def test_a_request_can_leave_in_every_state(state: State, how: str, depth: int) -> None:
    """Its booking is given back, results that arrive afterwards are dropped, and the others go on."""
    engine = Engine(window=12, depth=depth)
    engine.add("a", Wish(span=2, pages=30), offloaded=state is not State.DEMOTING)
    engine.add("other", Wish(span=2, pages=30))
    for _ in range(20):
        if engine.state("a") is state:
            break
        engine.tick()
        if engine.state("a") is not state:
            engine.take_results()
    assert engine.state("a") is state
    engine.remove("a", getattr(engine.planner, how))
    engine.check()
    engine.run_until(lambda: engine.requests["other"].rounds >= 2, 40)
    engine.check()
    engine.remove("other", engine.planner.finish)
    engine.check_empty()


# -- one round ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("span", [1, 3, 6])
def test_a_lone_round_loads_and_verifies_in_the_iterations_it_booked(span: int, depth: int) -> None:
    """Run-ahead must not make it late: pages are promised to others from the iteration after ``free_after`` on."""
    engine = Engine(draft_length=8, depth=depth)
    engine.add("a", Wish(span=span))
    engine.run()
    booking = engine.booking("a")
    assert booking is not None
    seen: dict[str, int] = {}
    for _ in range(booking.verify_at):
        out = engine.run()
        if out.loads:
            seen.setdefault("load", engine.rings.now)
        if out.verifies:
            seen.setdefault("verify", engine.rings.now)
    assert seen == {"load": booking.load_at, "verify": booking.verify_at}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", [Staggered(), LockStep(9)], ids=["staggered", "lock-step"])
def test_pages_are_held_only_while_they_are_booked(policy: Policy, depth: int) -> None:
    """While limits stay and nothing fails, a promised page is there: that is what the ring of pages is for."""
    engine = Engine(policy, window=24, draft_length=8, limits=Limits(10, 30), depth=depth)
    for i in range(12):
        engine.add(f"r{i}", Wish(span=1 + i % 4, link_ns=2 + i % 3, pages=4 + i % 5))
    for _ in range(200):
        engine.run()
        assert engine.held <= engine.rings.pages.cells[0]
    assert engine.refusals == 0
    assert all(f.rounds for f in engine.requests.values())


def test_a_lone_request_drafts_in_every_iteration_before_its_verify() -> None:
    engine = Engine(draft_length=6)
    engine.add("a", Wish(span=3))
    ticks = [engine.run() for _ in range(7)]
    assert [t.drafts for t in ticks] == [["a"]] * 6 + [[]]
    assert [t.loads for t in ticks] == [[]] * 4 + [["a"]] + [[]] * 2
    assert [t.verifies for t in ticks] == [[]] * 6 + [[("a", 6)]]
    assert engine.state("a") is State.WAITING
    assert engine.run().drafts == ["a"], "the next round starts at once"


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
    engine = Engine(draft_length=12, depth=depth)
    engine.add("a", Wish(span=2))
    engine.run_until(lambda: engine.requests["a"].known == 3, 9, last=lambda _: engine.requests["a"].known == 2)
    issued = engine.requests["a"].issued
    ticks = [engine.run() for _ in range(3)]
    assert [t.drafts for t in ticks] == [[]] * 3
    assert [t.verifies for t in ticks] == [[], [], [("a", issued)]], "two iterations for the reload, the third verifies"


def blocked(wish: Wish) -> Engine:
    """Request "a" is booked behind "wall", which takes the whole link for nine iterations."""
    engine = Engine(draft_length=9)
    engine.add("wall", Wish(span=9, link_ns=10))
    engine.run()
    engine.add("a", wish)
    engine.run()
    booking = engine.booking("a")
    assert booking is not None
    assert booking.load_at > 10
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
    engine = Engine(draft_length=12)
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
    engine = Engine(draft_length=4)
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


# -- the cap on verify tokens ---------------------------------------------------------------------------------


def test_verifies_above_the_cap_wait_and_the_earliest_goes_first() -> None:
    engine = Engine(draft_length=4, verify_tokens=11)
    for name in "abcd":
        engine.add(name, Wish())
    for _ in range(4):
        engine.run()
    assert engine.run().verifies == [("a", 4), ("b", 4)]
    assert engine.run().verifies == [("c", 4), ("d", 4)]


def test_a_verify_that_was_put_off_goes_before_one_that_is_due_now() -> None:
    engine = Engine(draft_length=4, verify_tokens=5)
    for name, span in (("a", 6), ("b", 5), ("c", 5)):
        engine.add(name, Wish(span, limit=4))
    verifies = [engine.run().verifies for _ in range(8)]
    assert verifies[5:] == [[("b", 4)], [("c", 4)], [("a", 4)]]


def test_a_verify_larger_than_the_cap_goes_alone() -> None:
    engine = Engine(draft_length=6, verify_tokens=4)
    for name in "ab":
        engine.add(name, Wish())
    for _ in range(6):
        engine.run()
    assert engine.run().verifies == [("a", 6)]
    assert engine.run().verifies == [("b", 6)]


# -- who is admitted, and when --------------------------------------------------------------------------------


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
    anchors = [min(engine.draft_length, w.limit) for w in wishes]
    expected = [
        book(rings, policy, Demand(x, w.span, w.link_ns, w.pages), engine.limits)
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


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", [Staggered(), LockStep(7)], ids=["staggered", "lock-step"])
def test_no_request_waits_for_ever(policy: Policy, depth: int) -> None:
    """30 requests of mixed sizes, each of which fits alone, and small ones that keep coming. Once the oldest has
    waited for a window, the rings empty within another one; a third of the requests needs most of a ring alone."""
    window, limits = 32, Limits(100, 60)
    engine = Engine(policy, window, draft_length=6, verify_tokens=64, limits=limits, depth=depth)
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


# -- calls that make no sense -----------------------------------------------------------------------------------


def test_a_result_for_a_request_that_is_not_verifying_is_an_error() -> None:
    engine = Engine()
    engine.add("a", Wish())
    with pytest.raises(TransitionError, match="WAITING to WAITING"):
        engine.planner.verified("a", 5)
    engine.run()
    with pytest.raises(TransitionError, match="DRAFTING to DEMOTING"):
        engine.planner.demote("a")


def test_a_draft_result_without_a_round_is_dropped() -> None:
    engine = Engine()
    engine.add("a", Wish())
    engine.planner.drafted("a", last=True)
    assert engine.run().drafts == ["a"], "the next round has not ended"
