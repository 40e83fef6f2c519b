"""vLLM's scheduler with draft-and-verify rounds: the seam between vLLM's loop and the coordinator.

Relies on ``Scheduler.schedule`` calling ``_build_kv_connector_meta`` (the last point at which rows can be added to a
``SchedulerOutput``) and then ``_update_after_schedule``; on ``update_from_output`` looking only at the ids in
``num_scheduled_tokens``, and on its calls of ``_update_request_with_output`` and ``_free_request``; on
``_preempt_request`` for requests that must be recomputed.
"""

import random
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import chain, islice
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vericache.engine import rows
from vericache.engine.blocks import DeviceBlocks, ids
from vericache.engine.connector import VeriCacheConnector, report_of
from vericache.engine.coordinator import Coordinator
from vericache.engine.detached import Detached
from vericache.engine.grammar import Grammars
from vericache.engine.losses import without_reload
from vericache.engine.observe import step_stats
from vericache.engine.ops import StepMetadata
from vericache.engine.plan import Bounds, StepPlan
from vericache.engine.settings import MemoryPlan, settings_of
from vericache.engine.share import Chosen
from vericache.engine.support import check_pool, check_supported
from vericache.engine.texts import probe_texts

MOST_STARTS = 64  # waiting requests that one step may admit: each of them is looked at
_PROBE_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)


