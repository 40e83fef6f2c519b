"""The vLLM worker with a draft arena. Named by ``--worker-cls``; importing it must stay cheap and idempotent."""

from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_worker import CPUWorker

from compressors import Shape
from vericache.draft import backend
from vericache.draft.arena import DraftArena
from vericache.engine.connector import VeriCacheConnector
from vericache.engine.kv_worker import KVWorker
from vericache.engine.pages import CpuPageLayout
from vericache.engine.runner_v1 import VeriCacheModelRunner
from vericache.engine.settings import MemoryPlan, settings_of
from vericache.errors import UnsupportedError
from vericache.store.host import HostStore
from vericache.store.transfer import CpuCopyEngine


class VeriCacheCPUWorker(CPUWorker):
    """vLLM's CPU worker: composite attention backend, row hooks, host store, arena."""

    def init_device(self) -> None:
        super().init_device()
        if self.use_v2_model_runner:
            raise UnsupportedError(
                "the V2 model runner is switched on, VeriCache's CPU worker supports V1; unset VLLM_USE_V2_MODEL_RUNNER"
            )
        backend.register()
        self.model_runner.__class__ = VeriCacheModelRunner

    def determine_available_memory(self) -> int:
        """The KV budget minus the arena's share of it."""
        settings = settings_of(self.vllm_config)
        available = super().determine_available_memory()
        return available if settings.mode == "off" else int(available * (1 - settings.arena_fraction))

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        settings = settings_of(self.vllm_config)
        if settings.mode == "off":
            return
        connector = get_kv_transfer_group()
        assert isinstance(connector, VeriCacheConnector)
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        caches = [layer.kv_cache for layer in layers.values()]
        plan = MemoryPlan.of(self.vllm_config, kv_cache_config)
        first = next(iter(layers.values()))
        shape = Shape(len(layers), first.num_kv_heads, first.num_heads, first.head_size)
        store = HostStore(plan.host_pages, caches)
        arena = DraftArena(shape, plan.arena_pages, settings.page_tokens, caches[0].dtype)
        layout = CpuPageLayout(caches[0].dtype, plan.block_tokens, first.head_size, first.isa)
        connector.worker = KVWorker(shape, arena, layout, caches, CpuCopyEngine(caches, store))
        backend.attach(layers, connector.worker.runtime)
