"""The BW ring and the HBM ring: what is promised in each of the next W iterations.

``link[i]`` is link time reserved in iteration i (T[i] of the paper's Algorithm Admit), in nanoseconds;
``pages[i]`` is the number of transient KV pages resident in iteration i (B[i]). Integers, so that
releasing what was reserved restores the ring exactly.
"""

from dataclasses import dataclass, replace


class RingError(RuntimeError):
    """A reservation outside the window, or one that is released twice."""


class Ring:
    """Amounts reserved in the iterations ``now .. now + window - 1``, addressed by iteration number."""

    __slots__ = ("cells", "now", "window")

    def __init__(self, window: int) -> None:
        if window < 2:
            raise RingError(f"a ring needs a window of at least 2 iterations, got {window}")
        self.window = window
        self.now = 0
        self.cells = [0] * window

    def advance(self) -> None:
        """Move to the next iteration; what was reserved in the past one is forgotten."""
        self.now += 1
        del self.cells[0]
        self.cells.append(0)

    def peak(self, first: int, last: int) -> int:
        """The largest amount reserved in the iterations ``first .. last``, both included."""
        return max(self.cells[first - self.now : last - self.now + 1])

    def add(self, first: int, last: int, amount: int) -> None:
        """Reserve (or with a negative amount release) in ``first .. last``; past iterations are skipped."""
        if last - self.now >= self.window:
            raise RingError(f"iteration {last} lies outside the window {self.now}..{self.now + self.window - 1}")
        for i in range(max(first - self.now, 0), last - self.now + 1):
            self.cells[i] += amount


@dataclass
class Booking:
    """One reservation in both rings: the reload takes ``link_ns`` in each of ``load_at .. verify_at``,
    and ``pages`` transient pages are held in ``load_at .. free_after``."""

    load_at: int
    verify_at: int
    free_after: int
    link_ns: int
    pages: int
    named: bool = True  # see Demand
    released: bool = False

    @property
    def last_draft_at(self) -> int:
        """The last iteration whose draft token the verify row can carry: where it names its drafts, results lag by as
        many iterations as the pages are held after the verify."""
        return self.verify_at - 1 - (self.free_after - self.verify_at if self.named else 0)


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
        self.pages.add(booking.load_at, booking.free_after, booking.pages)  # the longer span checks for both
        self.link.add(booking.load_at, booking.verify_at, booking.link_ns)
        return booking

    def restore(self, booking: Booking) -> Booking:
        """Book a cancelled booking again, in the same place."""
        return self.book(replace(booking, released=False))

    def cancel(self, booking: Booking) -> None:
        """Give back what lies in the future. A booking is cancelled exactly once."""
        if booking.released:
            raise RingError(f"a booking for iterations {booking.load_at}..{booking.free_after} was released twice")
        booking.released = True
        if booking.verify_at >= self.now:
            self.link.add(booking.load_at, booking.verify_at, -booking.link_ns)
        if booking.free_after >= self.now:
            self.pages.add(booking.load_at, booking.free_after, -booking.pages)
