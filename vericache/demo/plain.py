"""Plain vLLM with a memory gauge."""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler


class RecordingScheduler(Scheduler):
    """vLLM's scheduler, unchanged, that remembers the most KV blocks in use."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.peak_blocks = 0
        self.block_bytes = sum(
            len(g.layer_names) * g.kv_cache_spec.page_size_bytes for g in self.kv_cache_config.kv_cache_groups
        )

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        pool = self.kv_cache_manager.block_pool
        self.peak_blocks = max(self.peak_blocks, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
        return output
