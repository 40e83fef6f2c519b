"""The vLLM workers with a draft arena. Named by ``--worker-cls``; importing must stay cheap and idempotent.

``DraftWorker`` is what both have in common; a GPU's worker is in ``worker_cuda``.
"""

import logging
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed import get_world_group
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from compressors import Shape, Surrogate
from vericache.draft import backend
from vericache.draft.arena import DraftArena
from vericache.draft.runtime import DraftRuntime, HostRuntime
from vericache.engine.certified_rows import CertifiedRows
from vericache.engine.certified_worker import CertifiedWorker
from vericache.engine.connector import ArenaShare, VeriCacheConnector
from vericache.engine.kv_worker import KVWorker
from vericache.engine.pages import PageLayout
from vericache.engine.rotary import shared_rotary
from vericache.engine.settings import MemoryPlan, settings_of, sizes
from vericache.engine.share import Chosen, Facts, choose, fixed
from vericache.errors import ConfigError
from vericache.store.host import HostStore
from vericache.store.transfer import CopyEngine
from vericache.surrogate import file
from vericache.surrogate.fingerprint import fingerprint, geometry

logger = logging.getLogger("vllm.vericache")


class DraftWorker(ABC):
    """Mixin of a vLLM worker: the arena's share of the KV budget, and the pieces that need KV caches to exist."""

    vllm_config: VllmConfig
    model_runner: Any
    use_v2_model_runner: bool
    share: Chosen  # of the KV memory, for the arena

    def determine_available_memory(self) -> int:
        """The KV budget minus the arena's share of it, which is chosen here."""
        available: int = super().determine_available_memory()  # type: ignore[misc]
        self.share = self._choose_share(available)
        if self.vllm_config.parallel_config.rank == 0:
            logger.info(
                "VeriCache: arena_fraction %.3f (%s). A number for arena_fraction overrides it.",
                self.share.fraction,
                self.share.why,
            )
        return int(available * (1 - self.share.fraction))

    def _choose_share(self, available: int) -> Chosen:
        settings = settings_of(self.vllm_config)
        if (known := fixed(settings, self.vllm_config.device_config.device_type == "cpu")) is not None:
            return known
        specs = list(self.model_runner.get_kv_cache_spec().values())
        if not specs or not all(isinstance(spec, FullAttentionSpec) for spec in specs):
            return Chosen(0.0, "no model of full-attention layers")  # MemoryPlan refuses it
        bandwidth, link = settings.hbm_bytes_per_second, settings.link_bytes_per_second
        if bandwidth is None or link is None:
            found = self._bandwidths()
            bandwidth, link = bandwidth or found[0], link or found[1]
        if (blocks := self.vllm_config.cache_config.num_gpu_blocks_override) is not None:
            available = blocks * sum(spec.page_size_bytes for spec in specs)
        weights = sum(p.nbytes for p in self.model_runner.get_model().parameters())
        # Ranks may have found different figures, and must come to the same share.
        memory, bandwidth, link = _least_of_ranks(float(available), bandwidth, link)
        weights = -_least_of_ranks(-float(weights))[0]
        facts = Facts(memory, weights, *sizes(settings, specs), self.vllm_config.model_config.max_model_len,
                      self.vllm_config.scheduler_config.max_num_seqs, bandwidth, link)  # fmt: skip
        return choose(settings, facts)

    def _bandwidths(self) -> tuple[float, float]:
        """Bytes per second of the device's memory and of the link to the host."""
        raise NotImplementedError("a CPU has no link")

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        settings = settings_of(self.vllm_config)
        connector = get_kv_transfer_group()
        assert isinstance(connector, VeriCacheConnector)
        connector.share = ArenaShare(self.share)
        plan = MemoryPlan.of(self.vllm_config, kv_cache_config, self.share)
        if not plan.drafts:
            return
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        caches = [layer.kv_cache for layer in layers.values()]
        first = next(iter(layers.values()))
        rotary = shared_rotary(self.model_runner.get_model(), list(layers.values()))
        shape = Shape(len(layers), first.num_kv_heads, first.num_heads, first.head_size, rotary)
        if settings.surrogate is not None:
            shape = replace(shape, surrogates=self._surrogates(settings.surrogate, shape, caches[0].device))
        runtime = self._runtime(shape, plan, caches[0])
        store = HostStore(plan.host_pages, caches)
        layout = self._layout(plan, first, caches)
        certified = self._certified(runtime.arena, layout, caches, store)
        connector.worker = KVWorker(shape, runtime, layout, caches, self._copies(caches, store), certified)
        backend.attach(layers, runtime)

    def model_fingerprint(self) -> str:
        """Called over vLLM's RPC by what trains surrogates."""
        config = self.vllm_config.model_config
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        first = next(iter(layers.values()))
        known = geometry(config.architecture, len(layers), first.num_kv_heads, first.head_size)
        return fingerprint(known, self.model_runner.get_model().named_parameters())

    def _surrogates(self, path: str, shape: Shape, device: torch.device) -> dict[str, Surrogate]:
        """Raises ConfigError where it would not serve."""
        stored = file.load(path)
        file.check_model(path, stored, self.model_fingerprint())
        if shape.rotary is None:
            raise ConfigError(
                f"surrogate is {path}, but this model has no single rotary embedding that all its layers apply, and "
                f"surrogates read keys without their rotation; leave surrogate out and choose another compressor"
            )
        return {stored.method: stored.surrogate.to(device)}

    def _runtime(self, shape: Shape, plan: MemoryPlan, cache: Tensor) -> DraftRuntime:
        scheduler = self.vllm_config.scheduler_config
        arena = DraftArena(shape, plan.arena_pages, plan.page_format, cache.device)
        if not self.use_v2_model_runner:
            return HostRuntime(arena)
        from vericache.draft.device import DeviceRuntime  # Triton, which vLLM may have disabled

        arena.with_tables(scheduler.max_num_seqs, self.vllm_config.model_config.max_model_len)
        return DeviceRuntime(arena, scheduler.max_num_seqs, scheduler.max_num_batched_tokens)

    def _certified(
        self, arena: DraftArena, layout: PageLayout, caches: list[Tensor], store: HostStore
    ) -> CertifiedRows:
        measured = settings_of(self.vllm_config).measured_share
        if not self.use_v2_model_runner:
            return CertifiedWorker(arena, layout, caches, store, measured)
        from vericache.engine.certified_device import CertifiedDevice  # Triton again

        return CertifiedDevice(arena, layout, caches, store, measured)

    @abstractmethod
    def _copies(self, caches: list[Tensor], store: HostStore) -> CopyEngine:
        """Between the KV caches and the host store."""

    @abstractmethod
    def _layout(self, plan: MemoryPlan, layer: Attention, caches: list[Tensor]) -> PageLayout:
        """Of the attention backend's pages."""


def _least_of_ranks(*values: float) -> list[float]:
    """The least value of all workers, each by itself."""
    world = get_world_group()
    if world.world_size == 1:
        return list(values)
    found = torch.tensor(values, dtype=torch.float64)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN, group=world.cpu_group)
    return [float(v) for v in found]
