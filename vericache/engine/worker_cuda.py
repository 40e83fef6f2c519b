"""The vLLM worker of an NVIDIA GPU with a draft arena."""

from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker.gpu_worker import Worker

from vericache.draft import backend_cuda
from vericache.engine.pages import PageLayout
from vericache.engine.pages_cuda import SideBySideLayout
from vericache.engine.runner_v2 import with_draft_rows
from vericache.engine.settings import MemoryPlan
from vericache.engine.worker import DraftWorker
from vericache.errors import UnsupportedError
from vericache.store.bandwidth import measured
from vericache.store.cuda import CudaCopyEngine
from vericache.store.host import HostStore
from vericache.store.transfer import CopyEngine


class VeriCacheGPUWorker(DraftWorker, Worker):
    """vLLM's GPU worker on the V2 runner."""

    def init_device(self) -> None:
        super().init_device()
        if not self.use_v2_model_runner:
            raise UnsupportedError(
                "vLLM chose its V1 model runner, VeriCache drafts on the V2 runner of a GPU; unset "
                "VLLM_USE_V2_MODEL_RUNNER, and leave out what the V2 runner does not support"
            )
        backend_cuda.register()
        with_draft_rows(self.model_runner)

    def _bandwidths(self) -> tuple[float, float]:
        return measured(self.device)

    def _copies(self, caches: list[Tensor], store: HostStore) -> CopyEngine:
        return CudaCopyEngine(caches, store)

    def _layout(self, plan: MemoryPlan, layer: Attention, caches: list[Tensor]) -> PageLayout:
        return SideBySideLayout(caches, plan.block_tokens, layer.head_size)
