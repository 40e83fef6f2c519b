"""As test_contracts.py, for what VeriCache relies on where there is a GPU: the V2 runner and its attention backends."""

import inspect
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl
from vllm.v1.attention.backends.registry import _ATTN_OVERRIDES, AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu import cudagraph_utils, input_batch
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker
from vllm.v1.worker.gpu_worker import Worker

from vericache.draft import backend_cuda
from vericache.draft.backend import DraftAttention, DraftMetadata
from vericache.draft.triton_step import PAD_SLOT


def source(thing: object) -> str:
    return inspect.getsource(thing)


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (GPUModelRunner.update_requests, ["self", "scheduler_output"]),
        (GPUModelRunner.prepare_attn, ["self", "input_batch"]),
        (GPUModelRunner.sample, ["self", "hidden_states", "input_batch", "grammar_output"]),
        (
            GPUModelRunner.prepare_inputs,
            ["self", "scheduler_output", "batch_req_state", "batch_desc", "num_active_loras"],
        ),
        (BlockTables.append_block_ids, ["self", "req_index", "new_block_ids", "overwrite"]),
        (Sampler.__call__, ["self", "logits", "input_batch"]),
        (Worker.initialize_from_config, ["self", "kv_cache_config"]),
    ],
    ids=lambda x: getattr(x, "__qualname__", ""),
)
def test_signatures(function: object, expected: list[str]) -> None:
    assert parameters(function) == expected


def test_the_steps_of_a_forward_pass_come_in_this_order() -> None:
    """States are updated, inputs and attention prepared, metadata built, operations run, and then the model."""
    text = source(GPUModelRunner.execute_model)
    steps = ["self.add_requests(", "self.update_requests(", "self.prepare_inputs(", "self.prepare_attn(input_batch)",
             "self.model_state.prepare_attn(", "self.kv_connector.pre_forward(", "run_fullgraph("]  # fmt: skip
    places = [text.index(step) for step in steps]
    assert places == sorted(places)
    assert "if scheduler_output.has_sync_kv_loads" in source(ActiveKVConnector.pre_forward)
    assert "self.kv_connector.wait_for_save()" in source(ActiveKVConnector.post_forward)


def test_is_profile_means_no_graph_and_nothing_else() -> None:
    """Steps with scoring rows are run with it."""
    text = source(GPUModelRunner.execute_model)
    assert "need_eager=is_profile or skip_compiled" in text
    assert "if dummy_run and is_profile and not valid_dummy_state_slots" in text
    assert "is_padding=not is_profile" in text.split("InputBatch.make_dummy(")[1]
    assert text.count("is_profile") == 4  # the parameter, and these


def test_a_cached_row_keeps_its_blocks() -> None:
    """A verify row's table is begun anew by setting ``num_blocks`` to 0 before."""
    assert "overwrite=False" in source(GPUModelRunner.update_requests)
    assert "self.num_blocks.np[i, req_index] if not overwrite else 0" in source(BlockTables.append_block_ids)


def test_drafts_are_read_from_the_request_states() -> None:
    assert "self.req_states.draft_tokens" in source(GPUModelRunner.prepare_inputs)
    assert "draft_tokens.shape[-1]" in source(input_batch.combine_sampled_and_draft_tokens)
    assert "self.decode_query_len" in source(GPUModelRunner.prepare_inputs)
    for name in ("num_computed_tokens", "total_len", "last_sampled_tokens", "all_token_ids", "draft_tokens"):
        assert f"self.{name} = " in source(RequestState.__init__)


def test_what_a_sampled_token_changes() -> None:
    """``rewind_rounds`` takes exactly this back."""
    text = source(GPUModelRunner.postprocess_sampled)
    for name in ("num_computed_tokens", "last_sampled_tokens", "all_token_ids", "total_len"):
        assert f"self.req_states.{name}" in text
    assert "output_bin_counts = self.sampler.penalties_state.output_bin_counts" in text
    stores = source(input_batch).split("def _post_update_kernel(")[1].split("def post_update(")[0].count("tl.store(")
    assert stores == 5


def test_captures_go_through_the_metadata_builder() -> None:
    """That is where the runtime learns of a batch that vLLM made up."""
    assert "model_state.prepare_attn(" in source(cudagraph_utils.prepare_inputs_to_capture)
    text = source(build_attn_metadata)
    assert "attn_group.build_metadata_for_cudagraph_capture(" in text
    assert "attn_group.build_metadata(" in text
    assert "self.build(" in source(AttentionMetadataBuilder.build_for_cudagraph_capture)


def test_grammar_masks_know_the_longest_verify() -> None:
    wanted = {"max_num_logits", "vocab_size", "device", "mask_stride", "num_bonus_tokens"}
    assert wanted <= set(parameters(StructuredOutputsWorker.__init__))
    assert "StructuredOutputsWorker(" in source(GPUModelRunner.load_model)


@pytest.mark.parametrize("backend", [FlashAttentionBackend, TritonAttentionBackend])
def test_backends_write_kv_before_attention(backend: type) -> None:
    assert backend.forward_includes_kv_cache_update is False  # type: ignore[attr-defined]


@pytest.mark.parametrize("impl", [FlashAttentionImpl, TritonAttentionImpl])
def test_pages_hold_keys_and_values_side_by_side(impl: type) -> None:
    """``SideBySideLayout`` reads them."""
    text = source(impl.do_kv_cache_update)  # type: ignore[attr-defined]
    assert "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)" in text
    assert "slot_mapping" in parameters(impl.do_kv_cache_update)  # type: ignore[attr-defined]


def test_overrides_are_what_the_gpu_platform_resolves() -> None:
    spec = find_spec("vllm.platforms.cuda")  # cannot be imported without CUDA
    assert spec is not None
    assert spec.origin is not None
    assert ".get_class()" in Path(spec.origin).read_text()


def test_the_slot_of_what_is_not_written() -> None:
    assert PAD_SLOT == PAD_SLOT_ID


@pytest.mark.parametrize(
    ("name", "stock"), [("FLASH_ATTN", FlashAttentionBackend), ("TRITON_ATTN", TritonAttentionBackend)]
)
def test_composites_are_found_by_their_path(name: str, stock: type) -> None:
    member = AttentionBackendEnum[name]
    before = dict(_ATTN_OVERRIDES)
    try:
        backend_cuda.register()
        found = member.get_class()
    finally:
        _ATTN_OVERRIDES.clear()
        _ATTN_OVERRIDES.update(before)
    assert issubclass(found, stock)
    assert found.get_name() == stock.get_name()
    assert found.get_impl_cls().__mro__[1:3] == (DraftAttention, stock.get_impl_cls())
    assert found.get_builder_cls().__mro__[1:3] == (DraftMetadata, stock.get_builder_cls())
