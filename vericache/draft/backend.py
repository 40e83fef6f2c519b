"""The composite attention backend: draft rows read the arena, every other row is the stock backend's.

A subclass registered over the stock backend (``register_backend`` on the same enum member), so that selection, KV cache
spec, page layout and every isinstance check stay stock. An impl that no VeriCache worker has attached (``draft is
None``) behaves exactly as its parent. ``backend_cpu`` and ``backend_cuda`` hold the composites.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadata, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vericache.draft.runtime import DraftRuntime, LayerHandle
from vericache.errors import UnsupportedError


class DraftMetadata:
    """Mixin of a metadata builder: draft rows get zero keys, so that the stock kernel can run over all rows."""

    vllm_config: Any
    layer_names: list[str]

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        runtime = self._runtime()
        if runtime is not None:
            common_attn_metadata = runtime.without_draft_keys(common_attn_metadata)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]

    def _runtime(self) -> DraftRuntime | None:
        layer = self.vllm_config.compilation_config.static_forward_context[self.layer_names[0]]
        handle = getattr(layer.impl, "draft", None)
        return handle.runtime if handle is not None else None


class DraftAttention:
    """Mixin of an impl: stock attention over all rows, then the arena's attention over the draft rows."""

    draft: LayerHandle | None = None
    alibi_slopes: Tensor | None
    sliding_window: int | tuple[int, int]
    sinks: Tensor | None
    logits_soft_cap: float
    kv_sharing_target_layer_name: str | None
    kv_cache_dtype: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float

    def fused_rope_kvcache_supported(self) -> bool:
        """A fused write to vLLM's pages would pass by the tails."""
        return False

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)  # type: ignore[misc]
        if self.draft is not None:
            self.draft.runtime.write(self.draft.index, key, value)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: AttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        draft = self.draft if attn_metadata is not None else None
        if draft is None or not draft.runtime.only_drafts:
            super().forward(  # type: ignore[misc]
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if draft is None:
            return output
        runtime, index = draft.runtime, draft.index
        heads = query.view(-1, self.num_heads, self.head_size)
        if runtime.observed:
            runtime.observe(index, heads, key.view(-1, self.num_kv_heads, self.head_size), kv_cache, self.scale)
        runtime.attend(index, heads, output.view(-1, self.num_heads, self.head_size), self.scale)
        return output


def composite(stock: type[AttentionBackend], module: str, name: str) -> type[AttentionBackend]:
    """A stock backend with draft rows, to be known as ``name`` in ``module``: vLLM finds backends by that path."""
    impl = type(f"{name}Impl", (DraftAttention, stock.get_impl_cls()), {"__module__": module})
    builder = type(f"{name}Builder", (DraftMetadata, stock.get_builder_cls()), {"__module__": module})
    ours = {"get_impl_cls": staticmethod(lambda: impl), "get_builder_cls": staticmethod(lambda: builder)}
    return type(name, (stock,), {"__module__": module, "__doc__": f"{stock.__name__} with draft rows.", **ours})


def override(member: AttentionBackendEnum, backend: type[AttentionBackend]) -> None:
    """Put a composite over a stock backend. Idempotent; before the model is built, in the worker."""
    register_backend(member, f"{backend.__module__}.{backend.__qualname__}")


def attach(layers: dict[str, Attention], runtime: DraftRuntime) -> None:
    """Connect every attention layer, in model order, to the worker's draft state.

    Raises:
        UnsupportedError: a layer whose attention the arena does not reproduce.
    """
    for index, (name, layer) in enumerate(layers.items()):
        impl = layer.impl
        if not isinstance(impl, DraftAttention):
            raise UnsupportedError(
                f"attention layer {name} uses {type(impl).__name__}, expected one of the backends that VeriCache "
                f"overrides (CPU_ATTN, FLASH_ATTN, TRITON_ATTN); choose it with --attention-backend"
            )
        for present, what in (
            (impl.alibi_slopes is not None, "ALiBi biases"),
            (impl.sliding_window not in (None, -1, (-1, -1)), f"a sliding window of {impl.sliding_window} tokens"),
            (impl.sinks is not None, "learned attention sinks"),
            (bool(impl.logits_soft_cap), "a soft cap on attention logits"),
            (impl.kv_sharing_target_layer_name is not None, "another layer's KV cache"),
            (is_quantized_kv_cache(impl.kv_cache_dtype), f"a {impl.kv_cache_dtype} KV cache"),
        ):
            if present:
                raise UnsupportedError(
                    f"attention layer {name} uses {what}, which drafting on a compressed KV cache does not support; "
                    f"run this model with plain vLLM"
                )
        impl.draft = LayerHandle(index, runtime)
