"""The vLLM symbols VeriCache relies on, one test per symbol: another vLLM version fails here, not in an output."""

import dataclasses
import inspect

import pytest
import torch
import vllm
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.entrypoints.common.offline import OfflineInferenceMixin
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.model_executor.layers.attention import Attention, attention
from vllm.model_executor.layers.rotary_embedding import Phi3LongRoPEScaledRotaryEmbedding, RotaryEmbedding, get_rope
from vllm.model_executor.models import llama
from vllm.outputs import CompletionOutput
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import cpu_attn, registry
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.engine.core import EngineCore
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput, SamplerOutput
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, BatchUpdate
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID
from vllm.v1.sample.sampler import Sampler
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vericache.engine.rotary import shared_rotary
from vericache.engine.sampling import PLACEHOLDER
from vericache.engine.support import check_version
from vericache.errors import UnsupportedError


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)


def source(thing: object) -> str:
    return inspect.getsource(thing)


def fields(cls: type) -> set[str]:
    return {f.name for f in dataclasses.fields(cls)}


def test_version(monkeypatch: pytest.MonkeyPatch) -> None:
    check_version()
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    with pytest.raises(UnsupportedError, match=r"0\.33\.0"):
        check_version()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (Scheduler.schedule, ["self", "throttle_prefills"]),
        (Scheduler._build_kv_connector_meta, ["self", "connector", "scheduler_output"]),
        (Scheduler._update_after_schedule, ["self", "scheduler_output"]),
        (Scheduler.update_from_output, ["self", "scheduler_output", "model_runner_output"]),
        (AsyncScheduler._update_request_with_output, ["self", "request", "new_token_ids", "is_stale"]),
        (Scheduler._free_request, ["self", "request", "delay_free_blocks"]),
        (Scheduler._preempt_request, ["self", "request", "timestamp", "drop_stale_output"]),
        (Scheduler.get_request_counts, ["self"]),
        (Scheduler.reset_prefix_cache, ["self", "reset_running_requests", "reset_connector"]),
        (KVCacheManager.pop_blocks_for_free, ["self", "request"]),
        (KVCacheManager.get_block_ids, ["self", "request_id"]),
        (SingleTypeKVCacheManager.pop_blocks_for_free, ["self", "request_id"]),
        (BlockPool.get_new_blocks, ["self", "num_blocks"]),
        (BlockPool.free_blocks, ["self", "ordered_blocks"]),
        (GPUModelRunner._prepare_inputs, ["self", "scheduler_output", "num_scheduled_tokens"]),
        (GPUModelRunner._sample, ["self", "logits", "spec_decode_metadata"]),
        (GPUModelRunner._calc_spec_decode_metadata, ["self", "num_draft_tokens", "cu_num_scheduled_tokens"]),
        (Sampler.forward, ["self", "logits", "sampling_metadata", "predict_bonus_token", "logprobs_mode_override"]),
        (CPUWorker.init_device, ["self"]),
        (CPUWorker.determine_available_memory, ["self"]),
        (cpu_attn.CPUAttentionMetadataBuilder.build,
         ["self", "common_prefix_len", "common_attn_metadata", "fast_build"]),
        (cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update,
         ["self", "layer", "key", "value", "kv_cache", "slot_mapping"]),
        (KVConnectorBase_V1.start_load_kv, ["self", "forward_context", "kwargs"]),
        (KVConnectorBase_V1.build_connector_worker_meta, ["self"]),
        (KVConnectorBase_V1.get_kv_connector_stats, ["self"]),
        (Scheduler.get_grammar_bitmask, ["self", "scheduler_output"]),
        (StructuredOutputManager.grammar_bitmask,
         ["self", "requests", "structured_output_request_ids", "scheduled_spec_decode_tokens"]),
        (StructuredOutputManager._get_constraint_bounds, ["self", "request", "spec_tokens", "spec_tokens_committed"]),
        (OfflineInferenceMixin._render_and_add_requests, ["self", "prompts", "params", "lora_requests", "priorities"]),
        (AuthenticationMiddleware.verify_token, ["self", "headers"]),
    ],
    ids=lambda v: getattr(v, "__qualname__", ""),
)  # fmt: skip
def test_signature(function: object, expected: list[str]) -> None:
    assert parameters(function) == expected


