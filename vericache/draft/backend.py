"""The composite attention backend: draft rows read the arena, every other row is the stock backend's.

A subclass registered over the platform's own backend (``register_backend`` on the same enum member), so that
selection, KV cache spec, page layout and every isinstance check stay stock. An impl that no VeriCache worker has
attached (``draft is None``) behaves exactly as its parent.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vericache.draft.runtime import DraftRuntime, LayerHandle
from vericache.errors import UnsupportedError


class DraftCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Gives draft rows zero keys, so that the stock kernel can run over all rows untouched (its other rows are
    bitwise those of a batch without them)."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        runtime = self._runtime()
        rows = runtime.draft_rows if runtime is not None else None
        if rows is not None:
            seq_lens = common_attn_metadata.seq_lens.clone()
            seq_lens[rows] = 0
            common_attn_metadata = dataclasses.replace(common_attn_metadata, seq_lens=seq_lens)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def _runtime(self) -> DraftRuntime | None:
        layer = self.vllm_config.compilation_config.static_forward_context[self.layer_names[0]]
        handle = getattr(layer.impl, "draft", None)
        return handle.runtime if handle is not None else None


class DraftCPUAttentionImpl(CPUAttentionBackendImpl):
    """Stock attention over all rows, then the arena's attention over the draft rows."""

    draft: LayerHandle | None = None

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        if self.draft is not None:
            self.draft.runtime.write(self.draft.index, key, value)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        draft = self.draft if attn_metadata is not None else None
        if draft is None or not draft.runtime.only_drafts:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        if draft is None:
            return output
        runtime, index = draft.runtime, draft.index
        heads = query.view(-1, self.num_heads, self.head_size)
        if runtime.observed:
            runtime.observe(index, heads, key.view(-1, self.num_kv_heads, self.head_size), kv_cache, self.scale)
        if runtime.draft_rows is not None:
            runtime.attend(index, heads, output.view(-1, self.num_heads, self.head_size), self.scale)
        return output


class DraftCPUAttentionBackend(CPUAttentionBackend):
    """vLLM's CPU attention with draft rows. Keeps the stock name, see the module's docstring."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return DraftCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return DraftCPUAttentionMetadataBuilder


def register() -> None:
    """Put the composite over the platform's backend. Idempotent; before the model is built, in the worker.

    ``CPU_ATTN`` itself, because ``CpuPlatform.get_attn_backend_cls`` ignores every other choice and resolves
    this member's path through the override table.
    """
    register_backend(
        AttentionBackendEnum.CPU_ATTN, f"{DraftCPUAttentionBackend.__module__}.{DraftCPUAttentionBackend.__qualname__}"
    )


def attach(layers: dict[str, Attention], runtime: DraftRuntime) -> None:
    """Connect every attention layer, in model order, to the worker's draft state.

    Raises:
        UnsupportedError: a layer whose attention the arena does not reproduce.
    """
    for index, (name, layer) in enumerate(layers.items()):
        impl = layer.impl
        if not isinstance(impl, DraftCPUAttentionImpl):
            raise UnsupportedError(
                f"attention layer {name} uses {type(impl).__name__}, expected vLLM's CPU attention; "
                f"VeriCache drafts through the platform's standard backend only"
            )
        for present, what in (
            (impl.alibi_slopes is not None, "ALiBi biases"),
            (impl.sliding_window != -1, f"a sliding window of {impl.sliding_window} tokens"),
            (impl.sinks is not None, "learned attention sinks"),
            (impl.logits_soft_cap > 0, "a soft cap on attention logits"),
            (impl.kv_sharing_target_layer_name is not None, "another layer's KV cache"),
            (impl.is_fp8_kv_cache, f"a {impl.kv_cache_dtype} KV cache"),
        ):
            if present:
                raise UnsupportedError(
                    f"attention layer {name} uses {what}, which drafting on a compressed KV cache does not support; "
                    f"run this model with plain vLLM"
                )
        impl.draft = LayerHandle(index, runtime)
