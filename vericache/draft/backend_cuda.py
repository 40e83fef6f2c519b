"""The composites over vLLM's GPU backends."""

from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

from vericache.draft.backend import composite, override

DraftFlashBackend = composite(FlashAttentionBackend, __name__, "DraftFlashBackend")
DraftTritonBackend = composite(TritonAttentionBackend, __name__, "DraftTritonBackend")


def register() -> None:
    """Over the stock members: ``CudaPlatform`` resolves the chosen member's class through the override table."""
    override(AttentionBackendEnum.FLASH_ATTN, DraftFlashBackend)
    override(AttentionBackendEnum.TRITON_ATTN, DraftTritonBackend)