def test_rows_can_be_added_when_the_connector_builds_its_metadata() -> None:
    """``schedule`` seals the output in this order: output made, connector metadata, books updated."""
    text = source(Scheduler.schedule)
    made, meta, books = (
        text.index(s) for s in ("SchedulerOutput(", "_build_kv_connector_meta(", "self._update_after_schedule(")
    )
    assert made < meta < books


def test_a_request_has_blocks_and_a_count_of_cached_ones() -> None:
    """What ``DeviceBlocks.attach`` puts back is what this takes; blocks behind the count get their hashes."""
    text = source(SingleTypeKVCacheManager.pop_blocks_for_free)
    assert "self.req_to_blocks.pop(request_id" in text
    assert "self.num_cached_block.pop(request_id" in text
    assert "self.num_cached_block.get(request.request_id, 0)" in source(SingleTypeKVCacheManager.cache_blocks)


def test_unknown_rows_are_skipped_in_the_output() -> None:
    """Draft and scoring rows are not in ``Scheduler.requests``."""
    text = source(Scheduler.update_from_output)
    assert "request = self.requests.get(req_id)" in text
    assert "if request is None or request.is_finished():" in text


def test_stale_output_is_dropped() -> None:
    """What ``_recompute`` relies on for verify rows that ran on a failed reload."""
    assert "if output_is_stale and request.drop_stale_output:" in source(Scheduler.update_from_output)


def test_seats_are_admission_only() -> None:
    text = source(Scheduler.schedule)
    assert "if num_running >= self.max_num_active_reqs:" in text
    assert "num_running = len(self.running) + self.num_waiting_for_streaming_input" in text
    assert text.index("request_queue = self.kv_holding_waiting") < text.index("request_queue = self.waiting")
    assert "assert len(self.running) <= self.max_num_running_reqs" in text


def test_resumed_rows_get_a_new_block_table() -> None:
    text = source(GPUModelRunner._update_states)
    assert "req_state.block_ids = new_block_ids" in text
    assert "scheduled_req_ids - resumed_req_ids" in text


def test_finished_rows_are_forgotten_by_the_runner() -> None:
    assert "for req_id in scheduler_output.finished_req_ids:" in source(GPUModelRunner._update_states)


def test_the_cpu_runner_is_a_gpu_runner() -> None:
    """The class swap needs the same instance layout."""
    assert issubclass(CPUModelRunner, GPUModelRunner)
    assert "_prepare_inputs" not in CPUModelRunner.__dict__
    assert "_sample" not in CPUModelRunner.__dict__


def test_workers_tell_the_scheduler_their_arena_before_any_request() -> None:
    """Memory is divided, the scheduler built, the handshake made, in this order; the worker asks its connector."""
    text = source(EngineCore.__init__)
    order = (
        "_initialize_kv_caches(",
        "Scheduler(",
        "get_kv_connector_handshake_metadata",
        "set_xfer_handshake_metadata",
    )
    places = [text.index(each) for each in order]
    assert places == sorted(places)
    assert "connector.get_handshake_metadata()" in source(Worker.get_kv_connector_handshake_metadata)
    assert "self.set_xfer_handshake_metadata(" in source(KVConnectorBase_V1.set_xfer_handshake_metadata_pp_aware)


def test_empty_steps_reach_the_connector() -> None:
    assert "self.kv_connector_no_forward(scheduler_output, self.vllm_config)" in source(GPUModelRunner.execute_model)


def test_aborts_meet_a_step_between_forward_and_output() -> None:
    text = source(EngineCore.step)
    assert text.index("self._process_aborts_queue()") < text.index("self.scheduler.update_from_output(")


def test_output_structures() -> None:
    assert {"req_id", "prompt_token_ids", "sampling_params", "block_ids", "num_computed_tokens"} <= fields(
        NewRequestData
    )
    assert {
        "req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens", "all_token_ids"
    } <= fields(CachedRequestData)  # fmt: skip
    assert {
        "num_scheduled_tokens", "total_num_scheduled_tokens", "scheduled_spec_decode_tokens", "has_sync_kv_loads"
    } <= fields(SchedulerOutput)  # fmt: skip
    assert "kv_connector_worker_meta" in fields(KVConnectorOutput)
    assert {"req_id_to_index", "sampled_token_ids", "kv_connector_output"} <= fields(ModelRunnerOutput)
    assert {"sampled_token_ids", "logprobs_tensors"} <= fields(SamplerOutput)
    assert "seq_lens" in fields(CommonAttentionMetadata)


