"""Who keeps the full KV on the device: which plain rows are demoted when pages run short, and who comes back.

Pure decisions over numbers. A plain row yields a token an iteration and holds its full KV; a demoted one holds a
fraction of it, yields a share of a token (``gain``) and needs the link. The link is spent on the marginal requests
only: whoever fits stays a plain row, and nobody is demoted unless the engine makes more tokens by it.
"""

from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil

from scheduler.acceptance import accepted

WORTH = 0.25  # of a plain row's tokens: what a demotion must add to be made
ROUNDS = 4  # that must have gone before a request is judged by its own drafts
# Rounds do not begin evenly: with room for their mean alone most of them wait for pages. Where the link is the limit it
# spaces them, and little more than it can serve is needed.
UNEVEN, QUEUED = 2.5, 1.5
AHEAD = 16  # demotions, and waiting requests, that a first demotion is judged by
PATIENCE = 8  # iterations before the policy is asked again after it found nobody to demote


@dataclass(frozen=True)
class Candidate:
    """One request as the policy sees it. ``pages``: its full KV, in pages; ``gain``: tokens per iteration while it
    drafts, A / (x + 1); ``left``: output it may still get; ``since``: the iteration in which it came to its side;
    ``drafts``: of a round (x); ``kept``: pages its compressed copy is worth."""

    request_id: str
    pages: int
    gain: float
    left: int
    since: int
    drafts: int
    kept: float


def gain(chance: float, drafts: int) -> float:
    """``Candidate.gain`` of rounds of ``drafts`` tokens, each right with ``chance``."""
    return (1 + accepted(chance, drafts)) / (drafts + 1)


@dataclass(frozen=True)
class Pace:
    """How long things take. ``fixed``: seconds of an iteration that reads no KV; ``page``: seconds to read a page of
    KV; ``reload``: seconds to reload one."""

    fixed: float
    page: float
    reload: float


@dataclass(frozen=True)
class Mix:
    """The rows of an iteration: ``plain`` ones, which read ``pages``; and of those that draft, were they never held up
    by the link, ``gain`` (their tokens), ``read`` (pages read) and ``moved`` (pages reloaded), all per iteration."""

    plain: float = 0.0
    pages: float = 0.0
    gain: float = 0.0
    read: float = 0.0
    moved: float = 0.0

    def rows(self, number: float, pages: float) -> "Mix":
        """With so many plain rows more."""
        return replace(self, plain=self.plain + number, pages=self.pages + pages)

    def drafting(self, rows: Iterable[Candidate], sign: int = 1) -> "Mix":
        """With these rows drafting, too (``sign`` -1: no longer)."""
        gain, read, moved = self.gain, self.read, self.moved
        for row in rows:
            gain += sign * row.gain
            read += sign * (row.kept + row.pages / row.drafts)
            moved += sign * row.pages / row.drafts
        return replace(self, gain=gain, read=read, moved=moved)

    def rate(self, pace: Pace) -> float:
        """Tokens per second. Where the link is too slow for all who draft, each of them drafts a share of the time, and
        plain rows go on."""
        link, gpu = self.moved * pace.reload, self.read * pace.page
        fixed = pace.fixed + self.pages * pace.page
        share = 1.0 if link <= fixed + gpu else fixed / (link - gpu)
        iteration = fixed + share * gpu
        return (self.plain + share * self.gain) / iteration if iteration else 0.0


def working_pages(largest: int, rows: float, drafts: int, reload: tuple[int, int, int], iteration_ns: int) -> int:
    """Pages for the rounds of ``rows`` drafting requests: more than they hold on average (``UNEVEN``, ``QUEUED``), at
    least those of the ``largest``. ``reload``: span, link time, and iterations that pages are held after the verify."""
    span, link_ns, hold = reload
    by_link = iteration_ns / max(1, link_ns)
    # Rounds that begin in an iteration, each of which holds its pages for ``span + 1 + hold``.
    begin = min(UNEVEN * rows / (drafts + 1), QUEUED * by_link)
    return ceil(largest * max(1.0, begin * (span + 1 + hold)))


