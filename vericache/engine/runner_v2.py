"""Row hooks for vLLM's V2 model runner: where draft, verify and scoring rows differ from ordinary ones.

A request keeps one row state (slot, token ids, sampling state) all its life. A draft row is that row over the arena:
the runner advances its state as for any sampled token, and the verify row's step first takes the round back and makes
it the drafts to verify (``rewind_rounds``), all on the device. Sampling is vLLM's own, whose noise is keyed by (seed,
position): a draft is accepted when it equals the verifier's sample.

Overrides ``GPUModelRunner.load_model``, ``execute_model``, ``update_requests``, ``prepare_inputs``, ``prepare_attn``
and ``sample``. ``speculative_config`` stays None: with it vLLM would capture graphs for 1 + x tokens per row only.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import BatchReqState, GPUModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

from vericache.device import to_device
from vericache.draft.device import DeviceBatch, DeviceRuntime
from vericache.draft.triton_step import accept_rows, rewind_rounds
from vericache.engine.connector import kv_worker
from vericache.engine.ops import CertifiedRow, ProbeRow, StepMetadata
from vericache.engine.settings import settings_of


class DraftRows(GPUModelRunner):
    """The hooks. An existing runner becomes one by class assignment, so there is no constructor; ``_metadata`` is set
    by ``prepare_inputs`` before anything reads it."""

    _metadata: StepMetadata | None
    decode_query_len: int

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        settings = settings_of(self.vllm_config)
        width = settings.window  # no round drafts as many
        states = self.req_states
        states.draft_tokens = torch.zeros(states.max_num_reqs, width, dtype=torch.int64, device=self.device)
        self.structured_outputs_worker = StructuredOutputsWorker(
            max_num_logits=self.max_num_reqs + settings.verify_tokens,
            vocab_size=self.vocab_size,
            device=self.device,
            mask_stride=width,
            num_bonus_tokens=self.model_state.num_new_sampled_tokens_per_step,
        )

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        metadata = scheduler_output.kv_connector_metadata
        if isinstance(metadata, StepMetadata) and any(isinstance(r, ProbeRow | CertifiedRow) for r in metadata.rows):
            # A scoring pass looks at queries in Python, and certified attention is launched row by row, which no
            # captured graph does. Of ``is_profile`` a real batch only gets what is wanted here: no graph.
            kwargs["is_profile"] = True
        return super().execute_model(scheduler_output, *args, **kwargs)

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        cached, metadata = scheduler_output.scheduled_cached_reqs, scheduler_output.kv_connector_metadata
        if (worker := kv_worker()) is not None and isinstance(metadata, StepMetadata):
            worker.start(metadata)
        # Verify rows: vLLM appends to a row's block table, theirs begins anew.
        for req_id in cached.resumed_req_ids:
            self.block_tables.num_blocks.np[:, self.req_states.req_id_to_index[req_id]] = 0
        super().update_requests(scheduler_output)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if drafts:
            indices = [self.req_states.req_id_to_index[r] for r in drafts]
            numbers = torch.tensor([indices, list(map(len, drafts.values()))], dtype=torch.int32)
            requests, counts = to_device(numbers, self.device)
            states = self.req_states
            rewind_rounds(
                requests, counts, states.num_computed_tokens.gpu, states.total_len.gpu, states.last_sampled_tokens,
                states.all_token_ids.gpu, states.draft_tokens, self.sampler.penalties_state.output_bin_counts,
            )  # fmt: skip

    def prepare_inputs(
        self, scheduler_output: SchedulerOutput, batch_req_state: BatchReqState, *args: Any, **kwargs: Any
    ) -> InputBatch:
        metadata = scheduler_output.kv_connector_metadata
        self._metadata = metadata if isinstance(metadata, StepMetadata) else None
        drafts, usual = scheduler_output.scheduled_spec_decode_tokens, self.decode_query_len
        if drafts:
            self.decode_query_len = 1 + max(map(len, drafts.values()))  # size of a block in expand_idx_mapping
        try:
            return super().prepare_inputs(scheduler_output, batch_req_state, *args, **kwargs)
        finally:
            self.decode_query_len = usual

    def prepare_attn(self, input_batch: InputBatch) -> tuple[tuple[Tensor, ...], Tensor]:
        block_tables, slot_mappings = super().prepare_attn(input_batch)
        worker = kv_worker()
        if worker is not None and self._metadata is not None:
            assert isinstance(worker.runtime, DeviceRuntime)
            starts = input_batch.query_start_loc_np.tolist()
            found = worker.match(self._metadata, input_batch.req_ids, starts)
            last = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens - 1
            rows = input_batch.num_reqs_after_padding
            batch = DeviceBatch(
                input_batch.num_reqs,
                input_batch.query_start_loc[: rows + 1],
                input_batch.positions[: input_batch.num_tokens_after_padding],
                input_batch.seq_lens[:rows],
                slot_mappings[0],
                last.tolist(),
                starts,
            )
            worker.runtime.begin(found.slots, found.unwritten, batch, found.observed)
        return block_tables, slot_mappings

    def sample(
        self, hidden_states: Tensor, input_batch: InputBatch, grammar_output: GrammarOutput | None
    ) -> tuple[SamplerOutput, Tensor, Tensor]:
        if input_batch.num_draft_tokens == 0:
            return super().sample(hidden_states, input_batch, grammar_output)
        logits = self.model.compute_logits(hidden_states[input_batch.logits_indices])
        if grammar_output is not None:
            # A draft that the grammar rejects meets a mask without it, so it never equals the sample.
            self.structured_outputs_worker.apply_grammar_bitmask(
                logits, input_batch, grammar_output.structured_output_request_ids, grammar_output.grammar_bitmask
            )
        output = self.sampler(logits, input_batch)
        _accept(output, input_batch)
        return output, output.num_sampled, output.num_rejected


def _accept(output: SamplerOutput, batch: InputBatch) -> None:
    """From one sample per logits row to the accepted ones of every batch row, in place."""
    samples = output.sampled_token_ids.view(-1)
    widths = np.diff(batch.cu_num_logits_np[: batch.num_reqs + 1])
    tokens = samples.new_full((batch.num_reqs, int(widths.max())), -1)
    accept_rows(samples, batch.input_ids[batch.logits_indices], batch.cu_num_logits, tokens, output.num_sampled)
    output.sampled_token_ids = tokens
    logits = batch.cu_num_logits[1 : batch.num_reqs + 1] - batch.cu_num_logits[: batch.num_reqs]
    # A chunk of a prompt samples nothing and rejects nothing.
    output.num_rejected = torch.where(output.num_sampled > 0, logits - output.num_sampled, 0).to(
        output.num_rejected.dtype
    )


def with_draft_rows(runner: GPUModelRunner) -> None:
    """Give an existing runner the hooks."""
    runner.__class__ = type("VeriCacheModelRunner", (DraftRows, type(runner)), {})
