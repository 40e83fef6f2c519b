"""Rounds over full KV with a common prefix: they verify in one iteration, on one reload of that prefix.

``lead`` books such rounds at once, with the prefix as a booking of its own (``Shared``); ``join`` adds a round to a
reload that is booked already. Link time and pages of the prefix are counted once.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil

from scheduler.admission import Demand, Limits, Policy, fill, place
from scheduler.lifecycle import Track
from scheduler.rings import Booking, Rings, Shared


@dataclass(frozen=True)
class Wish:
    """The next round of one request that waits for it: at most ``limit`` drafts, and what it needs."""

    track: Track
    limit: int
    demand: Demand

    @property
    def key(self) -> Hashable | None:
        return self.demand.prefix.key if self.demand.prefix is not None else None


class Queue:
    """Waiting requests, the oldest first, of which the first ``aged`` must not be overtaken."""

    def __init__(self, wishes: Sequence[Wish], aged: int) -> None:
        self._aged = aged
        self._groups: dict[Hashable, list[tuple[int, Wish]]] = defaultdict(list)
        self._turn: list[int] = []  # of each request, its number in its group
        for number, wish in enumerate(wishes):
            group = self._groups[wish.key]
            self._turn.append(len(group))
            group.append((number, wish))

    def party(self, number: int, wish: Wish, verify_tokens: int) -> list[Wish]:
        """The request with this ``number`` and those behind it that may begin with it: as many as fit a verify, and
        none that would overtake an aged request of another group."""
        if wish.key is None:
            return [wish]
        rest = islice(self._groups[wish.key], self._turn[number], None)
        most = max(1, verify_tokens // (1 + wish.demand.anchor))
        found: list[Wish] = []
        for after, other in rest:
            if len(found) == most or other.track.round is not None:
                break
            if after > number + len(found) and number + len(found) < self._aged:
                break
            found.append(other)
        return found


def lead(rings: Rings, policy: Policy, demands: Sequence[Demand], limits: Limits) -> list[Booking]:
    """Reserve for the first of the ``demands``, which have the same prefix, and for as many of those behind it as would
    fit empty rings together. Empty, and nothing reserved, when these do not fit now: one after the other they would
    take more of the link and be apart from then on."""
    count, whole = len(demands), demands[0]
    while count > 1 and not _could_fit(whole := _together(demands[:count], limits), rings.window, limits):
        count -= 1
    found = place(rings, policy, whole if count > 1 else demands[0], limits)
    return _book(rings, found, demands[:count]) if found is not None else []


def join(rings: Rings, shared: Shared, demand: Demand, limits: Limits) -> Booking | None:
    """Reserve what a round needs beside the prefix, so that it verifies with the others; None when that does not fit
    behind the start of their reload, or leaves no time for a draft."""
    found, now = shared.booking, rings.now
    load_at, free_after = max(found.load_at, now), found.verify_at + demand.hold
    if found.verify_at - now <= demand.lag:
        return None
    link_ns, pages = _beside(demand)
    link = fill(rings.link.cells[load_at - now : found.verify_at - now], link_ns, limits.link_ns)
    if link is None or rings.pages.peak(load_at, free_after) > limits.pages - pages:
        return None
    idle = (0,) * (found.verify_at - load_at - len(link))
    shared.users += 1
    return rings.book(Booking(load_at, found.verify_at, free_after, idle + link, pages, demand.named, shared=shared))


def _beside(demand: Demand) -> tuple[int, int]:
    """Link time and pages that are not the prefix's."""
    assert demand.prefix is not None
    return max(0, demand.link_ns - demand.prefix.link_ns), demand.pages - demand.prefix.pages


def _could_fit(demand: Demand, window: int, limits: Limits) -> bool:
    return demand.pages <= limits.pages and demand.span < window - demand.hold


def _together(demands: Sequence[Demand], limits: Limits) -> Demand:
    """One demand for all, half-way between what they aim at."""
    first = demands[0]
    assert first.prefix is not None
    beside = [_beside(demand) for demand in demands]
    link_ns = first.prefix.link_ns + sum(ns for ns, _ in beside)
    pages = first.prefix.pages + sum(pages for _, pages in beside)
    anchor = ceil(sum(d.anchor for d in demands) / len(demands))
    return replace(
        first, anchor=anchor, span=max(first.span, ceil(link_ns / limits.link_ns)), link_ns=link_ns, pages=pages
    )


def _book(rings: Rings, found: Booking, party: Sequence[Demand]) -> list[Booking]:
    """``found``, which is not booked, as one booking for each of the party and one for the prefix."""
    prefix = party[0].prefix
    if prefix is None:
        return [rings.book(found)]
    beside = [_beside(demand) for demand in party]
    first, *rest = _share_out(found.link, [prefix.link_ns, *(ns for ns, _ in beside)])
    shared = Shared(prefix.key, rings.book(replace(found, link=first, pages=prefix.pages)), len(party), rings.now)
    return [
        rings.book(replace(found, link=link, pages=pages, named=demand.named, shared=shared))
        for link, (_, pages), demand in zip(rest, beside, party, strict=True)
    ]


def _share_out(link: Sequence[int], amounts: Sequence[int]) -> list[tuple[int, ...]]:
    """Link time per iteration, dealt out to one amount after the other."""
    left, parts = list(link), []
    for amount in amounts:
        part = []
        for i, cell in enumerate(left):
            part.append(min(cell, amount))
            left[i] -= part[-1]
            amount -= part[-1]
        parts.append(tuple(part))
    return parts
