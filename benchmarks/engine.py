"""An engine in this process whose settings change between runs: what tests and benchmarks drive."""

import gc
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.outputs import RequestOutput

import vericache
from compressors import Kept
from vericache.config import VeriCacheConfig
from vericache.engine.texts import probe_texts

# Of an engine whose rounds are to be seen: every request that may draft does, at the length it is told, in an arena
# that does not depend on the machine.
ALWAYS_DRAFT: dict[str, Any] = {"mode": "draft", "draft_policy": "fixed", "arena_fraction": 0.5}


class LiveEngine:
    """``ALWAYS_DRAFT`` with the given settings over it; ``configure`` returns to them plus what changes. Start the
    process with ``vericache.demo.worker.ENVIRONMENT``."""

    def __init__(self, folder: Path, engine: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self.folder, self.defaults = folder, {**ALWAYS_DRAFT, **settings}
        self.llm = vericache.LLM(str(folder), vericache=self.defaults, **engine)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.coordinator = self.scheduler.coordinator
        self.worker = get_kv_transfer_group().worker
        self.runner = self.core.model_executor.driver_worker.worker.model_runner

    @cached_property
    def tokenizer(self) -> Any:
        return self.llm.get_tokenizer()

    def close(self) -> None:
        """Shut the engine down and free its memory; another one can start in this process."""
        self.core.shutdown()
        del self.llm, self.core, self.scheduler, self.coordinator, self.worker, self.runner
        gc.collect()

    def configure(self, **settings: Any) -> None:
        """Settings of the next requests. Iteration time and link speed are fixed unless given, so that a schedule
        does not depend on the machine's mood."""
        fixed = {"iteration_seconds": 0.05, "link_bytes_per_second": 1e10}
        config = VeriCacheConfig(**{**self.defaults, **fixed, **settings})
        self.coordinator.texts = probe_texts(self.scheduler.vllm_config.model_config, config)
        self.coordinator.configure(config)
        self.llm.vericache_config = config

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        given = [{"prompt_token_ids": list(p)} for p in prompts]
        return self.llm.generate(given, params, use_tqdm=False)

    def plain(self, prompts: Sequence[Sequence[int]], params: Any) -> list[list[int]]:
        """The same engine and sampler with every request resident."""
        before = self.coordinator.settings
        self.coordinator.configure(before.model_copy(update={"min_prompt_tokens": 100_000}))
        try:
            return tokens(self.generate(prompts, params))
        finally:
            self.coordinator.configure(before)

    @contextmanager
    def run_ahead(self) -> Iterator[None]:
        """Two steps in flight, as asynchronous scheduling on a GPU has (vLLM forces it off on the CPU)."""
        core, coordinator = self.core, self.coordinator
        if core.batch_queue_size > 1:
            yield
            return
        saved = core.batch_queue_size, core.batch_queue, core.step_fn, coordinator.bounds
        core.batch_queue_size, core.batch_queue = 2, deque(maxlen=2)
        core.step_fn, coordinator.bounds = core.step_with_batch_queue, replace(coordinator.bounds, depth=2)
        try:
            yield
            while core.batch_queue:
                core.step_fn()
        finally:
            core.batch_queue_size, core.batch_queue, core.step_fn, coordinator.bounds = saved

    @contextmanager
    def recorded_kept(self) -> Iterator[dict[str, list[Kept]]]:
        """Kept positions of every compression in order, by the user's request id."""
        kept: dict[str, list[Kept]] = {}
        last: list[Kept] = []
        put, compress = self.worker.arena.put, self.worker.compression.compress

        def recording_put(slot: int, selection: Kept, *rest: Any) -> int:
            last[:] = [selection]
            return put(slot, selection, *rest)

        def recording_compress(op: Any) -> int:
            pages = compress(op)
            kept.setdefault(op.request_id.rpartition("-")[0], []).append(last[0])
            return pages

        self.worker.arena.put, self.worker.compression.compress = recording_put, recording_compress
        try:
            yield kept
        finally:
            del self.worker.arena.put, self.worker.compression.compress


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in outputs]


def summaries(outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
    return [o.kv_transfer_params["vericache"] for o in outputs]
