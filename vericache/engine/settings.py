"""The configuration as scheduler and workers see it, and the memory plan both derive from it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from vericache.config import VeriCacheConfig
from vericache.draft.formats import PageFormat, page_format
from vericache.engine.share import ON_CPU, Chosen
from vericache.errors import ConfigError, UnsupportedError


def settings_of(vllm_config: VllmConfig) -> VeriCacheConfig:
    """The VeriCache configuration of an engine."""
    return VeriCacheConfig.of(vllm_config.additional_config)


def pages_of(settings: VeriCacheConfig, spec: FullAttentionSpec) -> PageFormat:
    """The arena's pages for layers like this one."""
    return page_format(settings.page_format, settings.page_tokens, spec.head_size, spec.dtype, settings.layer_bits)


def sizes(settings: VeriCacheConfig, specs: Sequence[FullAttentionSpec]) -> tuple[float, float]:
    """Bytes of one token's KV in layers like these, and what the arena takes of it for a kept token."""
    token = sum(spec.page_size_bytes / spec.block_size for spec in specs)
    pages = pages_of(settings, specs[0])
    packed = sum(spec.num_kv_heads for spec in specs) * pages.page_bytes / pages.page_tokens
    return token, min(1.0, packed / token)


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes that scheduler and workers must agree on; both compute them from the same KV cache config."""

    layers: int
    kv_heads: int
    block_tokens: int
    block_bytes: int  # one block of every layer
    num_blocks: int
    page_format: PageFormat  # of the arena's head pages
    arena_pages: int
    host_pages: int
    share: Chosen = ON_CPU  # how arena_pages came about

    @classmethod
    def of(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, share: Chosen) -> "MemoryPlan":
        """``share`` of the KV memory is the arena; with 0 there is no host store either.

        Raises UnsupportedError for anything but one group of full-attention layers.
        """
        settings = settings_of(vllm_config)
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1 or not isinstance(spec := groups[0].kv_cache_spec, FullAttentionSpec):
            kinds = ", ".join(sorted({type(g.kv_cache_spec).__name__ for g in groups}))
            raise UnsupportedError(
                f"the model has {len(groups)} KV cache groups ({kinds}), expected one group of full-attention layers; "
                f"hybrid, sliding-window, Mamba and MLA models need plain vLLM"
            )
        layers = len(groups[0].layer_names)
        block_bytes = layers * spec.page_size_bytes
        pages = pages_of(settings, spec)
        fraction = share.fraction
        arena_bytes = kv_cache_config.num_blocks * block_bytes * fraction / (1 - fraction)
        host_pages = int(settings.host_memory_gib * 2**30) // block_bytes
        if not fraction:
            host_pages = 0
        elif host_pages < 1:
            raise ConfigError(
                f"host_memory_gib {settings.host_memory_gib} holds no page: one block of all layers is "
                f"{block_bytes / 2**20:.1f} MiB; raise host_memory_gib"
            )
        return cls(
            layers,
            spec.num_kv_heads,
            spec.block_size,
            block_bytes,
            kv_cache_config.num_blocks,
            pages,
            math.floor(arena_bytes) // pages.page_bytes,
            host_pages,
            share,
        )

    @property
    def drafts(self) -> bool:
        """There is an arena. Without one every request is a plain row, and nothing of ours runs in a step."""
        return self.arena_pages > 0

    @property
    def packed_share(self) -> float:
        """What a kept token takes of what it takes in vLLM's blocks."""
        token = self.layers * self.kv_heads * self.page_format.page_bytes / self.page_format.page_tokens
        return token / (self.block_bytes / self.block_tokens)

    def compressed_bytes(self, head_pages: int) -> int:
        """Of a compressed context: its pages, their tables and counts."""
        return self.page_format.slot_bytes(head_pages, self.layers, self.kv_heads)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)
