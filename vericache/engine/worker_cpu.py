"""The CPU worker. Never imported beside a GPU: vLLM's own CPU worker replaces parts of torch.cuda."""

from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker.cpu_worker import CPUWorker

from vericache.draft import backend_cpu
from vericache.engine.pages import PageLayout
from vericache.engine.pages_cpu import CpuPageLayout
from vericache.engine.runner_v1 import VeriCacheModelRunner
from vericache.engine.settings import MemoryPlan
from vericache.engine.worker import DraftWorker
from vericache.store.host import HostStore
from vericache.store.transfer import CopyEngine, CpuCopyEngine


class VeriCacheCPUWorker(DraftWorker, CPUWorker):
    """vLLM's CPU worker: V1, or V2 through Triton's interpreter (for tests)."""

    def init_device(self) -> None:
        super().init_device()
        backend_cpu.register()
        if not self.use_v2_model_runner:
            self.model_runner.__class__ = VeriCacheModelRunner
            return
        from vericache.engine.runner_v2 import with_draft_rows

        with_draft_rows(self.model_runner)

    def _copies(self, caches: list[Tensor], store: HostStore) -> CopyEngine:
        return CpuCopyEngine(caches, store)

    def _layout(self, plan: MemoryPlan, layer: Attention, caches: list[Tensor]) -> PageLayout:
        return CpuPageLayout(layer.kv_cache.dtype, plan.block_tokens, layer.head_size, layer.isa)
