"""A VeriCache engine in this process, under the tests' control: single steps, two steps in flight, a look at rest."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.outputs import RequestOutput

from benchmarks.engine import ALWAYS_DRAFT, LiveEngine

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "enforce_eager": True,
    "block_size": 32,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "kv_cache_memory_bytes": 1 << 30,
    "enable_prefix_caching": True,
}
SETTINGS: dict[str, Any] = {
    **ALWAYS_DRAFT, "min_prompt_tokens": 150, "verify_tokens": 80, "host_memory_gib": 1.0, "draft_length": 8,
}  # fmt: skip


class Harness(LiveEngine):
    """One engine for a whole session."""

    # -- single steps --------------------------------------------------------------------------------------

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self.llm.llm_engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, params)

    def step(self) -> list[RequestOutput]:
        if not self.scheduler.running and not self.coordinator.records:
            time.sleep(0.001)  # all wait for a grammar, which another thread compiles
        return self.llm.llm_engine.step()

    def drain(self, limit: int = 5000) -> dict[str, RequestOutput]:
        """Step until nothing is unfinished; the finished outputs by request id."""
        done = {}
        while self.llm.llm_engine.has_unfinished_requests():
            limit -= 1
            assert limit > 0, f"the engine makes no progress: {self.states()}"
            done |= {o.request_id: o for o in self.step() if o.finished}
        return done

    def run_until(self, condition: Callable[[], bool], limit: int = 2000) -> None:
        while not condition():
            limit -= 1
            assert limit > 0, f"condition not reached: {self.states()}"
            self.step()

    def states(self) -> dict[str, str]:
        """State name by the user's request id (vLLM appends a random suffix to it)."""
        return {r.rpartition("-")[0]: t.state.name for r, t in self.coordinator.planner.tracks.items()}

    def assert_at_rest(self) -> None:
        assert_at_rest(self)
        assert not self.runner.requests


def assert_at_rest(engine: LiveEngine) -> None:
    """Nothing is held and nothing is left in anyone's books, on both sides."""
    for _ in range(3):  # deliver what ended requests leave behind: offline engines stop stepping at once
        engine.core.step_fn()
    scheduler, coordinator = engine.scheduler, engine.coordinator
    assert not scheduler.requests
    assert not scheduler.running
    assert not scheduler.waiting
    assert not coordinator.records
    assert coordinator.terms.none_known
    assert not coordinator.planner.tracks
    assert not coordinator.reserved.fence.pending
    assert not scheduler._in_flight
    pool, reserved = scheduler.kv_cache_manager.block_pool, coordinator.reserved
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert reserved.host.free == reserved.host.size
    assert reserved.slots.free == reserved.slots.size
    assert reserved.arena.used == 0
    assert not coordinator.scores.relied_on
    assert not any(coordinator.planner.rings.link.cells)
    assert not any(coordinator.planner.rings.pages.cells)
    if engine.worker is not None:  # without an arena there is none
        assert not engine.worker.arena.slots
        assert len(engine.worker.arena.pool.free) == engine.worker.arena.pool.data.shape[0]