class VeriCacheScheduler(AsyncScheduler):
    """Injects draft, verify and scoring rows; long requests leave ``running`` while they draft."""

    max_num_active_reqs: int
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_supported(self.vllm_config)
        assert isinstance(self.connector, VeriCacheConnector)
        self.connector.begin = self._begin
        self._plan = StepPlan()
        self._in_flight: deque[StepPlan] = deque()
        self._busy = False
        self._starting = 0  # waiting requests that this step may admit
        # Requests without a seed get one, in arrival order: vLLM's own --seed makes them reproducible.
        self._seeds = random.Random(self.vllm_config.model_config.seed)

    def _begin(self, share: Chosen) -> None:
        """The rest of the construction, which needs the arena's ``share``: the workers tell it after ``__init__`` and
        before the first request."""
        assert isinstance(self.connector, VeriCacheConnector)
        settings = settings_of(self.vllm_config)
        plan = MemoryPlan.of(self.vllm_config, self.kv_cache_config, share)
        v2 = self.use_v2_model_runner
        # On the V2 runner a detached request keeps its row state, so scoring rows need one that no request takes.
        scoring_rows = 1 if v2 else self.max_num_active_reqs
        self._seats = self.max_num_active_reqs - (scoring_rows if v2 and plan.drafts else 0)
        bounds = Bounds(
            self.max_model_len,
            self._seats,
            self.max_num_scheduled_tokens,
            self.vllm_config.max_concurrent_batches,
            scoring_rows,
            own_rows=v2,
        )
        if plan.drafts:
            check_pool(settings, plan, bounds)
        texts = probe_texts(self.vllm_config.model_config, settings)
        rows_at_once = self.max_num_running_reqs + settings.verify_tokens
        self.grammars = Grammars(self.structured_output_manager, rows_at_once)
        blocks = DeviceBlocks(self.kv_cache_manager)
        self.coordinator = Coordinator(settings, plan, blocks, bounds, texts, self.grammars)
        self.connector.telemetry = partial(step_stats, self.coordinator, self.log_stats)

    # -- requests --------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        params = request.sampling_params
        if params is not None and params.seed is None and params.temperature > 0:
            # A copy: in one process, several requests share their caller's object.
            request.sampling_params = copy(params)
            request.sampling_params.seed = self._seeds.getrandbits(62)
        super().add_request(request)
        if params is not None:
            # vLLM counts only with a speculative_config, and for at most num_speculative_tokens. The output carries it.
            request.spec_decode_metrics = RequestSpecDecodeMetrics.new(self.coordinator.settings.window)

    def get_request_counts(self) -> tuple[int, int]:
        running, waiting = super().get_request_counts()
        return running + len(self.coordinator.records), waiting

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Called exactly once for every request that ends, from whatever state."""
        assert isinstance(self.connector, VeriCacheConnector)
        self.connector.summarise(request.request_id, self.coordinator.finish(request))
        return super()._free_request(request, delay_free_blocks)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Detached requests hold KV of the old weights on host and device: they are recomputed like running ones."""
        if reset_running_requests:
            for record in list(self.coordinator.records.values()):
                self.coordinator.abandon(record, "cache_reset")
                self._recompute(record)
        emptied = super().reset_prefix_cache(reset_running_requests, reset_connector)
        if emptied:
            self.coordinator.prestore.forget_cached()
            self.coordinator.scores.withdraw_all()
        return emptied

    # -- scheduling --------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self.coordinator.throughput.step(time.monotonic(), self._busy)
        self._plan = self._make_plan() if self._pause_state != PauseState.PAUSED_ALL else StepPlan()
        budget, seats = self.max_num_scheduled_tokens, self.max_num_active_reqs
        self.max_num_scheduled_tokens = budget - self._plan.num_tokens
        # Admission only: max_num_running_reqs is the size of the runner's batch and asserted on.
        # What vLLM compares with it: running requests and paused streaming sessions.
        self.max_num_active_reqs = len(self.running) + self.num_waiting_for_streaming_input + self._starting
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens, self.max_num_active_reqs = budget, seats
        self._in_flight.append(self._plan)
        self._busy = output.total_num_scheduled_tokens > 0
        self.coordinator.reserved.fence.step_scheduled()
        self._observe(output)
        return output

    def _make_plan(self) -> StepPlan:
        taken = len(self.running) + self.num_waiting_for_streaming_input + len(self.coordinator.records)
        seats = max(0, self._seats - taken)
        if not self.coordinator.plan.drafts:  # all rows are vLLM's, which decides alone
            self._starting = seats
            return StepPlan()
        seats = min(MOST_STARTS, seats)
        waiting = list(islice(chain(self.kv_holding_waiting, self.waiting), seats))
        # Everything known so far is scheduled: the next row would be a decode row.
        ready = (r for r in self.running if not r.is_prefill_chunk and r.num_computed_tokens >= r.num_prompt_tokens)
        elastic = self.coordinator.elastic
        for request in elastic.leaving(ready, self.running, waiting):
            if self.coordinator.detach(request):
                self.running.remove(request)
        self._starting = elastic.may_start(waiting, self.running)
        blocks = self.coordinator.plan.blocks_for(waiting[0].num_tokens) if self._starting else 0
        plan = self.coordinator.step(self.running, blocks)
        self.running.extend(record.request for record in plan.rejoin)
        for record in plan.recompute:
            self._recompute(record)
        self.finished_req_ids.update(plan.forget)
        return plan

    def _build_kv_connector_meta(
        self, connector: KVConnectorBase_V1, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        assert isinstance(connector, VeriCacheConnector)
        plan = self._plan
        for verify in plan.verifies:
            rows.add_verify_row(
                scheduler_output,
                verify.record.request,
                ids(verify.record.blocks),
                verify.drafts,
                with_tokens=not self.use_v2_model_runner,
            )
        for each in plan.certified:  # as a verify row without drafts, over no blocks
            rows.add_verify_row(scheduler_output, each.record.request, (), [], with_tokens=True)
        for draft in plan.drafts:
            row_id = draft.row.row_id
            if draft.before or self.use_v2_model_runner:
                rows.add_draft_row(scheduler_output, row_id, draft.position, draft.before)
            else:
                request = draft.record.request
                tokens = list(request.all_token_ids[: draft.position + 1])
                params = rows.shadow_params(request.sampling_params)
                rows.add_new_row(scheduler_output, row_id, tokens, draft.position, [], params)
        for probe in plan.probes:
            count = len(probe.tokens) - probe.start
            row = probe.row
            rows.add_new_row(scheduler_output, row.row_id, probe.tokens, probe.start, row.blocks, _PROBE_PARAMS, count)
        ours = (plan.drafts, plan.verifies, plan.certified, plan.probes)
        typed = tuple(each.row for kind in ours for each in kind)
        metadata = StepMetadata(
            tuple(plan.drops), typed, tuple(plan.before), tuple(plan.after), tuple(plan.folds), tuple(plan.ended)
        )
        connector.stage(metadata)
        # Operations before the forward pass feed it (vLLM would otherwise start them after the launch).
        scheduler_output.has_sync_kv_loads |= metadata.needs_start
        return super()._build_kv_connector_meta(connector, scheduler_output)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        with _without(scheduler_output, self._plan):
            super()._update_after_schedule(scheduler_output)
        if any(d.record.request.use_structured_output for d in self._plan.drafts):
            scheduler_output.has_structured_output_requests = True
            # The mask of a draft depends on the draft before it, which a step in flight may still be sampling.
            scheduler_output.pending_structured_output_tokens |= self.coordinator.bounds.depth > 1

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Also masks the draft rows of this step (always the latest: vLLM schedules no step before it has the masks
        of the one before), except those whose request has ended meanwhile."""
        drafts = [d for d in self._plan.drafts if d.record.shadow_id == d.row.row_id]
        shadows = {d.row.row_id: d.record.request for d in drafts if d.row.row_id not in self.requests}
        with self.grammars.drafting(self.requests, shadows):
            return super().get_grammar_bitmask(scheduler_output)

    # -- results -------------------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        plan = self._in_flight.popleft()
        report = report_of(model_runner_output.kv_connector_output)
        records, reserved = self.coordinator.records, self.coordinator.reserved
        # A verify row that ran on a reload that failed is dropped before anyone reads its output.
        for record in without_reload(plan, report, records.values(), reserved):
            self.coordinator.abandon(record, "reload_failed")
            self._recompute(record)
        index, tokens = model_runner_output.req_id_to_index, model_runner_output.sampled_token_ids
        wanted = [*(d.row.row_id for d in plan.drafts), *(v.row.row_id for v in plan.verifies)]
        self.coordinator.collect(plan, report, {r: list(tokens[index[r]]) for r in wanted})
        with _without(scheduler_output, plan):
            outputs = super().update_from_output(scheduler_output, model_runner_output)
        rejoin, recompute = self.coordinator.digest(plan, report)
        self.running.extend(record.request for record in rejoin)
        for record in recompute:
            self._recompute(record)
        self.coordinator.reserved.fence.step_done()
        return outputs

    def _recompute(self, record: Detached) -> None:
        """The request's KV is gone: vLLM prefills it again. Output still in flight is dropped, never delivered."""
        self._preempt_request(record.request, time.monotonic(), drop_stale_output=True)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        if request.request_id not in self.coordinator.records:
            return super()._update_request_with_output(request, new_token_ids, is_stale)
        # AsyncScheduler would hash the request's blocks into the prefix cache; transient blocks never go there.
        new_token_ids, stopped = Scheduler._update_request_with_output(self, request, new_token_ids)
        request.num_output_placeholders -= len(new_token_ids)
        return new_token_ids, stopped

    def make_spec_decoding_stats(self, *args: Any, **kwargs: Any) -> SpecDecodingStats | None:
        """vLLM's counters assume at most num_speculative_tokens (0 here) accepted tokens; ours are in the summary."""
        return None

    def _observe(self, output: SchedulerOutput) -> None:
        coordinator = self.coordinator
        stats = coordinator.stats
        stats.iterations += 1
        stats.holds(coordinator.blocks.used * coordinator.plan.block_bytes)
        if coordinator.settings.trace_iterations:
            stats.remember(self._plan, coordinator, output.num_scheduled_tokens)


@contextmanager
def _without(scheduler_output: SchedulerOutput, plan: StepPlan) -> Iterator[None]:
    """Hide draft and scoring rows from vLLM's books: it advances every request whose id is scheduled."""
    scheduled = scheduler_output.num_scheduled_tokens
    internal = [*(d.row.row_id for d in plan.drafts), *(p.row.row_id for p in plan.probes)]
    hidden = {row_id: scheduled.pop(row_id) for row_id in internal if row_id in scheduled}
    try:
        yield
    finally:
        scheduled.update(hidden)
