"""The composite over vLLM's CPU attention."""

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vericache.draft.backend import composite, override

DraftCPUBackend = composite(CPUAttentionBackend, __name__, "DraftCPUBackend")


def register() -> None:
    """``CPU_ATTN`` itself, because ``CpuPlatform.get_attn_backend_cls`` ignores every other choice and resolves this
    member's path through the override table."""
    override(AttentionBackendEnum.CPU_ATTN, DraftCPUBackend)