def test_sampling_metadata_fields() -> None:
    """Every field is either expanded per row or known to be independent of rows; a new one must be looked at."""
    assert fields(SamplingMetadata) == {
        "temperature", "all_greedy", "all_random", "top_p", "top_k", "generators", "max_num_logprobs", "no_penalties",
        "prompt_token_ids", "frequency_penalties", "presence_penalties", "repetition_penalties", "output_token_ids",
        "allowed_token_ids_mask", "bad_words_token_ids", "logitsprocs", "logprob_token_ids", "spec_token_ids",
        "thinking_budget_state_holder",
    }  # fmt: skip


def test_builtin_logits_processors_need_only_the_row_count() -> None:
    kinds = [p.__name__ for p in BUILTIN_LOGITS_PROCESSORS]
    assert kinds == ["MinTokensLogitsProcessor", "LogitBiasLogitsProcessor", "MinPLogitsProcessor"]
    assert {len(parameters(p)) for p in BUILTIN_LOGITS_PROCESSORS} == {3}  # config, device, pin memory
    assert parameters(BatchUpdate) == ["batch_size", "removed", "added", "moved"]


def test_rejected_places_are_dropped() -> None:
    assert int(getattr(PLACEHOLDER_TOKEN_ID, "value", PLACEHOLDER_TOKEN_ID)) == PLACEHOLDER


def test_gumbel_op_is_keyed_by_seed_and_token() -> None:
    """Same seed, same sample, whatever the row or the batch; other seeds, other samples."""
    logits = torch.zeros(6, 1000)
    seeds = torch.tensor([5, 6, 5, 7, 8, 9])
    out = torch.ops._C.fused_gumbel_argmax(logits, seeds)
    assert out[0] == out[2]
    assert len(set(out.tolist())) == 5
    assert torch.ops._C.fused_gumbel_argmax(logits[:1], seeds[:1])[0] == out[0]


def test_grammars_of_drafts() -> None:
    """Masks are made in the order of the rows, for every id in ``Scheduler.requests`` that is structured; the parallel
    path ignores drafts; a mask that needs tokens still in flight is made after them."""
    text = source(Scheduler.get_grammar_bitmask)
    assert "self.requests.get(req_id)" in text
    assert "req.use_structured_output and not req.is_prefill_chunk" in text
    text = source(StructuredOutputManager.grammar_bitmask)
    assert "> self.fill_bitmask_parallel_threshold" in text
    assert "if self._grammar_bitmask is None" in text
    assert "scheduler_output.pending_structured_output_tokens" in source(EngineCore.step_with_batch_queue)


def test_stats_and_acceptance_reach_the_api_process() -> None:
    """The connector's stats are taken after the step's requests have been freed; a finished sequence carries its
    ``spec_decode_metrics`` (ours are set in ``add_request``)."""
    text = source(Scheduler.update_from_output)
    assert text.index("self._free_request(") < text.index("self.connector.get_kv_connector_stats()")
    assert "request.spec_decode_metrics.observe(" in text
    assert RequestSpecDecodeMetrics.new(3).histogram == [0, 0, 0, 0]
    assert "spec_decode_metrics" in fields(CompletionOutput)


def test_an_override_of_the_stock_backend_is_what_the_platform_resolves() -> None:
    assert "AttentionBackendEnum.CPU_ATTN.get_path()" in source(CpuPlatform.get_attn_backend_cls)
    assert "_ATTN_OVERRIDES" in source(registry.AttentionBackendEnum.get_path)


def test_kv_update_is_separate_from_attention() -> None:
    """Tails are written in ``do_kv_cache_update``, before the layer's attention runs."""
    assert cpu_attn.CPUAttentionBackend.forward_includes_kv_cache_update is False
    assert "do_kv_cache_update" in source(attention)


