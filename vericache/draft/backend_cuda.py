"""The composites over vLLM's GPU backends. Imported where there is a GPU only."""

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from vericache.draft.backend import DraftAttention, DraftMetadata, override


class DraftFlashMetadataBuilder(DraftMetadata, FlashAttentionMetadataBuilder):
    """See ``DraftMetadata``."""


class DraftFlashAttention(DraftAttention, FlashAttentionImpl):
    """See ``DraftAttention``."""


class DraftFlashBackend(FlashAttentionBackend):
    """Keeps the stock name."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return DraftFlashAttention

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return DraftFlashMetadataBuilder


class DraftTritonMetadataBuilder(DraftMetadata, TritonAttentionMetadataBuilder):
    """See ``DraftMetadata``."""


class DraftTritonAttention(DraftAttention, TritonAttentionImpl):
    """See ``DraftAttention``."""


class DraftTritonBackend(TritonAttentionBackend):
    """Keeps the stock name."""

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        return DraftTritonAttention

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        return DraftTritonMetadataBuilder


def register() -> None:
    """Over the stock members: ``CudaPlatform`` resolves the chosen member's class through the override table."""
    override(AttentionBackendEnum.FLASH_ATTN, DraftFlashBackend)
    override(AttentionBackendEnum.TRITON_ATTN, DraftTritonBackend)
