"""Which plain rows are demoted, which detached requests come back, and how many waiting requests may begin: the numbers
behind ``scheduler.residency``, read from the coordinator's books."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.v1.request import Request

from scheduler.draft_length import Estimate
from scheduler.lifecycle import State
from scheduler.residency import AHEAD, PATIENCE, Candidate, Mix, Pace, Residency, gain
from vericache.engine.detached import Detached
from vericache.engine.eligibility import NO_PAY, POOLS_FULL, ROOM, Reason

if TYPE_CHECKING:
    from vericache.engine.coordinator import Coordinator


class Elastic:
    """Decides; the coordinator moves. ``seen`` is the chance of a right draft over all requests, the prior of each."""

    def __init__(self, coordinator: "Coordinator") -> None:
        self._coordinator = coordinator
        self.policy = Residency(coordinator.settings.window)
        self.seen = Estimate(decay=0.98)
        self._unpaid: set[str] = set()  # plain rows that a demotion would not have paid for
        self._quiet = -PATIENCE  # iteration in which the policy found nothing
        self._head = 0  # blocks the first waiting request needs
        self._room = 0  # blocks there are for transient KV, at the last step

    # -- leaving the device ----------------------------------------------------------------------------

    def leaving(
        self, ready: Iterable[Request], running: Sequence[Request], waiting: Sequence[Request]
    ) -> list[Request]:
        """Those of the ``ready`` plain rows that leave the device now: whoever always drafts, and the policy's victims
        when blocks run short. ``waiting``: the requests that would begin next."""
        found, able = self._coordinator, list(ready)
        if found.settings.mode == "off":
            return []
        always = [r for r in able if found.terms.leaves(r)]
        if always or found.settings.mode == "draft":
            return always
        return self._victims(able, running, waiting)

    def _victims(
        self, ready: Sequence[Request], running: Sequence[Request], waiting: Sequence[Request]
    ) -> list[Request]:
        found, needs = self._coordinator, self._coordinator.needs
        now, drafts = found.planner.rings.now, found.settings.draft_length
        self._head = needs.soon(waiting[0]) if waiting and not found.planner.late else 0
        room = needs.transient_blocks(running, 0) + self._under_way()
        held = needs.working_blocks((), drafts) if found.records else 0
        short = self._head + held - room
        if short <= 0 or now - self._quiet < PATIENCE:
            return []
        able = {r.request_id: r for r in ready if not found.terms.always(r) and found.terms.resident_reason(r) is None}
        largest = max((r.tokens for r in found.records.values()), default=0)

        def working(count: int, pages: int) -> int:
            tokens = max(largest, pages * found.plan.block_tokens)
            return needs.working(tokens, len(found.records) + count, drafts) - held

        lost = (0, 0) if self._head or not running else (1, needs.soon(running[-1]))
        chosen = self.policy.victims(
            map(self._plain, able.values()), short, working, now, self._mix(running), self._pace(),
            joining=[needs.soon(r) for r in waiting[:AHEAD]] if self._head else [], lost=lost,
            most=self._room_for(able.values()),
        )  # fmt: skip
        victims = [able[c.request_id] for c in chosen]
        if not victims:
            self._quiet = now
            self._unpaid.update(able)
        elif not found.reserved.fits([found.terms.want(r) for r in victims]):
            self._quiet, victims = now, []
        return victims

    def _room_for(self, able: Iterable[Request]) -> int:
        """How many requests as large as the largest of the ``able`` ones may leave before arena or host are full."""
        largest = max(able, key=lambda r: r.num_tokens, default=None)
        if largest is None:
            return 0
        want = self._coordinator.terms.want(largest)
        fits = self._coordinator.reserved.fits
        return next(n for n in range(AHEAD, -1, -1) if n == 0 or fits([want] * n))

    def may_start(self, waiting: Sequence[Request], running: Sequence[Request]) -> int:
        """How many of the ``waiting`` requests, the first ones, may begin their prompts in this step.

        One that has to stay in vLLM's blocks must leave those that rounds work in: it would hold up everyone who drafts
        until its end.
        """
        if not waiting:
            return 0
        found, needs = self._coordinator, self._coordinator.needs
        leaving = [r for r in running if found.terms.leaves(r)]
        wants = [found.terms.want(r) for r in leaving]
        room, count = needs.transient_blocks(running, 0), 0
        for head in waiting:
            leaves = found.terms.leaves(head)
            more = [found.terms.want(head)] if leaves else []
            room -= needs.soon(head)
            if (found.records or leaving) and room < needs.working_blocks(leaving, found.settings.draft_length):
                can_leave = leaves and found.reserved.fits(wants + more)
                if found.planner.late or not can_leave:
                    break
            leaving, wants = leaving + [head] * leaves, wants + more
            count += 1
        return count

    # -- coming back -----------------------------------------------------------------------------------

    def review(self, room: int) -> None:
        """Once per step: mark who comes back after its next verify, and whose drafts do not pay. ``room``: blocks for
        transient KV."""
        found = self._coordinator
        self._room = room
        own = [r for r in found.records.values() if not found.terms.always(r.request)]
        if not own:
            return
        now = found.planner.rings.now
        if now % found.settings.window == 0:
            self._judge(own)
        if self._head or any(r.returning for r in own):
            return  # one after the other: room is looked at again at the verify
        if room - self._working(-1) >= min(found.plan.blocks_for(r.tokens) for r in own):
            settled = [r for r in own if found.planner.tracks[r.request_id].state is not State.DEMOTING]
            back = self.policy.returning(map(self._detached, settled), room, lambda n, _: self._working(n), now)
            for candidate in back[:1]:
                found.records[candidate.request_id].returning = True
                found.planner.tracks[candidate.request_id].held = False

    def has_room(self, record: Detached) -> bool:
        """Whether a request may keep the blocks of its reload. Else it drafts on."""
        record.returning = self._room - self._coordinator.needs.soon(record.request) >= self._working(-1)
        return record.returning

    def _judge(self, own: Sequence[Detached]) -> None:
        """Hold those whose rounds would not pay, until there is room for them or it looks otherwise."""
        tracks = self._coordinator.planner.tracks
        held = {r.request_id for r in own if tracks[r.request_id].held}
        rows = ((self._detached(record), len(record.rounds)) for record in own)
        unpaid = self.policy.unpaid(rows, held, self._mix(()), self._pace())
        for record in own:
            tracks[record.request_id].held = record.request_id in unpaid and not record.returning

    def resident(self, request_id: str, always: bool) -> Reason:
        """Why a request that may draft ended as a plain row."""
        if always:
            return POOLS_FULL
        return NO_PAY if request_id in self._unpaid else ROOM

    def forget(self, request_id: str) -> None:
        self._unpaid.discard(request_id)

    # -- what the policy sees --------------------------------------------------------------------------

    def _plain(self, request: Request) -> Candidate:
        found = self._coordinator
        past = found.past.get(request.request_id)
        x = max(found.settings.draft_length, found.needs.fair_length(request.num_tokens, 1))
        x = min(x, found.settings.window - 2)
        chance = past.lengths.chance if past is not None else self.seen.chance
        pages = found.plan.blocks_for(request.num_tokens)
        left = request.max_tokens - request.num_output_tokens
        since = past.since if past is not None else -found.settings.window
        kept = pages * found.terms.asked(request).config.ratio * found.plan.packed_share
        return Candidate(request.request_id, pages, gain(chance, x), left, since, x, kept)

    def _detached(self, record: Detached) -> Candidate:
        found = self._coordinator
        x = found.needs.draft_length(record.request_id)
        pages, left = found.plan.blocks_for(record.tokens), found.needs.output_left(record)
        kept = record.compressed_bytes / found.plan.block_bytes
        return Candidate(record.request_id, pages, gain(record.lengths.chance, x), left, record.since, x, kept)

    def _mix(self, running: Sequence[Request]) -> Mix:
        tracks = self._coordinator.planner.tracks
        drafting = (r for r in self._coordinator.records.values() if not tracks[r.request_id].held)
        return Mix(plain=len(running)).drafting(map(self._detached, drafting))

    def _pace(self) -> Pace:
        """Iterations are taken to be as long as they are now, however much KV they read: a demotion, which makes them
        shorter, looks no better than it is."""
        found = self._coordinator
        throughput = found.throughput
        # A page that several need is reloaded once, and what the arena holds of it not at all.
        moved = found.plan.block_bytes * found.reserved.host.share * found.residual.crossing
        return Pace(throughput.iteration.value, 0.0, moved / throughput.bandwidth.value)

    def _working(self, change: int) -> int:
        """Blocks that rounds need with ``change`` detached requests more."""
        found = self._coordinator
        rows = len(found.records) + change
        tokens = max((r.tokens for r in found.records.values()), default=0)
        return found.needs.working(tokens, rows, found.settings.draft_length) if rows > 0 else 0

    def _under_way(self) -> int:
        """Blocks that demotions under way will give back."""
        found = self._coordinator
        demoting = (r for r in found.records.values() if found.planner.tracks[r.request_id].state is State.DEMOTING)
        return sum(found.plan.blocks_for(r.context) for r in demoting if not r.anew)
