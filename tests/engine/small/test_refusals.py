"""What the design cannot serve is refused at start, with a sentence that says why."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import EngineArgs, SamplingParams
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from benchmarks.engine import tokens
from tests.engine.conftest import SMALL_LAYERS
from tests.engine.harness import Harness
from vericache.config import KEY, VeriCacheConfig, load
from vericache.draft import backend, backend_cpu
from vericache.draft.formats import Plain, page_format
from vericache.engine.eligibility import resident_reason
from vericache.engine.plan import Bounds
from vericache.engine.settings import MemoryPlan
from vericache.engine.support import check_bitwise, check_kernels, check_pool, check_supported
from vericache.errors import ConfigError, UnsupportedError
from vericache.plugin import engine_arguments

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "intermediate_size": 128,
}
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "alibi": (
        {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "n_layer": 2, "n_head": 4, **SMALL},
        "ALiBi",
    ),
    "windows": (
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_key_value_heads": 2,
         "sliding_window": 256, **SMALL},
        "sliding-window",
    ),
    "mixed windows": (
        {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "num_key_value_heads": 2, "head_dim": 16,
         "sliding_window": 256, **SMALL},
        "sliding-window",
    ),
    "mamba": (
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 16, "conv_kernel": 4, "expand": 2,
         **SMALL},
        "Mamba",
    ),
    "mla": (
        {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "kv_lora_rank": 32,
         "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
         "num_key_value_heads": 4, **SMALL},
        "latent attention",
    ),
}  # fmt: skip

PAGES = Plain(1, 1, torch.float16)


@pytest.mark.parametrize("name", MODELS)
def test_unsupported_models(name: str, tmp_path: Path) -> None:
    config, why = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 1024, **config}))
    arguments = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=512)
    with pytest.raises(UnsupportedError, match=why):
        check_supported(arguments.create_engine_config())


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
            "speculative",
        ),
        ({"logits_processors": ["os:getcwd"]}, "logits processors"),
    ],
)
def test_unsupported_vllm_features(folder: Path, arguments: dict[str, Any], why: str) -> None:
    config = EngineArgs(model=str(folder), enforce_eager=True, **arguments).create_engine_config()
    with pytest.raises(UnsupportedError, match=why):
        check_supported(config)


def test_pages_that_do_not_fit_the_model(folder: Path) -> None:
    """Before an engine starts."""
    settings = VeriCacheConfig(page_format="kivi4", page_tokens=48)
    config = EngineArgs(
        model=str(folder), enforce_eager=True, additional_config={KEY: settings.model_dump(mode="json")}
    ).create_engine_config()
    with pytest.raises(ConfigError, match="page_tokens to a multiple of 32"):
        check_supported(config)


def test_widths_for_another_number_of_layers(folder: Path) -> None:
    """Before an engine starts."""
    settings = VeriCacheConfig(page_format="turboquant_mixed", layer_bits=((4, 2),) * 3)
    config = EngineArgs(
        model=str(folder), enforce_eager=True, additional_config={KEY: settings.model_dump(mode="json")}
    ).create_engine_config()
    with pytest.raises(ConfigError, match=f"layer_bits has pairs for 3 layers, the model has {SMALL_LAYERS} layers"):
        check_supported(config)


@pytest.mark.parametrize(
    ("attribute", "value", "why"),
    [
        ("alibi_slopes", object(), "ALiBi"),
        ("sliding_window", 128, "sliding window of 128"),
        ("sinks", object(), "attention sinks"),
        ("logits_soft_cap", 30.0, "soft cap"),
        ("kv_sharing_target_layer_name", "layers.0", "another layer"),
        ("kv_cache_dtype", "fp8_e4m3", "a fp8_e4m3 KV cache"),
    ],
)
def test_unsupported_layers(engine: Harness, attribute: str, value: Any, why: str) -> None:
    """Every property of a layer's attention that the arena does not reproduce."""
    layers = engine.scheduler.vllm_config.compilation_config.static_forward_context
    impl = object.__new__(backend_cpu.DraftCPUBackend.get_impl_cls())
    impl.__dict__.update({**next(iter(layers.values())).impl.__dict__, attribute: value})
    with pytest.raises(UnsupportedError, match=why):
        backend.attach({"layers.0.attn": SimpleNamespace(impl=impl)}, engine.worker.runtime)


@pytest.mark.parametrize(
    ("backend_name", "head_size", "device", "why"),
    [
        ("CPU_ATTN", 64, "cpu", "GPUs only"),
        ("FLASH_ATTN", 64, "cuda", "head size 64"),
        ("FLASHINFER", 128, "cuda", "not known"),
        ("FLASH_ATTN", 128, "cuda", None),
        ("TRITON_ATTN", 64, "cuda", None),
    ],
)
def test_bitwise_where_it_cannot_hold(backend_name: str, head_size: int, device: str, why: str | None) -> None:
    member = AttentionBackendEnum[backend_name]
    if why is None:
        check_bitwise(member, head_size, device)
    else:
        with pytest.raises(UnsupportedError, match=why):
            check_bitwise(member, head_size, device)


