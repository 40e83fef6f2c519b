"""The composite over vLLM's CPU attention."""

from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vericache.draft.backend import DraftAttention, DraftMetadata, override


class DraftCPUMetadataBuilder(DraftMetadata, CPUAttentionMetadataBuilder):
    """See ``DraftMetadata``."""


class DraftCPUAttention(DraftAttention, CPUAttentionBackendImpl):
    """See ``DraftAttention``."""


class DraftCPUBackend(CPUAttentionBackend):
    """Keeps the stock name."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return DraftCPUAttention

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return DraftCPUMetadataBuilder


def register() -> None:
    """``CPU_ATTN`` itself, because ``CpuPlatform.get_attn_backend_cls`` ignores every other choice and resolves this
    member's path through the override table."""
    override(AttentionBackendEnum.CPU_ATTN, DraftCPUBackend)
