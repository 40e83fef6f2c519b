"""The engine around a planner under test: a finite page pool, steps in flight, results that come late."""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import pytest

from scheduler.admission import Demand, Limits, LockStep, Policy, Prefix, Staggered
from scheduler.lifecycle import State
from scheduler.planner import Planner, Tick
from scheduler.rings import Booking, Rings

DRAFTING = (State.DRAFTING, State.LOADING)


@dataclass(frozen=True)
class Wish:
    """What a request asks for in its next round; ``link_ns`` of link time in each of ``span`` iterations. ``prefix`` is
    what of it others with the same key need, too."""

    span: int = 1
    link_ns: int = 1
    pages: int = 1
    limit: int = 50
    prefix: Prefix | None = None


@dataclass
class Fake:
    """The engine's own books about one request, kept apart from the planner's."""

    wish: Wish
    held: int = 0  # transient pages
    shares: Prefix | None = None  # of these, pages that others may hold, too
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
        assert self.now <= booking.load_at < booking.verify_at
        assert len(booking.link) == booking.verify_at - booking.load_at, "the reload is over when its verify begins"
        if self._key(booking) in self._returned:
            return booking  # an older promise is renewed, made under the limits of its time
        assert self.pages.peak(booking.load_at, booking.free_after) <= self.limits.pages
        if not self.link_may_overflow:
            held = zip(self.link.cells[booking.load_at - self.now :], booking.link, strict=False)
            assert all(cell <= self.limits.link_ns for cell, amount in held if amount)
        return booking

    def cancel(self, booking: Booking) -> None:
        super().cancel(booking)
        self.cancelled[id(booking)] += 1
        self.live = [b for b in self.live if b is not booking]
        self._returned.append(self._key(booking))

    @staticmethod
    def _key(booking: Booking) -> tuple[int, ...]:
        return booking.load_at, booking.verify_at, booking.free_after, booking.pages, *booking.link


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
    aim: int = 4
    verify_tokens: int = 1000
    limits: Limits = field(default_factory=lambda: Limits(10, 100))
    depth: int = 1
    lent: int = 0  # pages of the pool that are away for other uses
    named: bool = True  # a verify row names its drafts, so all of them must be known
    ahead: bool = False  # a round may begin before the last one's result is known

    def __post_init__(self) -> None:
        self.pool = self.limits.pages
        self.planner = Planner(self.window, self.policy, self.verify_tokens)
        self.rings = SpyRings(self.window, self.limits, isinstance(self.policy, LockStep))
        self.planner.rings = self.rings
        self.requests: dict[str, Fake] = {}
        self.in_flight: deque[Step] = deque()
        self.refusals = self.reloads = 0

    # -- what the planner asks

    def draft_length(self, request_id: str) -> int:
        return self.aim

    def draft_limit(self, request_id: str) -> int:
        return self.requests[request_id].wish.limit

    def demand(self, request_id: str, anchor: int) -> Demand:
        wish = self.requests[request_id].wish
        link_ns = wish.span * wish.link_ns
        return Demand(anchor, wish.span, link_ns, wish.pages, self.depth - 1, self.named, wish.prefix)

    def drafts_ahead(self, request_id: str) -> bool:
        return self.ahead and self.draft_limit(request_id) > 0

    def take_pages(self, request_id: str) -> bool:
        fake = self.requests[request_id]
        assert fake.held == 0, "transient pages are taken once per round"
        prefix = fake.wish.prefix
        here = prefix is not None and prefix.key in self.copies
        if fake.wish.pages - (prefix.pages if here and prefix else 0) > self.free:
            self.refusals += 1
            return False
        fake.held, fake.shares = fake.wish.pages, prefix
        self.reloads += not here
        return True

    @property
    def copies(self) -> dict[Hashable, int]:
        """Pages of each prefix that is on the device."""
        return {f.shares.key: f.shares.pages for f in self.requests.values() if f.held and f.shares}

    @property
    def held(self) -> int:
        own = sum(f.held - (f.shares.pages if f.shares else 0) for f in self.requests.values() if f.held)
        return own + sum(self.copies.values())

    @property
    def free(self) -> int:
        return self.pool - self.lent - self.held

    # -- what happens to requests

    def state(self, request_id: str) -> State:
        return self.planner.tracks[request_id].state

    def booking(self, request_id: str) -> Booking | None:
        round_ = self.planner.tracks[request_id].round
        return round_.booking if round_ is not None else None

    def add(self, request_id: str, wish: Wish, offloaded: bool = True, certified: bool = False) -> None:
        self.requests[request_id] = Fake(wish)
        self.planner.demote(request_id)
        if offloaded:
            self.offloaded(request_id, certified)

    def offloaded(self, request_id: str, certified: bool = False) -> None:
        self.requests[request_id].held = 0
        self.planner.demoted(request_id, 0, certified)

    def remove(self, request_id: str, how: Callable[[str], None]) -> None:
        """``how`` is the planner's ``finish`` or ``reside``."""
        how(request_id)
        del self.requests[request_id]

    # -- the loop

    def tick(self) -> Tick:
        """Plan one step and check everything a step promises."""
        planner, before = self.planner, {i: t.state for i, t in self.planner.tracks.items()}
        refusals = self.refusals
        rounds = {i: t.round for i, t in planner.tracks.items()}
        self.rings.limits = self.limits
        out = planner.tick(self, self.limits)
        rows = out.drafts + [i for i, _ in out.verifies]
        assert len(set(rows)) == len(rows), "one row per request and iteration"
        assert len(set(out.loads)) == len(out.loads)
        for request_id, track in planner.tracks.items():
            if track.round is not None and track.round is not rounds[request_id]:
                assert (before[request_id], track.state) in (
                    (State.WAITING, State.DRAFTING), (State.WAITING, State.LOADING), (State.VERIFYING,) * 2,
                )  # fmt: skip
                self.requests[request_id].begin_round()
                booking, limit = track.round.booking, self.draft_limit(request_id)
                shared = booking.shared if booking is not None else None
                most = self.verify_tokens // shared.users - 1 if shared and shared.users > 1 else limit
                assert track.round.limit <= limit
                if refusals == self.refusals:  # else the reload may have had more users when the round began
                    assert track.round.limit >= min(limit, most)
        for request_id in out.loads:
            fake = self.requests[request_id]
            assert before[request_id] in (State.WAITING, State.DRAFTING)
            assert fake.held == fake.wish.pages
            fake.loaded = True
        for request_id in out.drafts:
            self.requests[request_id].issued += 1
            assert self.state(request_id) in DRAFTING or self.ahead
            assert self.requests[request_id].issued <= self.draft_limit(request_id)
        for request_id, drafts in out.verifies:
            fake, booking = self.requests[request_id], planner.tracks[request_id].verifying
            assert self.state(request_id) is State.VERIFYING
            assert drafts == fake.issued, "a verify carries exactly the drafts issued"
            assert fake.known == fake.issued or not self.named, "a verify row must name its drafts"
            assert fake.loaded
            assert booking is not None
            assert booking.verify_at <= planner.rings.now
        tokens = [1 + n for _, n in out.verifies]
        assert sum(tokens) <= self.verify_tokens or len(tokens) == 1
        for request_id, fake in self.requests.items():
            booking = self.booking(request_id)
            if self.state(request_id) is State.LOADING and booking and booking.verify_at <= planner.rings.now:
                idle = (fake.issued == fake.known or not self.named) and request_id not in rows
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
        self.planner.verified(request_id, 0, self.draft_limit(request_id))

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
            loads = [b for b in rings.live if b.load_at <= now < b.verify_at]
            assert rings.link.cells[i] == sum(b.link[now - b.load_at] for b in loads)
            assert rings.pages.cells[i] == sum(b.pages for b in rings.live if b.load_at <= now <= b.free_after)
        bookings = [b for t in tracks.values() for b in t.bookings]
        shared = {id(b.shared): b.shared for b in bookings if b.shared is not None}
        assert {i: s.users for i, s in shared.items()} == Counter(id(b.shared) for b in bookings if b.shared)
        assert all(b.verify_at == b.shared.booking.verify_at for b in bookings if b.shared), "they verify together"
        owned = {id(b) for b in [*bookings, *(s.booking for s in shared.values())]}
        assert owned == {id(b) for b in rings.live}, "every booking belongs to a round"
        assert rings.booked - rings.cancelled == Counter(owned), "every other booking was released once"
        assert 0 <= self.held <= self.pool
        assert set(tracks) == set(self.requests)
        for request_id, fake in self.requests.items():
            state, round_ = self.state(request_id), tracks[request_id].round
            assert (round_ is not None) == (state in DRAFTING) or (self.ahead and state is State.VERIFYING)
            assert (fake.held > 0) == (state in (State.LOADING, State.VERIFYING)) or state is State.DEMOTING
            if round_ is not None:
                assert (round_.issued, round_.known) == (fake.issued, fake.known)

    def check_empty(self) -> None:
        """After the last request has gone nothing may be left behind."""
        assert not self.planner.tracks
        assert self.rings.link.cells == self.rings.pages.cells == [0] * self.window
        assert self.rings.booked == self.rings.cancelled, "every booking was released once"