def test_another_backend_is_refused(engine: Harness) -> None:
    with pytest.raises(UnsupportedError, match="SimpleNamespace"):
        backend.attach({"layers.0.attn": SimpleNamespace(impl=SimpleNamespace())}, engine.worker.runtime)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_blocks": 32}, "KV pool holds 31 blocks .* needs 32"),
        ({"host_pages": 20}, "host_memory_gib"),
        ({"step_tokens": 300}, "max_num_batched_tokens is 300"),
    ],
)
def test_memory_too_small_for_one_request(changes: dict[str, int], why: str) -> None:
    """A pool too small for one full KV is refused at start: no request could ever be verified."""
    sizes = {"num_blocks": 33, "host_pages": 32, "arena_pages": 1000} | changes
    step_tokens = sizes.pop("step_tokens", 1024)
    plan = MemoryPlan(layers=2, kv_heads=2, block_tokens=32, block_bytes=1, page_format=PAGES, **sizes)
    bounds = Bounds(max_model_len=1024, seats=8, step_tokens=step_tokens, depth=1, scoring_rows=8, own_rows=False)
    with pytest.raises(ConfigError, match=why):
        check_pool(VeriCacheConfig(), plan, bounds)
    check_pool(VeriCacheConfig(), MemoryPlan(2, 2, 32, 1, 33, PAGES, 1000, 32), Bounds(1024, 8, 1024, 1, 8, False))


def test_what_the_gpu_kernels_cannot_hold() -> None:
    with pytest.raises(UnsupportedError, match="head size is 80"):
        check_kernels(Plain(32, 80, torch.float16))
    with pytest.raises(ConfigError, match="page_tokens is 24"):
        check_kernels(Plain(24, 128, torch.float16))
    check_kernels(Plain(8, 64, torch.float16))
    with pytest.raises(ConfigError, match=r"packs 4 bits.*32 tokens.*page_tokens 16; set page_tokens to 32"):
        check_kernels(page_format("turboquant4", 16, 64, torch.float16))
    with pytest.raises(ConfigError, match=r"packs 2 bits.*heads of size 32; set page_format to plain"):
        check_kernels(page_format("turboquant2", 64, 32, torch.float16))
    check_kernels(page_format("turboquant4", 32, 32, torch.float16))
    check_kernels(page_format("turboquant3", 64, 64, torch.float16))
    with pytest.raises(ConfigError, match="rotatekv2 has no attention kernel"):
        check_kernels(page_format("rotatekv2", 64, 64, torch.float16))


def test_no_row_left_for_requests() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs is 1"):
        check_pool(VeriCacheConfig(), MemoryPlan(2, 2, 32, 1, 33, PAGES, 1000, 32), Bounds(1024, 0, 1024, 1, 1, True))


@pytest.mark.parametrize("name", ["scheduler_cls", "worker_cls", "kv_transfer_config"])
def test_conflicting_engine_arguments(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        engine_arguments(load({}, env={}), {name: "somebody.elses.Class"})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"has_encoder_inputs": True}, "multimodal"),
        ({"prompt_embeds": object()}, "prompt embeddings"),
        ({"lora_request": object()}, "LoRA"),
        ({"resumable": True}, "streaming input"),
        ({"sampling_params": SamplingParams(thinking_token_budget=4)}, "thinking_token_budget"),
        ({"sampling_params": None}, "pooling"),
        ({"num_prompt_tokens": 99}, "min_prompt_tokens 100"),
        ({"max_tokens": 2}, "max_tokens 2"),
        ({}, None),
    ],
)
def test_requests_that_stay_resident(changes: dict[str, Any], why: str | None) -> None:
    request: Any = SimpleNamespace(
        **{
            "sampling_params": SamplingParams(),
            "num_prompt_tokens": 100,
            "max_tokens": 3,
            "has_encoder_inputs": False,
            "prompt_embeds": None,
            "lora_request": None,
            "resumable": False,
            **changes,
        }
    )
    reason = resident_reason(request, 100)
    assert (reason is None) if why is None else (reason is not None and why in reason.text)


def test_the_response_says_why_a_request_stayed_resident(engine: Harness, texts: dict[str, list[int]]) -> None:
    """Not refused, not silent."""
    (output,) = engine.generate([texts["summarise"]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    report = output.kv_transfer_params["vericache"]
    assert report["mode"] == "resident"
    assert "max_tokens 2" in report["reason"]
    assert len(tokens([output])[0]) == 2