def test_zero_key_rows_leave_the_others_bitwise_alone() -> None:
    """The composite backend rests on this: a row without keys in the middle of a batch changes no other row."""
    from vllm import _custom_ops as ops

    torch.manual_seed(0)
    heads, kv_heads, dim, block, isa = 6, 2, 64, 32, "vec"
    cache = torch.randn(8, kv_heads, 2 * block, dim)
    keys, values = cache.chunk(2, dim=2)
    table = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32)
    query = torch.randn(6, heads, dim)

    def attend(lens: list[int], starts: list[int], rows: list[int], tokens: list[int]) -> torch.Tensor:
        out = torch.full((len(tokens), heads, dim), 7.0)
        start, seq = torch.tensor(starts, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32)
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lens), num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, seq_lens=seq,
            dtype=torch.float32, query_start_loc=start, causal=True, sliding_window_size=-1, isa=isa,
            enable_kv_split=False, dynamic_causal=None, kv_cache_dtype="auto",
        )  # fmt: skip
        ops.cpu_attention_with_kv_cache(
            query=query[tokens], key_cache=keys, value_cache=values, output=out, query_start_loc=start, seq_lens=seq,
            scale=0.125, causal=True, alibi_slopes=None, sliding_window=-1, block_table=table[rows], softcap=0,
            scheduler_metadata=metadata, s_aux=None, dynamic_causal=None, k_scale=1.0, v_scale=1.0,
            kv_cache_dtype="auto",
        )  # fmt: skip
        return out

    both = attend([40, 0, 50], [0, 1, 2, 6], [0, 1, 2], [0, 1, 2, 3, 4, 5])
    alone = attend([40, 50], [0, 1, 5], [0, 2], [0, 2, 3, 4, 5])
    assert torch.equal(both[[0, 2, 3, 4, 5]], alone)
    assert (both[1] == 7.0).all()  # not even zeroed: the arena must always write it


def rotary_model(*ropes: nn.Module | None) -> tuple[nn.Module, list[Attention]]:
    """Layers that hold their rotary embedding beside ``attn``, as vLLM's models do."""
    model, layers = nn.ModuleList(), []
    for rope in ropes:
        layer, attn = nn.Module(), Attention.__new__(Attention)
        nn.Module.__init__(attn)
        layer.attn = attn
        if rope is not None:
            layer.rotary_emb = rope
        model.append(layer)
        layers.append(attn)
    return model, layers


ROPES = {
    "default": {},
    "partial": {"partial_rotary_factor": 0.5},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32},
    "multimodal": {"mrope_section": [4, 2, 2]},
}  # fmt: skip


def rope_of(name: str, neox: bool = True, base: float = 10000.0) -> nn.Module:
    with set_current_vllm_config(VllmConfig()):
        return get_rope(16, 64, neox, {"rope_type": "default", "rope_theta": base, **ROPES[name]}, torch.float32)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("name", ["default", "partial", "yarn", "llama3"])
def test_compressors_turn_keys_as_the_model_does(name: str, neox: bool) -> None:
    rope = rope_of(name, neox)
    rotary = shared_rotary(*rotary_model(rope, rope))
    assert rotary is not None
    keys, positions = torch.randn(5, 2, 16), torch.tensor([3, 0, 40, 63, 3])
    _, turned = rope.forward_native(positions, keys.clone().flatten(1), keys.clone().flatten(1))
    turned = turned.view(5, 2, 16).transpose(0, 1)
    torch.testing.assert_close(rotary.turn(keys.transpose(0, 1), positions), turned)
    torch.testing.assert_close(rotary.back(turned, positions), keys.transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_a_model_without_one_plain_rotary_embedding() -> None:
    default, other = rope_of("default"), rope_of("default", base=500.0)
    assert shared_rotary(*rotary_model(default, other)) is None
    assert shared_rotary(*rotary_model(default, None)) is None
    assert shared_rotary(*rotary_model(None)) is None
    assert shared_rotary(nn.ModuleList(), rotary_model(default)[1]) is None
    assert shared_rotary(*rotary_model(rope_of("multimodal"))) is None
    assert not issubclass(Phi3LongRoPEScaledRotaryEmbedding, RotaryEmbedding)


def test_a_layer_holds_its_rotary_embedding_beside_its_attention() -> None:
    text = source(llama.LlamaAttention)
    assert "self.rotary_emb = get_rope(" in text
    assert "self.attn = attn_cls(" in text
