"""An engine in simulated time: the planner, Admit, the rings, the residency and draft length policies as they are, over
memory and a link that take as long as the byte model says.

What is modelled: bytes read per iteration, reloads and offloads one after the other on a link of two directions, waits
for a reload that is late, memory of rows, rounds and arena. What is not: arithmetic, prefill, the time of the host.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from scheduler.admission import Demand, Limits, LockStep, Prefix, Staggered, reload_span
from scheduler.draft_length import POLICIES, Estimate, fair
from scheduler.lifecycle import State
from scheduler.planner import Planner
from scheduler.residency import AHEAD, PATIENCE, Candidate, Mix, Pace, Residency, gain, working_pages
from scheduler.simulated import PAGE, Row, Setup, Tally, crossing, distinct, fetched, letters, pages, sharers, transient
from scheduler.throughput import Throughput
from scheduler.workload import Job


@dataclass
class Engine:
    """``step`` is one iteration. ``more`` makes the request that follows one that ended (a closed loop), or None."""

    setup: Setup
    rng: random.Random
    more: Callable[[Job], Job] | None = None
    now: float = 0.0
    tally: Tally = field(default_factory=Tally)
    trace: deque[dict[str, str]] | None = None  # letters per request and iteration
    ended: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        setup = self.setup
        policy = LockStep(setup.draft_length + 1) if setup.mode == "lockstep" else Staggered()
        self.planner = Planner(setup.window, policy, setup.verify_tokens)
        self.residency = Residency(setup.window)
        self.throughput = Throughput(setup.weights / setup.machine.bandwidth, setup.machine.link)
        self.throughput.iteration = type(self.throughput.iteration)(self.throughput.iteration.value)
        self.seen = Estimate(decay=0.98)
        self.waiting, self.arriving = deque[Row](), deque[Job]()
        self.running: list[Row] = []
        self.out: dict[str, Row] = {}  # detached
        self.arena = setup.arena * (setup.machine.memory - setup.weights)
        self._quiet, self._head = -PATIENCE, 0
        self._links = {"up": 0.0, "down": 0.0}  # when each direction is free
        self.crossing = crossing(setup, ())  # share of a reload that comes over the link

    def add(self, jobs: Iterable[Job]) -> None:
        self.arriving.extend(sorted(jobs, key=lambda job: job.arrival))

    @property
    def busy(self) -> bool:
        return bool(self.arriving or self.waiting or self.running or self.out)

    # -- what the planner asks ---------------------------------------------------------------------------

    def draft_length(self, request_id: str) -> int:
        row = self.out[request_id]
        return row.lengths.aim(1, self._fair(row.context), self.setup.window - 2)

    def _fair(self, tokens: int, more: int = 0) -> int:
        span, link_ns = self._reload(tokens * self.crossing)
        limits, each = self.planner.limits, pages(tokens)
        room = max(each, limits.pages) if limits is not None else each
        iteration = self.throughput.iteration_ns
        return max(span, fair((len(self.out) + more) * self._distinct, link_ns / iteration, (span + 1) * each / room))

    def draft_limit(self, request_id: str) -> int:
        row = self.out[request_id]
        tail = self.setup.tail_tokens + self.setup.window - (row.context - row.filled)
        return max(0, min(row.left - 1, tail - 1, self.setup.window - 1))

    def demand(self, request_id: str, anchor: int) -> Demand:
        row = self.out[request_id]
        span, link_ns = self._reload(fetched(self.setup, row, self.out.values()))
        wanted = pages(row.context + 1 + self.draft_limit(request_id))
        common = Prefix(row.job.document, min(link_ns, self._reload(row.common * PAGE)[1]), row.common)
        prefix = common if self._sharers(row) else None
        return Demand(anchor, span, link_ns, wanted, 0, named=False, prefix=prefix)

    def drafts_ahead(self, request_id: str) -> bool:
        return False  # results are there before the next iteration

    def take_pages(self, request_id: str) -> bool:
        row = self.out[request_id]
        round_ = self.planner.tracks[request_id].round
        assert round_ is not None
        wanted, others = pages(row.context + 1 + round_.limit), self._sharers(row)
        row.here = any(other.shares for other in others)
        if wanted - row.here * row.common > self.free:
            return False
        row.pages, row.shares = wanted, bool(others)
        return True

    def _sharers(self, row: Row) -> list[Row]:
        """With whom it may reload. One that comes back reloads alone."""
        return sharers(row, self.out.values()) if self.setup.shared and not row.returning else []

    @property
    def _distinct(self) -> float:
        return distinct(self.out.values()) if self.setup.shared else 1.0

    def _reload(self, tokens: float) -> tuple[int, int]:
        num_bytes = round(tokens * self.setup.token)
        return reload_span(num_bytes, self.setup.machine.link, self.throughput.iteration_ns, self.setup.window)

    # -- memory ------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        held = sum(pages(r.context + 1) for r in self.running) + transient(self.out.values())
        return self.setup.pages - held

    def _soon(self, row: Row) -> int:
        return pages(row.context + min(row.left, self.setup.window))

    def _room(self, head: int) -> int:
        """Pages that transient KV may use."""
        held = transient(r for i, r in self.out.items() if self.planner.tracks[i].state is not State.DEMOTING)
        growth = sum(self._soon(r) - pages(r.context + 1) for r in self.running)
        return self.free + held - growth - head

    def _working(self, rows: int, largest: int = 0) -> int:
        if rows <= 0:
            return 0
        tokens = max(largest, max((r.context for r in self.out.values()), default=0))
        span, link_ns = self._reload(tokens * self.crossing)
        each = pages(tokens + self.setup.window)
        return working_pages(
            each, rows * self._distinct, self.setup.draft_length, (span, link_ns, 0), self.throughput.iteration_ns
        )

    # -- one iteration -----------------------------------------------------------------------------------

    def step(self) -> None:
        self._arrive()
        self._demote()
        self.crossing = crossing(self.setup, self.out.values())
        self._start()
        late = self.planner.late
        room = self._room(0 if late or not self.waiting else self._soon(self.waiting[0]))
        if self.setup.mode == "auto":
            self._review(room)
        tick = self.planner.tick(self, Limits(self.throughput.iteration_ns, room))
        for request_id in tick.loads:
            self._load(self.out[request_id])
        self._grow()
        verifies = [(self.out[i], drafts) for i, drafts in tick.verifies]
        self._pass(tick.drafts, verifies)
        if self.trace is not None:
            plain = [row.job.name for row in self.running]
            self.trace.append(letters(plain, self.planner.tracks, tick.drafts, [row.job.name for row, _ in verifies]))
        self._results(tick.drafts, verifies)
        self._settle()

    def _arrive(self) -> None:
        idle = not (self.running or self.out or self.waiting)
        if idle and self.arriving and self.arriving[0].arrival > self.now:
            self.now = self.arriving[0].arrival
        while self.arriving and self.arriving[0].arrival <= self.now:
            job = self.arriving.popleft()
            self.waiting.append(Row(job, POLICIES[self.setup.draft_policy](self.setup.draft_length)))

    def _start(self) -> None:
        """As many waiting requests as fit, in order; beside those that draft, only where rounds keep their pages."""
        setup = self.setup
        always = setup.mode in ("lockstep", "staggered")
        room = self._room(0)
        while self.waiting and len(self.running) + len(self.out) < setup.seats:
            row = self.waiting[0]
            wanted = self._soon(row) if self.out else pages(row.context + 1)
            if always and self.out and not self._fits_arena(row):
                return
            working = self._working(len(self.out) + always) if self.out else 0
            if wanted > self.free or (self.out and room - wanted < working and (self.planner.late or not always)):
                return
            room -= wanted
            self.waiting.popleft()
            self.running.append(row)
            row.job.started = self.now if row.job.started is None else row.job.started

    def _grow(self) -> None:
        """vLLM preempts the newest plain row where another one cannot grow."""
        while self.free < 0 and self.running:
            row = self.running.pop()
            self.waiting.appendleft(row)
            self.tally.preemptions += 1

    def _pass(self, drafts: list[str], verifies: list[tuple[Row, int]]) -> None:
        """The forward pass: begins when the reloads it needs are there, lasts as long as its bytes are read."""
        setup, begin = self.setup, self.now
        for row, _ in verifies:
            begin = max(begin, row.loaded_at)
        read = setup.weights + setup.token * sum(r.context for r in self.running)
        read += sum(self.out[i].kept + (self.out[i].context - self.out[i].filled) * setup.token for i in drafts)
        read += setup.token * sum(row.context for row, _ in verifies)
        self.tally.waited += begin - self.now
        if not (self.running or drafts or verifies):
            begin = self._next_event(begin)
            took = 0.0
        else:
            took = read / setup.machine.bandwidth
        self.tally.seconds += begin + took - self.now
        self.throughput.step(self.now, took > 0)
        self.now = begin + took
        self.tally.iterations += 1
        self.tally.rows += len(self.running)
        self.tally.drafting += len(drafts) + len(verifies)
        self.tally.peak_pages = max(self.tally.peak_pages, setup.pages - self.free)

    def _next_event(self, begin: float) -> float:
        """Nothing runs: an iteration without rows ends when a copy does, or as long as one with weights alone."""
        ends = [r.leaves_at for r in self.out.values() if r.leaves_at > begin]
        return min([*ends, begin + self.setup.weights / self.setup.machine.bandwidth])

    def _results(self, drafts: list[str], verifies: list[tuple[Row, int]]) -> None:
        for row in list(self.running):
            self._made(row, 1)
        for request_id in drafts:
            self.planner.drafted(request_id, last=False)
        for row, drafted in verifies:
            right = 0
            while right < drafted and self.rng.random() < row.job.chance:
                right += 1
            row.lengths.observe(drafted, right)
            self.seen.observe(drafted, right)
            row.rounds += 1
            self.tally.drafted += drafted
            self.tally.right += right
            self._made(row, right + 1)
            if row.job.name in self.out:
                self._verified(row)

    def _verified(self, row: Row) -> None:
        name, setup = row.job.name, self.setup
        if row.returning and not (row.shares and any(r.shares for r in sharers(row, self.out.values()))):
            row.returning = self._room(0) - self._soon(row) >= self._working(len(self.out) - 1)
            if row.returning:
                self.planner.reside(name)
                self._leave(row)
                row.since, row.returning = self.planner.rings.now, False
                self.running.append(row)
                self.tally.promotions += 1
                return
        row.pages, row.shares = 0, False
        if row.context - row.filled > setup.tail_tokens:  # compressed anew, from the KV that is there
            row.filled, row.kept = row.context, self._kept(row)
        self.planner.verified(name, row.context, self.draft_limit(name))

    def _made(self, row: Row, tokens: int) -> None:
        row.made += tokens
        self.tally.tokens += tokens
        row.job.first = self.now if row.job.first is None else row.job.first
        if row.left > 0:
            return
        self.tally.tokens += row.left  # beyond its end
        row.job.ended = self.now
        self.ended.append(row.job)
        if row.job.name in self.out:
            self.planner.finish(row.job.name)
            self._leave(row)
        else:
            self.running.remove(row)
        if self.more is not None:
            job = self.more(row.job)
            self.waiting.append(Row(job, POLICIES[self.setup.draft_policy](self.setup.draft_length)))

    # -- leaving and coming back -------------------------------------------------------------------------

    def _demote(self) -> None:
        if self.setup.mode == "plain" or not self.running:
            return
        if self.setup.mode == "auto":
            victims = self._victims()
        else:
            victims = list(self.running)
        for row in victims:
            if self._fits_arena(row):
                self._detach(row)

    def _fits_arena(self, row: Row) -> bool:
        return sum(r.reserved for r in self.out.values()) + self._reserve(row) <= self.arena

    def _reserve(self, row: Row) -> float:
        tail = min(self.setup.tail_tokens, row.left) + self.setup.window
        return self._kept(row) + tail * self.setup.token

    def _kept(self, row: Row) -> float:
        return self.setup.ratio * self.setup.packed * row.context * self.setup.token

    def _detach(self, row: Row) -> None:
        """Its KV goes to the host behind what is on its way already; the row pauses until it is there."""
        self.running.remove(row)
        name = row.job.name
        row.kept, row.reserved, row.filled, row.pages = (
            self._kept(row),
            self._reserve(row),
            row.context,
            pages(row.context + 1),
        )
        if not row.rounds:
            row.lengths = POLICIES[self.setup.draft_policy](self.setup.draft_length, self.seen.chance)
        row.since = self.planner.rings.now
        self.out[name] = row
        self.planner.demote(name)
        row.leaves_at = self._copy("down", row.context - (row.common * PAGE if self._sharers(row) else 0))
        self.tally.demotions += 1

    def _settle(self) -> None:
        for name, row in self.out.items():
            if self.planner.tracks[name].state is State.DEMOTING and row.leaves_at <= self.now:
                row.pages = 0
                self.planner.demoted(name, row.context)

    def _leave(self, row: Row) -> None:
        del self.out[row.job.name]
        row.pages, row.reserved, row.shares = 0, 0.0, False

    def _load(self, row: Row) -> None:
        tokens = fetched(self.setup, row, self.out.values()) - row.here * row.common * PAGE
        row.loaded_at = self._copy("up", tokens)
        self.tally.link += tokens * self.setup.token / self.setup.machine.link
        self.tally.reloads += 1

    def _copy(self, direction: str, tokens: float) -> float:
        start = max(self.now, self._links[direction])
        self._links[direction] = start + tokens * self.setup.token / self.setup.machine.link
        return self._links[direction]

    # -- the residency policy's questions ----------------------------------------------------------------

    def _victims(self) -> list[Row]:
        now = self.planner.rings.now
        self._head = self._soon(self.waiting[0]) if self.waiting and not self.planner.late else 0
        held = self._working(len(self.out))
        leaving = sum(r.pages for i, r in self.out.items() if self.planner.tracks[i].state is State.DEMOTING)
        short = self._head + held - self._room(0) - leaving
        if short <= 0 or now - self._quiet < PATIENCE:
            return []
        rows = {r.job.name: r for r in self.running}
        lost = (0, 0) if self._head else (1, self._soon(self.running[-1]))
        joining = [self._soon(job) for job in islice(self.waiting, AHEAD)] if self._head else []
        each = max(self._reserve(r) for r in self.running)
        most = int((self.arena - sum(r.reserved for r in self.out.values())) / each)
        chosen = self.residency.victims(
            [self._candidate(r) for r in self.running], short,
            lambda more, most: self._working(len(self.out) + more, most * PAGE) - held, now, self._mix(), self._pace(),
            joining=joining, lost=lost, most=most,
        )  # fmt: skip
        victims = [rows[c.request_id] for c in chosen]
        reserved = sum(r.reserved for r in self.out.values()) + sum(self._reserve(r) for r in victims)
        if not victims or reserved > self.arena:
            self._quiet, victims = now, []
        return victims

    def _review(self, room: int) -> None:
        now = self.planner.rings.now
        tracks = self.planner.tracks
        if self.out and now % self.setup.window == 0:
            held = {name for name in self.out if tracks[name].held}
            rows = ((self._candidate(row), row.rounds) for row in self.out.values())
            unpaid = self.residency.unpaid(rows, held, self._mix(), self._pace())
            for name, row in self.out.items():
                tracks[name].held = name in unpaid and not row.returning
        self.tally.held += sum(tracks[name].held for name in self.out)
        if self._head or not self.out or any(r.returning for r in self.out.values()):
            return
        if room - self._working(len(self.out) - 1) >= min(pages(r.context + 1) for r in self.out.values()):
            settled = [r for i, r in self.out.items() if tracks[i].state is not State.DEMOTING]
            rest = len(self.out)
            back = self.residency.returning(
                map(self._candidate, settled), room, lambda n, _: self._working(rest + n), now
            )
            for one in back[:1]:
                self.out[one.request_id].returning = True
                tracks[one.request_id].held = False

    def _candidate(self, row: Row) -> Candidate:
        name = row.job.name
        if name in self.out:
            x = self.draft_length(name)
        else:
            x = min(max(self.setup.draft_length, self._fair(row.context, 1)), self.setup.window - 2)
        chance = row.lengths.chance if row.rounds else self.seen.chance
        kept = (row.kept or self._kept(row)) / self.setup.page_bytes
        return Candidate(name, pages(row.context + 1), gain(chance, x), row.left, row.since, x, kept)

    def _mix(self) -> Mix:
        tracks = self.planner.tracks
        drafting = (self._candidate(r) for i, r in self.out.items() if not tracks[i].held)
        return Mix(plain=len(self.running)).drafting(drafting)

    def _pace(self) -> Pace:
        """As the engine has it: iterations as long as they are now."""
        reload = self.setup.page_bytes / self.setup.machine.link * self._distinct * self.crossing
        return Pace(self.throughput.iteration.value, 0.0, reload)
