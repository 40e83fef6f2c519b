"""The BW ring and the HBM ring: what is promised in each of the next W iterations.

``link[i]`` is link time reserved in iteration i (T[i] of the paper's Algorithm Admit), in nanoseconds;
``pages[i]`` is the number of transient KV pages resident in iteration i (B[i]). Integers, so that
releasing what was reserved restores the ring exactly.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate


class RingError(RuntimeError):
    """A reservation outside the window, or one that is released twice."""


class Ring:
    """Amounts reserved in the iterations ``now .. now + window - 1``, addressed by iteration number."""

    __slots__ = ("_sums", "cells", "now", "window")

    def __init__(self, window: int) -> None:
        if window < 2:
            raise RingError(f"a ring needs a window of at least 2 iterations, got {window}")
        self.window = window
        self.now = 0
        self.cells = [0] * window
        self._sums: tuple[int, list[int]] | None = None  # of the cells as they are

    def advance(self) -> None:
        """Move to the next iteration; what was reserved in the past one is forgotten."""
        self.now += 1
        self._sums = None
        del self.cells[0]
        self.cells.append(0)

    def peak(self, first: int, last: int) -> int:
        """The largest amount reserved in the iterations ``first .. last``, both included."""
        return max(self.cells[first - self.now : last - self.now + 1])

    def sums(self, capacity: int) -> list[int]:
        """What is reserved before each iteration, no more than ``capacity`` in each, counted from the one before
        ``now``, which has no room. One iteration asks for many requests, so it is kept."""
        if self._sums is None or self._sums[0] != capacity:
            cells = self.cells
            if max(cells) > capacity:  # the limit has become smaller since
                cells = [min(c, capacity) for c in cells]
            self._sums = capacity, [0, *accumulate(cells, initial=capacity)]
        return self._sums[1]

    def add(self, first: int, amounts: Sequence[int], sign: int = 1) -> None:
        """Reserve (with ``sign`` -1: release) one amount in each iteration from ``first`` on; past ones are skipped."""
        start = first - self.now
        if start + len(amounts) > self.window:
            last = first + len(amounts) - 1
            raise RingError(f"iteration {last} lies outside the window {self.now}..{self.now + self.window - 1}")
        self._sums = None
        for i in range(max(start, 0), start + len(amounts)):
            self.cells[i] += sign * amounts[i - start]


@dataclass
class Booking:
    """One reservation in both rings: the reload takes ``link[i]`` nanoseconds of iteration ``load_at + i``, the last
    of them just before ``verify_at``, and ``pages`` transient pages are held in ``load_at .. free_after``."""

    load_at: int
    verify_at: int
    free_after: int
    link: tuple[int, ...]
    pages: int
    named: bool = True  # see Demand
    released: bool = False
    shared: "Shared | None" = None  # what the round needs beside this, booked once for all who share it

    @property
    def held(self) -> list[int]:
        """Pages in each iteration from ``load_at`` on."""
        return [self.pages] * (self.free_after - self.load_at + 1)

    @property
    def last_draft_at(self) -> int:
        """The last iteration whose draft token the verify row can carry: where it names its drafts, results lag by as
        many iterations as the pages are held after the verify."""
        return self.verify_at - 1 - (self.free_after - self.verify_at if self.named else 0)


@dataclass
class Shared:
    """One reload of a prefix that several rounds verify on, the first of which was booked in iteration ``since``.
    ``booking`` holds it until the last of the ``users`` rounds has given its own booking back."""

    key: Hashable
    booking: Booking
    users: int
    since: int


class Rings:
    """Both rings, and the bookings that fill them."""

    def __init__(self, window: int) -> None:
        self.link = Ring(window)
        self.pages = Ring(window)
        self.window = window

    @property
    def now(self) -> int:
        return self.link.now

    def advance(self) -> None:
        self.link.advance()
        self.pages.advance()

    def book(self, booking: Booking) -> Booking:
        """Reserve; RingError and nothing reserved when the booking reaches beyond the window."""
        self.pages.add(booking.load_at, booking.held)  # the longer span checks for both
        self.link.add(booking.load_at, booking.link)
        return booking

    def restore(self, booking: Booking) -> Booking:
        """Book a cancelled booking again, in the same place."""
        if (shared := booking.shared) is not None:
            if not shared.users:
                shared.booking = self.restore(shared.booking)
            shared.users += 1
        return self.book(replace(booking, released=False))

    def cancel(self, booking: Booking) -> None:
        """Give back what lies in the future, and what is shared after its last user. A booking is cancelled exactly
        once."""
        if booking.released:
            raise RingError(f"a booking for iterations {booking.load_at}..{booking.free_after} was released twice")
        booking.released = True
        self.link.add(booking.load_at, booking.link, -1)
        self.pages.add(booking.load_at, booking.held, -1)
        if (shared := booking.shared) is not None:
            shared.users -= 1
            if not shared.users:
                self.cancel(shared.booking)
