"""The life of one request, as a state machine with one function per transition.

::

    RESIDENT -> DEMOTING -> WAITING -> DRAFTING -> LOADING -> VERIFYING -> WAITING or DRAFTING ...
        ^           |          |           |          |           |
        +-----------+----------+-----------+----------+-----------+      (back to a plain vLLM row)
    DEMOTING -> CERTIFIED -> RESIDENT ...                                (a request that asks for certified decode)
    any state -> FINISHED

A ``Track`` is the one owner of a request's state. Every illegal move is an error that names both states.
"""

import enum
from dataclasses import dataclass

from scheduler.rings import Booking, Shared


class State(enum.Enum):
    """Where a request's KV is and what its next step may be."""

    RESIDENT = "resident"  # full KV in device pages, a plain vLLM row
    DEMOTING = "demoting"  # full KV in device pages, being offloaded, scored and compressed
    WAITING = "waiting"  # full KV on the host, compressed KV on the device, no round admitted
    DRAFTING = "drafting"  # one draft row per iteration on the compressed KV
    LOADING = "loading"  # as DRAFTING, and the transient pages of the reload are held
    VERIFYING = "verifying"  # the verify row has been issued, its result is not known; the next round may draft already
    CERTIFIED = "certified"  # full KV on the host, a sample on the device: one certified row per token, no rounds
    FINISHED = "finished"


class TransitionError(RuntimeError):
    """A transition was asked for in a state that does not allow it."""

    def __init__(self, request_id: str, observed: State, wanted: State, expected: frozenset[State]):
        names = ", ".join(sorted(s.name for s in expected))
        super().__init__(
            f"request {request_id!r} cannot go from {observed.name} to {wanted.name}: "
            f"{wanted.name} is reached from {names} only. This is a bug in the caller; please report it."
        )
        self.observed, self.wanted = observed, wanted


_FROM: dict[State, frozenset[State]] = {
    State.DEMOTING: frozenset({State.RESIDENT, State.VERIFYING}),
    State.WAITING: frozenset({State.DEMOTING, State.VERIFYING}),
    State.CERTIFIED: frozenset({State.DEMOTING}),
    State.DRAFTING: frozenset({State.WAITING, State.VERIFYING}),
    State.LOADING: frozenset({State.DRAFTING}),
    State.VERIFYING: frozenset({State.LOADING}),
    State.RESIDENT: frozenset(set(State) - {State.RESIDENT, State.FINISHED}),
    State.FINISHED: frozenset(set(State) - {State.FINISHED}),
}


@dataclass
class Round:
    """One draft-and-verify round. ``limit`` is the most drafts its verify may carry."""

    limit: int
    booking: Booking | None = None
    issued: int = 0  # draft rows scheduled
    known: int = 0  # draft tokens whose ids have come back
    ended: bool = False  # no further draft makes sense (an end token was drafted)

    @property
    def wants_draft(self) -> bool:
        return not self.ended and self.issued < self.limit

    @property
    def complete(self) -> bool:
        """All issued drafts are known, so a verify row can name them."""
        return self.issued == self.known


@dataclass
class Track:
    """The state of one request. ``context`` counts tokens whose exact KV the host copy holds; it is
    also the position of the pending token, the first input of the next round."""

    request_id: str
    state: State = State.RESIDENT
    context: int = 0
    round: Round | None = None
    waiting_since: int = 0  # iteration since which a booking is missing
    verifying: Booking | None = None  # of the round whose verify row is under way
    held: bool = False  # no round is begun: its drafts would not pay

    @property
    def bookings(self) -> list[Booking]:
        found = [self.verifying, self.round.booking if self.round is not None else None]
        return [b for b in found if b is not None]

    def verifies_on(self, shared: Shared) -> bool:
        """The verify row under way reads this reload of a prefix."""
        return self.verifying is not None and self.verifying.shared is shared

    def demote(self) -> None:
        self._move(State.DEMOTING)
        self.round = self.verifying = None

    def wait(self, context: int, now: int) -> None:
        self._move(State.WAITING)
        self.context, self.round, self.verifying, self.waiting_since = context, None, None, now

    def certify(self) -> None:
        self._move(State.CERTIFIED)
        self.round = self.verifying = None

    def draft(self, round_: Round) -> None:
        """Begin a round: from WAITING, or ahead of the result of the verify row under way (still VERIFYING then)."""
        if self.state is not State.VERIFYING:
            self._move(State.DRAFTING)
        self.round = round_

    def draft_on(self, context: int) -> None:
        """The verify row's result is there, and the round that began ahead of it goes on."""
        self._move(State.DRAFTING)
        self.context, self.verifying = context, None

    def load(self) -> None:
        self._move(State.LOADING)

    def verify(self, now: int) -> None:
        self._move(State.VERIFYING)
        assert self.round is not None
        self.verifying, self.round, self.waiting_since = self.round.booking, None, now

    def reside(self) -> None:
        self._move(State.RESIDENT)
        self.round = self.verifying = None

    def finish(self) -> None:
        self._move(State.FINISHED)
        self.round = self.verifying = None

    def _move(self, wanted: State) -> None:
        if self.state not in _FROM[wanted]:
            raise TransitionError(self.request_id, self.state, wanted, _FROM[wanted])
        self.state = wanted
