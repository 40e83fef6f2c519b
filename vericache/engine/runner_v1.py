"""Row hooks for vLLM's V1 model runner: where draft, verify and probe rows differ from ordinary ones.

Overrides ``GPUModelRunner._prepare_inputs`` (slot mappings, spec-decode metadata) and ``GPUModelRunner._sample``.
``speculative_config`` stays None: with it vLLM would size every buffer and graph for 1 + x tokens per row.
"""

import numpy as np
from torch import Tensor
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vericache.draft.runtime import HostRuntime
from vericache.engine.connector import kv_worker
from vericache.engine.ops import DraftRow, StepMetadata
from vericache.engine.sampling import RequestRow, sample


class VeriCacheModelRunner(CPUModelRunner):
    """vLLM's CPU runner with draft rows. An existing runner becomes one by class assignment, so there is no
    constructor; both attributes are set by ``_prepare_inputs`` before anything reads them."""

    _logits_positions: list[int]  # true position of each logits row's input token
    _parents: dict[str, str]  # draft row -> the request it drafts for

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray
    ) -> tuple[Tensor, SpecDecodeMetadata | None, int]:
        logits_indices, spec_metadata, width = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        metadata = scheduler_output.kv_connector_metadata
        ends = np.cumsum(num_scheduled_tokens, dtype=np.int32)
        worker = kv_worker()
        if worker is not None and isinstance(metadata, StepMetadata):
            batch = self.input_batch
            starts = [0, *ends.tolist()]
            found = worker.match(metadata, batch.req_ids, starts)
            assert isinstance(worker.runtime, HostRuntime)
            positions = self.positions[: starts[-1]].tolist() if any(found.slots) else []
            worker.runtime.begin(found.slots, starts, positions, found.observed)
            # Draft rows own no block, but their block-table row can hold a former owner's ids.
            slot_mapping = batch.block_table[0].slot_mapping.gpu
            for lo, hi, skipped in zip(starts, starts[1:], found.unwritten, strict=False):
                if skipped:
                    slot_mapping[lo:hi] = PAD_SLOT_ID
            self._parents = {row.row_id: row.parent_id for row in metadata.rows if isinstance(row, DraftRow)}
            drafts = scheduler_output.scheduled_spec_decode_tokens
            if drafts:
                counts = np.array([len(drafts.get(r, ())) for r in batch.req_ids], dtype=np.int32)
                spec_metadata = self._calc_spec_decode_metadata(counts, ends)
                logits_indices, width = spec_metadata.logits_indices, int(counts.max()) + 1
        else:
            self._parents = {}
        self._logits_positions = self.positions[logits_indices].tolist()
        return logits_indices, spec_metadata, width

    def _sample(self, logits: Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None) -> SamplerOutput:
        assert logits is not None
        batch = self.input_batch
        batch.update_async_output_token_ids()
        rows, start = [], 0
        tokens = spec_decode_metadata.draft_token_ids.tolist() if spec_decode_metadata is not None else []
        counts = spec_decode_metadata.num_draft_tokens if spec_decode_metadata is not None else [0] * batch.num_reqs
        for req_id, count in zip(batch.req_ids, counts, strict=True):
            rows.append(self._request_row(req_id, tokens[start : start + count]))
            start += count
        return sample(self.sampler, logits, batch.sampling_metadata, rows, self._logits_positions, batch.vocab_size)

    def _request_row(self, req_id: str, drafts: list[int]) -> RequestRow:
        """A draft row samples with its parent's parameters on its parent's history and its own drafts."""
        state = self.requests[req_id]
        parent_id = self._parents.get(req_id)
        if parent_id is None:
            return RequestRow(state.sampling_params, state.prompt_token_ids or (), state.output_token_ids, drafts)
        parent = self.requests[parent_id]
        history = [*parent.output_token_ids, *state.output_token_ids]
        return RequestRow(parent.sampling_params, parent.prompt_token_ids or (), history, is_draft=True)
