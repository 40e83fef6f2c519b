"""The round planner: which requests draft, reload and verify in this iteration.

One call of ``tick`` per iteration. It moves each request's ``Track`` and keeps both rings; what a decision
means in rows, pages and copies is the engine's business. Waiting requests are admitted oldest first, and
once the oldest has waited for a whole window nobody overtakes it, so no request starves while its reload
fits the rings at all. Requests with a common prefix are admitted together, see ``scheduler.sharing``.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from scheduler.admission import Demand, Limits, Policy
from scheduler.lifecycle import Round, State, Track
from scheduler.rings import Booking, Rings, Shared
from scheduler.sharing import Queue, Wish, join, lead

NEAR = 0.25  # of the drafts a request aims at: it waits so long for others to begin a round with them


class Host(Protocol):
    """What the planner asks its surroundings about one request."""

    def draft_length(self, request_id: str) -> int:
        """Drafts a round of this request aims at (x)."""

    def draft_limit(self, request_id: str) -> int:
        """The most drafts the next verify may carry (output left, context limit), at least 0."""

    def demand(self, request_id: str, anchor: int) -> Demand:
        """Link time and pages of the next round."""

    def drafts_ahead(self, request_id: str) -> bool:
        """Whether the next round may begin before the result of the verify row under way is known."""

    def take_pages(self, request_id: str) -> bool:
        """Take the transient pages of the round now; False when the pool has too few free ones."""


@dataclass
class Tick:
    """The decisions of one iteration."""

    drafts: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    verifies: list[tuple[str, int]] = field(default_factory=list)  # (request, drafts to verify)


class Planner:
    """Owns the tracks of all requests that are not plain vLLM rows, and their bookings."""

    def __init__(self, window: int, policy: Policy, verify_tokens: int) -> None:
        self.rings = Rings(window)
        self.policy = policy
        self.verify_tokens = verify_tokens  # cap per iteration, see performance notes in docs
        self.tracks: dict[str, Track] = {}
        self.limits: Limits | None = None  # of the last iteration
        self._shared: dict[Hashable, Shared] = {}  # the latest reload of each prefix, while a round uses it

    @property
    def late(self) -> bool:
        """Some request has waited for pages or link time for a whole window."""
        unbooked = (t for t in self.tracks.values() if t.state is State.WAITING or (t.round and not t.round.booking))
        return any(map(self._overdue, unbooked))

    # -- transitions that come from outside ------------------------------------------------------

    def demote(self, request_id: str) -> None:
        """The request's KV is being moved: RESIDENT (or, to compress anew, VERIFYING) -> DEMOTING."""
        track = self.tracks.setdefault(request_id, Track(request_id))
        self._leave(track, track.demote)

    def demoted(self, request_id: str, context: int, certified: bool = False) -> None:
        """The request's KV has left. A ``certified`` one goes on without rounds: nothing of it is to be planned."""
        track = self.tracks[request_id]
        if certified:
            track.certify()
        else:
            track.wait(context, self.rings.now)

    def verified(self, request_id: str, context: int, limit: int) -> None:
        """The verify row's result is known. ``limit``: the most drafts the next verify may carry, of which a round that
        began ahead knew a lower bound."""
        track = self.tracks[request_id]
        done, round_ = track.verifying, track.round
        if round_ is None:
            track.wait(context, self.rings.now)
        else:
            track.draft_on(context)
            round_.limit = limit
        if done is not None:
            self.rings.cancel(done)

    def drafted(self, request_id: str, last: bool) -> None:
        """One draft token of the running round is known; ``last`` ends drafting (it was an end token)."""
        round_ = self.tracks[request_id].round
        if round_ is not None:
            round_.known += 1
            round_.ended |= last

    def reside(self, request_id: str) -> None:
        """Give the request back to plain vLLM (demotion or a transfer failed)."""
        track = self.tracks[request_id]
        self._leave(track, track.reside)
        del self.tracks[request_id]

    def finish(self, request_id: str) -> None:
        track = self.tracks[request_id]
        self._leave(track, track.finish)
        del self.tracks[request_id]

    def _leave(self, track: Track, move: Callable[[], None]) -> None:
        bookings = track.bookings
        move()
        for booking in bookings:
            self.rings.cancel(booking)

    # -- one iteration -----------------------------------------------------------------------------

    def tick(self, host: Host, limits: Limits) -> Tick:
        """Advance to the next iteration and decide. ``limits`` may differ from call to call."""
        self.rings.advance()
        self.limits = limits
        out = Tick()
        self._shared = {key: shared for key, shared in self._shared.items() if shared.users}
        if self._rebook(host, limits):
            self._admit(host, limits)
        budget, now = self.verify_tokens, self.rings.now
        for track, round_ in self._rounds():
            booking = round_.booking
            if track.state is State.DRAFTING and booking and now >= booking.load_at:
                if host.take_pages(track.request_id):
                    track.load()
                    out.loads.append(track.request_id)
                else:  # late: booked again in the next iteration
                    self.rings.cancel(booking)
                    round_.booking, booking, track.waiting_since = None, None, now
            if track.state is State.LOADING and booking and now >= booking.verify_at:
                tokens = 1 + round_.issued
                known = round_.complete or not booking.named
                if known and (tokens <= budget or budget == self.verify_tokens):
                    track.verify(now)
                    out.verifies.append((track.request_id, round_.issued))
                    budget -= tokens
            elif round_.wants_draft and (booking is None or now <= booking.last_draft_at):
                round_.issued += 1
                out.drafts.append(track.request_id)
        return out

    def _rounds(self) -> list[tuple[Track, Round]]:
        """Rounds under way, the earliest verify first."""
        never = self.rings.now + self.rings.window
        rounds = [(t, t.round) for t in self.tracks.values() if t.round is not None]
        return sorted(rounds, key=lambda r: r[1].booking.verify_at if r[1].booking else never)

    def _rebook(self, host: Host, limits: Limits) -> bool:
        """Rounds without a booking (their pages were not there in time) go before new rounds; one that has nothing
        left to draft moves to an earlier verify if the rings allow. False when no new round may start: a late one
        has waited for a whole window."""
        for track, round_ in self._rounds():
            booking = round_.booking
            if booking is None:
                demand = host.demand(track.request_id, 1)
                round_.booking = self._join(demand, limits) or self._alone(demand, limits)
                if round_.booking is None and self._aged(track, demand, limits):
                    return False
            elif not round_.wants_draft and track.state is State.DRAFTING and booking.load_at > self.rings.now:
                round_.booking = self._earlier(booking, host.demand(track.request_id, 1), limits)
        return True

    def _earlier(self, booking: Booking, demand: Demand, limits: Limits) -> Booking:
        """A booking with an earlier verify, or the one there is; those who share a reload stay together."""
        if booking.shared is not None and booking.shared.users > 1:
            return booking
        self.rings.cancel(booking)
        earlier = self._alone(demand, limits)
        if earlier is not None and earlier.verify_at < booking.verify_at:
            return earlier
        if earlier is not None:
            self.rings.cancel(earlier)
        return self._known(self.rings.restore(booking))

    def _admit(self, host: Host, limits: Limits) -> None:
        able = (t for t in self.tracks.values() if not t.held)
        waiting = [t for t in able if t.state is State.WAITING or self._ahead(t, host)]
        waiting.sort(key=lambda t: t.waiting_since)
        wishes = [self._wish(track, host) for track in waiting]
        queue = Queue(wishes, sum(map(self._overdue, waiting)))
        refused: dict[int, list[Demand]] = defaultdict(list)  # by span: only such demands cover each other
        apart: set[Hashable] = (
            set()
        )  # prefixes whose requests found no place together, so none begins without the others
        for number, wish in enumerate(wishes):
            demand = wish.demand
            if wish.track.round is not None:
                continue  # it was admitted with another one
            party = queue.party(number, wish, self.verify_tokens)
            if self._joins(wish, party, limits):
                continue
            if wish.key in apart or (
                self.policy.monotone and any(demand.covers(smaller) for smaller in refused[demand.span])
            ):
                bookings = list[Booking]()
            elif not (bookings := self._lead([one.demand for one in party], limits)):
                if len(party) > 1:
                    apart.add(wish.key)
                else:
                    refused[demand.span].append(demand)
            most = self.verify_tokens // len(bookings) - 1 if len(bookings) > 1 else wish.limit
            for one, booking in zip(party, bookings, strict=False):
                one.track.draft(Round(min(one.limit, most), booking))
            if not bookings and self._aged(wish.track, demand, limits):
                return

    def _wish(self, track: Track, host: Host) -> Wish:
        limit = host.draft_limit(track.request_id)
        demand = host.demand(track.request_id, min(host.draft_length(track.request_id), limit))
        return Wish(track, limit, replace(demand, anchor=demand.anchor + demand.lag) if demand.lag else demand)

    # -- rounds with a common prefix ---------------------------------------------------------------

    def _joins(self, wish: Wish, party: Sequence[Wish], limits: Limits) -> bool:
        """The request's round verifies on a reload that is booked for others already. Where it cannot, and their verify
        is near, it waits to begin the next round with them; but not for longer than a window, nor when one of them is
        in its ``party``, verified, and begins anew."""
        track, shared = wish.track, self._shared.get(wish.key)
        if shared is None or self.rings.now > shared.booking.free_after:
            return False
        if any(one.track.verifies_on(shared) for one in party):
            return False
        tokens = 1 + shared.booking.verify_at - shared.since  # of those who have been in it from the start
        if (shared.users + 1) * tokens > self.verify_tokens:
            return False
        booking = self._join(wish.demand, limits)
        if booking is not None:
            track.draft(Round(wish.limit, booking))
        near = shared.booking.verify_at - self.rings.now <= wish.demand.anchor * NEAR
        return booking is not None or (near and not self._overdue(track))

    def _join(self, demand: Demand, limits: Limits) -> Booking | None:
        shared = self._shared.get(demand.prefix.key) if demand.prefix is not None else None
        return join(self.rings, shared, demand, limits) if shared is not None and shared.users else None

    def _lead(self, demands: Sequence[Demand], limits: Limits) -> list[Booking]:
        return [self._known(booking) for booking in lead(self.rings, self.policy, demands, limits)]

    def _alone(self, demand: Demand, limits: Limits) -> Booking | None:
        return next(iter(self._lead([demand], limits)), None)

    def _known(self, booking: Booking) -> Booking:
        if booking.shared is not None:
            self._shared[booking.shared.key] = booking.shared
        return booking

    def _ahead(self, track: Track, host: Host) -> bool:
        return track.state is State.VERIFYING and track.round is None and host.drafts_ahead(track.request_id)

    def _aged(self, track: Track, demand: Demand, limits: Limits) -> bool:
        """Nobody overtakes a request that has waited for a whole window, unless it fits not even empty rings."""
        fits = demand.pages <= limits.pages and demand.link_ns <= demand.span * limits.link_ns
        return fits and self._overdue(track)

    def _overdue(self, track: Track) -> bool:
        return self.rings.now - track.waiting_since > self.rings.window
