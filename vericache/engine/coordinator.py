"""What happens in one iteration, for every request that is not a plain vLLM row.

The coordinator joins the pure planner with the resources it plans for: arena slots, host pages, device blocks. It
produces a ``StepPlan`` (rows and operations) and digests the step's result. It knows vLLM's ``Request`` but not its
scheduler; ``vericache.engine.scheduler`` writes the plan into vLLM's structures.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from time import monotonic
from typing import Any

from vllm.v1.request import Request

from compressors import MethodError
from scheduler.admission import Limits, LockStep, Staggered
from scheduler.draft_length import POLICIES
from scheduler.lifecycle import State
from scheduler.planner import Planner
from scheduler.throughput import Throughput
from vericache.config import VeriCacheConfig
from vericache.engine import certified
from vericache.engine.blocks import DeviceBlocks, ids
from vericache.engine.demotion import Demotion
from vericache.engine.detached import Detached
from vericache.engine.elastic import Elastic
from vericache.engine.eligibility import end_tokens
from vericache.engine.grammar import Grammars
from vericache.engine.losses import without_copy
from vericache.engine.needs import RoundNeeds
from vericache.engine.observe import EngineStats
from vericache.engine.ops import MEASURED, DraftRow, Load, Offload, StepReport, VerifyRow, WriteBack
from vericache.engine.plan import Bounds, Draft, StepPlan, Verify
from vericache.engine.prestore import Prestore
from vericache.engine.reservations import Reservations
from vericache.engine.residual import Residual
from vericache.engine.score_parts import ScoreParts
from vericache.engine.settings import MemoryPlan
from vericache.engine.tails import TailSizes
from vericache.engine.terms import Terms

UNKNOWN = -1  # stands for a draft in a verify row


class Coordinator:
    """Owns every detached request's record."""

    def __init__(
        self,
        settings: VeriCacheConfig,
        plan: MemoryPlan,
        blocks: DeviceBlocks,
        bounds: Bounds,
        texts: Mapping[str, Mapping[str, Sequence[int]]],
        grammars: Grammars,
    ) -> None:
        self.plan, self.blocks, self.bounds, self.texts = plan, blocks, bounds, texts
        self.grammars = grammars
        self.records: dict[str, Detached] = {}
        self.reserved = Reservations(plan, blocks, bounds.seats)
        self.prestore = Prestore(self.reserved)
        self.scores = ScoreParts(plan.host_pages * plan.block_tokens)  # of as much context as the host holds KV of
        self.stats = EngineStats()
        self.past: dict[str, Detached] = {}  # records of requests that became plain rows again
        self._folds: list[tuple[int, int]] = []  # (slot, strips) for the next step
        self._emptied: list[int] = []  # slots whose pages the workers can free
        self._ended, self._forgotten = list[str](), list[str]()
        self.configure(settings)

    def configure(self, settings: VeriCacheConfig) -> None:
        """Change policy, draft length, method or thresholds; only while no request is detached."""
        assert not self.records, f"settings change only while no request is detached, {len(self.records)} are"
        self.settings = settings
        self.throughput = Throughput(settings.iteration_seconds, settings.link_bytes_per_second)
        policy = LockStep(settings.draft_length + 1) if settings.policy == "lockstep" else Staggered()
        self.planner = Planner(settings.window, policy, settings.verify_tokens)
        self.reserved.sharing = settings.shared_verifies == "on"
        self.reserved.tails = TailSizes.of(self.plan.page_format, settings.recent, settings.window)
        self.residual = Residual(self.reserved, settings.ratio if settings.residual_reload == "on" else 0.0)
        self.demotion = Demotion(
            self.reserved, self.scores, settings.reuse_scores == "on", self.bounds, self.texts, settings.verify_tokens,
            self.residual.on,
        )  # fmt: skip
        self.terms = Terms(
            settings, self.bounds, self.texts, self.demotion.scoring_room, self.reserved, self.prestore, self.past
        )
        self.needs = RoundNeeds(
            self.records, self.planner, self.reserved, self.bounds, self.throughput, settings.tail_tokens, self.residual
        )
        self.elastic = Elastic(self)

    # -- leaving the device ----------------------------------------------------------------------------

    def detach(self, request: Request) -> bool:
        """Take everything the request needs to draft, all or nothing; False leaves it resident."""
        record = self.terms.open(request)
        if record is None:
            return False
        record.stored = self.prestore.hand_over(request.request_id)
        asked, record.since = self.terms.asked(request), self.planner.rings.now
        record.certified = certified.begin(asked.certified)
        record.lengths = POLICIES[asked.draft_policy](asked.config.draft_length, self.elastic.seen.chance)
        if past := self.past.pop(record.request_id, None):
            record.rounds, record.recoveries, record.lengths = past.rounds, past.recoveries, past.lengths
            record.rounds_before, record.certified = len(record.rounds), past.certified
        self.records[record.request_id] = record
        self.planner.demote(record.request_id)
        return True

    # -- planning one step -----------------------------------------------------------------------------

    def step(self, running: Iterable[Request], head_blocks: int) -> StepPlan:
        """Decide one iteration. ``head_blocks``: blocks the first waiting request needs to be admitted."""
        out = StepPlan(folds=self._folds, drops=self._emptied, ended=self._ended, forget=self._forgotten)
        self._folds, self._emptied, self._ended, self._forgotten = [], [], [], []
        for record in list(self.records.values()):
            state = self.planner.tracks[record.request_id].state
            if state is State.DEMOTING and not record.settling:
                if reason := self.demotion.step(record, out):
                    (out.recompute if record.anew else out.rejoin).append(record)
                    self.abandon(record, reason)
            elif state is State.CERTIFIED:
                certified.plan_row(record, out)
            elif state is State.VERIFYING:
                self._fits_host(record)  # for a round that begins ahead
            elif state is State.WAITING and not self._fits_host(record):
                out.recompute.append(record)
                self.abandon(record, "host_store_full")
        # Requests that are being served go before new ones, once they have waited long enough.
        reserved = 0 if self.planner.late else head_blocks
        self._forgotten += [p.row.row_id for p in out.probes]  # from the next step on
        out.before += self._store_ahead(running)
        self.residual.review(self.records.values())
        limits = Limits(self.throughput.iteration_ns, self.needs.transient_blocks(running, reserved))
        self.elastic.review(limits.pages)
        tick = self.planner.tick(self.needs, limits)
        out.before += [self._load(self.records[i]) for i in tick.loads]
        for request_id in tick.drafts:
            self._draft(self.records[request_id], out)
        for request_id, count in tick.verifies:
            self._verify(self.records[request_id], count, out)
        return out

    def _store_ahead(self, running: Iterable[Request]) -> list[Offload]:
        """Copies for prompts under way, as many as the link can take in an iteration."""
        if self.settings.mode == "off":
            return []
        link = self.throughput.bandwidth.value * self.throughput.iteration.value
        most = max(1, int(link / self.plan.block_bytes))
        window = self.settings.window
        spare = len(self.records) * self.plan.blocks_for(window)  # for what is drafting already
        return self.prestore.step(running, self.terms.leaves, window, spare, most)

    def _load(self, record: Detached) -> Load:
        self.stats.telemetry.count("vericache_shared_reload_bytes", record.here * self.plan.block_bytes)
        return self.residual.load(record)

    def _draft(self, record: Detached, out: StepPlan) -> None:
        round_ = self.planner.tracks[record.request_id].round
        assert round_ is not None
        before = round_.issued - 1
        if before == 0:
            own = self.bounds.own_rows
            record.shadow_id = record.request_id if own else record.row_id(f"draft{len(record.rounds)}")
            record.drafts = []
        assert record.shadow_id is not None
        row = DraftRow(record.shadow_id, record.request_id, record.slot, record.base)
        out.drafts.append(Draft(record, row, record.context + before, before))
        record.drafted_at = monotonic()

    def _verify(self, record: Detached, count: int, out: StepPlan) -> None:
        # Not all of them need be known: where a row keeps its state, the device has them.
        context, drafts = record.context, [*record.drafts, *[UNKNOWN] * (count - len(record.drafts))][:count]
        if drafts:
            self.stats.telemetry.sample("vericache_verify_wait_seconds", monotonic() - record.drafted_at)
        out.verifies.append(Verify(record, VerifyRow(record.request_id, record.slot, record.base), context, drafts))
        first, end = context // self.plan.block_tokens, self.plan.blocks_for(context + 1 + len(drafts))
        blocks, pages = ids(record.blocks)[first:end], record.host_pages[first:end]
        out.after.append(WriteBack(record.request_id, tuple(blocks), tuple(pages)))
        self._retire_shadow(record, out.forget)

    def _retire_shadow(self, record: Detached, where: list[str]) -> None:
        if record.shadow_id is not None and not self.bounds.own_rows:
            where.append(record.shadow_id)
        record.shadow_id, record.drafts = None, []
        self.grammars.rewind(record)

    def _fits_host(self, record: Detached) -> bool:
        """Host pages for the next round; fewer shorten it. False when not even one more token fits."""
        wanted = record.tokens + self.settings.window
        self.reserved.extend_host(record, wanted)
        if len(record.host_pages) * self.plan.block_tokens < record.tokens and self.prestore.forget_all():
            self.reserved.extend_host(record, wanted)  # what is copied ahead must not stand in the way
        return len(record.host_pages) * self.plan.block_tokens >= record.tokens

    # -- digesting one step ------------------------------------------------------------------------------

    def collect(self, plan: StepPlan, report: StepReport, sampled: Mapping[str, Sequence[int]]) -> None:
        """Take in what the workers sampled for our rows, before vLLM processes the output."""
        self.stats.digest(report)
        certified.count(plan, report, self.stats.telemetry)
        for transfer in report.transfers:
            if transfer.op in (Load.__name__, MEASURED):
                self.throughput.transferred(transfer.num_bytes, transfer.seconds)
        for draft in plan.drafts:
            record = draft.record
            if record.shadow_id == draft.row.row_id and self._is_live(record):
                (token,) = sampled[draft.row.row_id]
                record.drafts.append(token)
                ended = self.grammars.advance(record, token) or token in end_tokens(record.request)
                self.planner.drafted(record.request_id, last=ended)
        for verify in plan.verifies:
            if self._is_live(verify.record):
                drafted, accepted = len(verify.drafts), len(sampled[verify.record.request_id]) - 1
                verify.record.rounds.append((drafted, accepted))
                verify.record.lengths.observe(drafted, accepted)
                self.elastic.seen.observe(drafted, accepted)
                self.stats.telemetry.verified(drafted, accepted)

    def digest(self, plan: StepPlan, report: StepReport) -> tuple[list[Detached], list[Detached]]:
        """Settle a step after vLLM has processed its output. Returns (rejoin, recompute): requests that become
        plain rows again with their KV still in vLLM's blocks, and those whose KV is gone."""
        uncopied = without_copy(plan, report, self._holders, self.reserved)
        failed = {f.request_id for f in report.failures} | uncopied
        rejoin: list[Detached] = []
        recompute = [r for i in uncopied if (r := self._copy_failed(i, plan))]
        for record in plan.settling:
            if not self._is_live(record):
                continue
            if record.request_id in failed:
                self.scores.withdraw(record.known)
                (recompute if record.anew else rejoin).append(record)
                self.abandon(record, "compression_failed")
            else:
                self._settle(record, report)
        for verify in plan.verifies:
            record = verify.record
            if not self._is_live(record):
                continue
            if record.request_id in failed:  # the host copy lacks what this verify added
                recompute.append(record)
                self.abandon(record, "write_back_failed")
            elif record.returning and self._come_back(record):
                rejoin.append(record)
            elif record.wider is not None and self._compress_anew(record, record.wider):
                continue
            elif self.needs.tail_lasts(record) or self._extend_tail(record):
                self._go_on(record)
            elif not self._compress_anew(record):
                recompute.append(record)
                self.abandon(record, "no_scratch_blocks")
        for record in filter(certified.tail_is_full, [r.record for r in plan.certified if self._is_live(r.record)]):
            recompute.append(record)
            self._leave(record, "tail_full")
        return rejoin, recompute

    def _holders(self) -> Mapping[str, Collection[int]]:
        """The host pages of each request, block by block."""
        return self.prestore.held() | {r.request_id: r.host_pages for r in self.records.values()}

    def _copy_failed(self, request_id: str, plan: StepPlan) -> Detached | None:
        """A copy that the request, or another one with the same prefix, made ahead failed: all of them are made anew,
        or, if the request relies on it already, it is returned, abandoned."""
        self.prestore.forget(request_id)
        record = self.records.get(request_id)
        if record is None or record in plan.settling:
            return None
        if not record.settling and not record.filled_at:
            record.stored = 0
            return None
        self.abandon(record, "offload_failed")
        return record

    def _is_live(self, record: Detached) -> bool:
        return self.records.get(record.request_id) is record

    def _settle(self, record: Detached, report: StepReport) -> None:
        """The slot is filled: give the full KV's blocks back and wait for a round."""
        head_pages = report.compressed[record.request_id]
        self.stats.telemetry.count("vericache_recompressions" if record.anew else "vericache_demotions")
        self.stats.telemetry.count("vericache_reused_score_tokens", sum(part.tokens for part in record.known))
        for key, part in record.keep:
            self.scores.add(key, part)
        self.scores.release(record.known)
        record.known, record.keep = [], []
        if not record.anew:
            record.blocks = self.blocks.detach(record.request) + record.blocks
        self.reserved.give_blocks(record)
        self.reserved.trim(record, head_pages)
        record.filled_at = record.base = record.context
        record.folded = 0
        record.anew, record.settling, record.probes, record.probes_sent = False, False, None, 0
        record.wider, record.rounds_before = None, len(record.rounds)
        record.compressed_bytes = self.plan.compressed_bytes(head_pages)
        record.simulated_bytes = report.simulated.get(record.request_id)
        record.kept_bytes = report.kept.get(record.request_id, 0)
        record.full_bytes = record.context * self.plan.block_bytes // self.plan.block_tokens
        self.planner.demoted(record.request_id, record.context, record.certified is not None)

    def _extend_tail(self, record: Detached) -> bool:
        """Near its end a request gets a longer tail rather than a compression that pays for a few tokens."""
        left = self.needs.output_left(record)
        return left <= 2 * self.settings.window and self.reserved.extend_tail(
            record, record.context - record.filled_at + left + 1
        )

    def _go_on(self, record: Detached) -> None:
        """Another round: its blocks are given back, verified tokens leave the uncompressed tail for packed pages."""
        self.reserved.give_blocks(record)
        record.look_back(self.terms.asked(record.request).config.ratio_limit)
        if strips := self.reserved.fold(record):
            self._folds.append((record.slot, strips))
        self.planner.verified(record.request_id, record.context, self.needs.draft_limit(record.request_id))

    def _compress_anew(self, record: Detached, wider: float | None = None) -> bool:
        """The tail is long, or too little is kept: compress the context again while its full KV is on the device."""
        assert self.planner.tracks[record.request_id].round is None, "no round begins ahead of a compression"
        try:
            spec = self.terms.method(record.request)
        except MethodError:
            return False
        record.anew = self.reserved.refit(record, spec, wider)
        if record.anew:
            self.planner.demote(record.request_id)
        return record.anew

    # -- giving back ---------------------------------------------------------------------------------------

    def finish(self, request: Request) -> dict[str, Any]:
        """The request ended, in any state. Gives back what it owns and returns its summary."""
        self.prestore.forget(request.request_id)
        record = self.records.pop(request.request_id, None)
        if record is not None:
            self.planner.finish(record.request_id)
            self._release(record)
            summary = record.summary()
        else:
            reason = self.terms.resident_reason(request) or self.elastic.resident(
                request.request_id, self.terms.always(request)
            )
            past = self.past.pop(request.request_id, None)
            summary = past.summary(reason.text) if past else {"mode": "resident", "reason": reason.text}
            if past is None:
                self.stats.telemetry.count("vericache_fallbacks", label=reason.code)
        self.terms.forget(request.request_id)
        self.elastic.forget(request.request_id)
        return summary

    def _come_back(self, record: Detached) -> bool:
        """Promotion, right after a verify: its reload is in blocks already, which become vLLM's."""
        room = self.planner.tracks[record.request_id].round is None and self.elastic.has_room(record)
        if not (room and self.reserved.transient.keep(record.blocks)):  # others use them: its next reload is its own
            return False
        self.blocks.attach(record.request, record.blocks)
        record.blocks, record.returning, record.since = [], False, self.planner.rings.now
        self._leave(record, "room")
        return True

    def abandon(self, record: Detached, reason: str) -> None:
        """The request becomes a plain vLLM row again, because something failed."""
        record.recoveries += 1
        self._leave(record, reason)

    def _leave(self, record: Detached, reason: str) -> None:
        self.stats.telemetry.count("vericache_promotions", label=reason)
        del self.records[record.request_id]
        self.past[record.request_id] = record
        self.planner.reside(record.request_id)
        self._release(record)

    def _release(self, record: Detached) -> None:
        self._retire_shadow(record, self._forgotten)
        self.scores.release(record.known)
        self.scores.drop(record.keep)
        self._emptied.append(record.slot)
        self._ended.append(record.request_id)
        self.reserved.close(record)
