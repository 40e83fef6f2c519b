"""Admit: find the iterations in which a request's full KV is reloaded and verified.

The paper's algorithm: anchor at the request's own draft length, try anchor, anchor + 1, anchor - 1, ...
and take the first iteration d before which the reload fits the BW ring, and until which its pages fit the
HBM ring. ``Staggered`` is that algorithm; ``LockStep`` is the ablation in which all requests verify in the
same iteration.

A reload is booked in the S iterations before d; with whatever time other reloads leave there, in S + 1. So
reloads follow one another without a gap although none of them takes a whole number of iterations (the
paper books whole ones), and each is over when its verify begins.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil
from typing import Protocol

from scheduler.rings import Booking, Rings


@dataclass(frozen=True)
class Prefix:
    """The part of a reload that other requests need, too (those with the same ``key``): its link time and pages."""

    key: Hashable
    link_ns: int
    pages: int


@dataclass(frozen=True)
class Demand:
    """What one round needs. The reload takes ``link_ns`` of link time, which an idle link has in ``span`` iterations
    (S); ``pages`` transient pages are held from the first of them until ``hold`` iterations after the verify
    (run-ahead scheduling learns a step's result that much later). ``named``: the verify row names its
    drafts, so all of them must be known; elsewhere it takes them from the device. ``prefix``: what of it may be
    reloaded together with others."""

    anchor: int
    span: int
    link_ns: int
    pages: int
    hold: int = 0
    named: bool = True
    prefix: Prefix | None = None

    @property
    def lag(self) -> int:
        """Iterations by which the verify row comes later because of the drafts it names."""
        return self.hold if self.named else 0

    def covers(self, other: "Demand") -> bool:
        """At least as large in everything, over the same iterations."""
        return self.span == other.span and self.link_ns >= other.link_ns and self.pages >= other.pages


@dataclass(frozen=True)
class Limits:
    """Capacities: link time per iteration (T_iter) and pages for transient KV (H - M - resident)."""

    link_ns: int
    pages: int


def reload_span(num_bytes: int, bytes_per_second: float, iteration_ns: int, window: int) -> tuple[int, int]:
    """Iterations a reload takes, S = max(1, ceil(K / (L * T_iter))), and the link time it takes in all.

    A reload that is longer than the window is booked as the whole window at full link time: it will be
    late, but it is never refused.
    """
    total_ns = ceil(num_bytes / bytes_per_second * 1e9)
    span = min(max(1, ceil(total_ns / iteration_ns)), window - 1)
    return span, min(total_ns, span * iteration_ns)


class Policy(Protocol):
    """Chooses the verify iteration. Returns its distance from now, or None to try again next iteration.

    ``monotone``: what is refused stays refused for any demand that covers it.
    """

    monotone: bool

    def find(self, rings: Rings, demand: Demand, limits: Limits) -> int | None: ...

    def link(self, rings: Rings, d: int, demand: Demand, limits: Limits) -> tuple[int, ...] | None:
        """Link time of a reload for a verify at distance ``d``, in each iteration from its first to d - 1."""


class Staggered:
    """First fit around the request's own draft length, in both rings."""

    monotone = True

    def find(self, rings: Rings, demand: Demand, limits: Limits) -> int | None:
        first, last = demand.span, rings.window - 1 - demand.hold
        if first > last or limits.pages < demand.pages:
            return None
        anchor = min(max(demand.anchor, first), last)
        if self._fits(rings, anchor, demand, limits):
            return anchor
        # Sums rule out most iterations at once, which keeps Admit in microseconds at W = 256.
        booked, span = rings.link.sums(limits.link_ns), demand.span
        most = (span + 1) * limits.link_ns - demand.link_ns
        for d in _outward(anchor, first, last):
            if booked[d + 1] - booked[d - span] <= most and self._fits(rings, d, demand, limits):
                return d
        return None

    def link(self, rings: Rings, d: int, demand: Demand, limits: Limits) -> tuple[int, ...] | None:
        return _fill(rings.link.cells[max(0, d - demand.span - 1) : d], demand.link_ns, limits.link_ns)

    def _fits(self, rings: Rings, d: int, demand: Demand, limits: Limits) -> bool:
        link = self.link(rings, d, demand, limits)
        return link is not None and _pages_fit(rings, d, len(link), demand, limits)


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
        link = self.link(rings, d, demand, limits)
        return d if _pages_fit(rings, d, len(link), demand, limits) else None

    def link(self, rings: Rings, d: int, demand: Demand, limits: Limits) -> tuple[int, ...]:
        alone = _fill([0] * demand.span, demand.link_ns, max(limits.link_ns, ceil(demand.link_ns / demand.span)))
        assert alone is not None
        return alone


def place(rings: Rings, policy: Policy, demand: Demand, limits: Limits) -> Booking | None:
    """Where one round can have its place in both rings; nothing is reserved yet."""
    d = policy.find(rings, demand, limits)
    link = None if d is None else policy.link(rings, d, demand, limits)
    if d is None or link is None:
        return None
    verify_at = rings.now + d
    return Booking(verify_at - len(link), verify_at, verify_at + demand.hold, link, demand.pages, demand.named)


def book(rings: Rings, policy: Policy, demand: Demand, limits: Limits) -> Booking | None:
    """Admit one round: reserve its place in both rings, or return None and reserve nothing."""
    found = place(rings, policy, demand, limits)
    return None if found is None else rings.book(found)


def _fill(cells: Sequence[int], needed: int, capacity: int) -> tuple[int, ...] | None:
    """Take ``needed`` from what is left of ``capacity`` in ``cells``, beginning with the last one: the amounts from the
    first iteration that is touched on. None where there is too little, or where an earlier verify would do."""
    if needed and cells[-1] >= capacity:
        return None
    return fill(cells, needed, capacity)


def fill(cells: Sequence[int], needed: int, capacity: int) -> tuple[int, ...] | None:
    """As ``_fill``, also where the last cells have nothing left."""
    taken = []
    for cell in reversed(cells):
        taken.append(min(needed, max(0, capacity - cell)))
        needed -= taken[-1]
        if not needed:
            return tuple(reversed(taken))
    return None


def _pages_fit(rings: Rings, d: int, length: int, demand: Demand, limits: Limits) -> bool:
    return rings.pages.peak(rings.now + d - length, rings.now + d + demand.hold) <= limits.pages - demand.pages


def _outward(anchor: int, first: int, last: int) -> Iterator[int]:
    """anchor + 1, anchor - 1, anchor + 2, ... within ``first .. last``."""
    later, earlier = range(anchor + 1, last + 1), range(anchor - 1, first - 1, -1)
    both = min(len(later), len(earlier))
    return chain(chain.from_iterable(zip(later, earlier, strict=False)), later[both:], earlier[both:])
