"""Admit: find the iterations in which a request's full KV is reloaded and verified.

The paper's algorithm: anchor at the request's own draft length, try anchor, anchor + 1, anchor - 1, ...
and take the first span ``[d - S + 1, d]`` that fits the BW ring and the HBM ring. ``Staggered`` is that
algorithm; ``LockStep`` is the ablation in which all requests verify in the same iteration.
"""

from dataclasses import dataclass
from math import ceil
from typing import Protocol

from scheduler.rings import Booking, Rings


@dataclass(frozen=True)
class Demand:
    """What one round needs. ``span`` iterations (S) carry the reload, ``link_ns`` of link time each;
    ``pages`` transient pages are held from the first of them until ``hold`` iterations after the verify
    (run-ahead scheduling learns a step's result that much later). ``named``: the verify row names its
    drafts, so all of them must be known; elsewhere it takes them from the device."""

    anchor: int
    span: int
    link_ns: int
    pages: int
    hold: int = 0
    named: bool = True

    @property
    def lag(self) -> int:
        """Iterations by which the verify row comes later because of the drafts it names."""
        return self.hold if self.named else 0

    def covers(self, other: "Demand") -> bool:
        """At least as large in everything."""
        return self.span >= other.span and self.link_ns >= other.link_ns and self.pages >= other.pages


@dataclass(frozen=True)
class Limits:
    """Capacities: link time per iteration (T_iter) and pages for transient KV (H - M - resident)."""

    link_ns: int
    pages: int


def reload_span(num_bytes: int, bytes_per_second: float, iteration_ns: int, window: int) -> tuple[int, int]:
    """Iterations a reload takes, S = max(1, ceil(K / (L * T_iter))), and the link time in each of them.

    A reload that is longer than the window is booked as the whole window at full link time: it will be
    late, but it is never refused.
    """
    total_ns = ceil(num_bytes / bytes_per_second * 1e9)
    span = min(max(1, ceil(total_ns / iteration_ns)), window - 1)
    return span, min(ceil(total_ns / span), iteration_ns)


class Policy(Protocol):
    """Chooses the verify iteration. Returns its distance from now, or None to try again next iteration.

    ``monotone``: what is refused stays refused for any demand that covers it.
    """

    monotone: bool

    def find(self, rings: Rings, demand: Demand, limits: Limits) -> int | None: ...


class Staggered:
    """First fit around the request's own draft length, in both rings."""

    monotone = True

    def find(self, rings: Rings, demand: Demand, limits: Limits) -> int | None:
        first, last = demand.span, rings.window - 1 - demand.hold
        link_room, page_room = limits.link_ns - demand.link_ns, limits.pages - demand.pages
        if first > last or link_room < 0 or page_room < 0:
            return None
        anchor = min(max(demand.anchor, first), last)
        if _fits(rings, anchor, demand, link_room, page_room):
            return anchor
        # One byte per iteration, 1 where the demand fits: the search for a run of free iterations on both sides of the
        # anchor is then done by bytes.find, which keeps Admit in microseconds at W = 256.
        free = int.from_bytes(bytes([a <= page_room for a in rings.pages.cells]), "little")
        for _ in range(demand.hold):
            free &= free >> 8
        free &= int.from_bytes(bytes([a <= link_room for a in rings.link.cells]), "little")
        cells, run = free.to_bytes(rings.window, "little"), b"\1" * demand.span
        later = cells.find(run, anchor - demand.span + 2, last + 1) + demand.span - 1
        earlier = cells.rfind(run, first - demand.span + 1, anchor) + demand.span - 1
        found = [d for d in (later, earlier) if d >= first]
        return min(found, key=lambda d: (abs(d - anchor), d < anchor)) if found else None


class LockStep:
    """Every request verifies at the next common boundary, one every ``period`` iterations. The link may be
    over-subscribed there (that is the point of the ablation); memory may not."""

    monotone = False  # a longer span can reach a later boundary

    def __init__(self, period: int) -> None:
        if period < 2:
            raise ValueError(f"a lock-step period must be at least 2 iterations (1 draft, 1 verify), got {period}")
        self.period = period

    def find(self, rings: Rings, demand: Demand, limits: Limits) -> int | None:
        earliest = rings.now + demand.span
        d = -(-earliest // self.period) * self.period - rings.now
        if d > rings.window - 1 - demand.hold:
            return None
        return d if _fits(rings, d, demand, None, limits.pages - demand.pages) else None


def book(rings: Rings, policy: Policy, demand: Demand, limits: Limits) -> Booking | None:
    """Admit one round: reserve its span in both rings, or return None and reserve nothing."""
    d = policy.find(rings, demand, limits)
    if d is None:
        return None
    verify_at = rings.now + d
    return rings.book(
        Booking(
            verify_at - demand.span + 1, verify_at, verify_at + demand.hold, demand.link_ns, demand.pages, demand.named
        )
    )


def _fits(rings: Rings, d: int, demand: Demand, link_room: int | None, page_room: int) -> bool:
    first = rings.now + d - demand.span + 1
    last = rings.now + d
    if link_room is not None and rings.link.peak(first, last) > link_room:
        return False
    return rings.pages.peak(first, last + demand.hold) <= page_room