@dataclass(frozen=True)
class Residency:
    """``dwell``: iterations a request stays on a side at least, so that nobody goes to and fro."""

    dwell: int

    def victims(
        self,
        rows: Iterable[Candidate],
        short: int,
        working: Callable[[int, int], int],
        now: int,
        mix: Mix,
        pace: Pace,
        joining: Sequence[int] = (),
        lost: tuple[int, int] = (0, 0),
        most: int = AHEAD,
    ) -> list[Candidate]:
        """The plain rows to demote so that ``short`` pages more are there; none when they do not suffice or it does not
        pay. The longest context goes first, weighed with what it still yields: pages x gain.

        ``working(n, pages)``: pages more that rounds need when n rows join them, the largest of ``pages``.
        ``joining``: pages of the requests that wait, the first of which begins in the room made (they are in
        ``short``); ``lost``: plain rows, and their pages, that would be preempted without it.

        The first demotions pay for the rounds' own pages and may gain nothing by themselves: they are judged by what
        the engine makes after as many as let more of the waiting begin, at most ``most`` demotions.
        """
        able = [r for r in rows if r.left > 2 * (r.drafts + 1) and now - r.since >= self.dwell]
        able.sort(key=lambda r: r.pages * r.gain, reverse=True)
        freed = accumulate(r.pages for r in able)
        largest = accumulate((r.pages for r in able), max)
        enough = mix.rows(-lost[0], -lost[1]).rate(pace) + WORTH * _row_rate(mix, pace)
        first, begin = 0, 0
        for count, (pages, page_most) in enumerate(zip(freed, largest, strict=True), start=1):
            if first and count > min(most, first + AHEAD):
                break
            room = pages - short - working(count, page_most)
            if room < 0:
                continue
            joined = joining[: 1 + _fitting(joining[1:], room)]
            if first and len(joined) == begin:
                continue  # a demotion that lets nobody begin
            first, begin = first or count, len(joined)
            after = mix.rows(begin - count, sum(joined) - pages).drafting(able[:count])
            if after.rate(pace) > enough:
                return able[:first]
        return []

    def returning(
        self, detached: Iterable[Candidate], room: int, working: Callable[[int, int], int], now: int
    ) -> list[Candidate]:
        """Who comes back first into ``room`` pages: those whose drafts yield least, then the shortest.
        ``working(-n, 0)`` are the pages that rounds need without n of them. Requests about to finish are left alone."""
        able = [d for d in detached if d.left > d.drafts + 1 and now - d.since >= self.dwell]
        able.sort(key=lambda d: (d.gain, d.pages))
        found: list[Candidate] = []
        for one in able:
            room -= one.pages
            if room < working(-len(found) - 1, 0):
                break
            found.append(one)
        return found

    def unpaid(self, rows: Iterable[tuple[Candidate, int]], held: Container[str], mix: Mix, pace: Pace) -> set[str]:
        """Which of the detached ``rows``, each with the rounds it has had, should draft no more. ``mix`` is without
        those that are ``held`` already. One after the other: who is held leaves the link to the next."""
        found: set[str] = set()
        for one, rounds in rows:
            if rounds < ROUNDS or self.pays(one, mix, pace):
                continue
            if one.request_id not in held:
                mix = mix.drafting([one], -1)
            found.add(one.request_id)
        return found

    def pays(self, one: Candidate, mix: Mix, pace: Pace) -> bool:
        """Whether the engine, whose drafting rows ``one`` is among, would not be clearly faster without it: by half of
        what it yields, so only where it takes the link from others that use it far better."""
        without = mix.drafting([one], -1)
        return without.rate(pace) <= mix.rate(pace) + 0.5 * one.gain * _row_rate(mix, pace)


def _fitting(pages: Sequence[int], room: int) -> int:
    """How many of these, in their order, have room together."""
    return bisect_right(list(accumulate(pages)), room)


def _row_rate(mix: Mix, pace: Pace) -> float:
    """Tokens per second of one plain row."""
    iteration = pace.fixed + mix.pages * pace.page
    return 1 / iteration if iteration else 0.0
