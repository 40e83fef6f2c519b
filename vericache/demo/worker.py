"""One engine run in a process of its own: plain vLLM or VeriCache, prompts in, token ids and measurements out.

``python -m vericache.demo.worker JOB.json RESULT.json``. Separate processes keep plain vLLM untouched by VeriCache's
attention backend, and return all memory.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# One process, threads not pinned: a pinned pool spins when other processes share the cores. Memory in huge pages:
# decoding on a CPU reads all weights for every token (takes effect in new processes, glibc 2.35+).
ENVIRONMENT = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "KMP_BLOCKTIME": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


@dataclass
class Job:
    """What to run. ``vericache`` None means plain vLLM; ``engine`` holds vLLM engine arguments."""

    model: str
    prompts: dict[str, list[int]]
    max_tokens: int
    engine: dict[str, Any]
    vericache: dict[str, Any] | None = None
    temperature: float = 0.0
    ignore_eos: bool = False
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)


@dataclass
class Result:
    """``tokens`` and ``summaries`` by prompt name; byte counts as in ``EngineStats``."""

    tokens: dict[str, list[int]]
    summaries: dict[str, dict[str, Any]]
    seconds: float
    peak_kv_bytes: int
    moved: dict[str, int] = field(default_factory=dict)
    iterations: int = 0
    schedule: dict[str, str] = field(default_factory=dict)


def run_in_process(job: Job) -> Result:
    """Run a job in a new process; its progress bar goes to this terminal."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "job.json", Path(folder) / "result.json"
        source.write_text(json.dumps(asdict(job)))
        env = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(job.threads)}
        subprocess.run([sys.executable, "-m", __name__, str(source), str(target)], env=env, check=True)
        return Result(**json.loads(target.read_text()))


def run(job: Job) -> Result:
    """Run a job in this process."""
    llm = make_engine(job)
    params = sampling(job)
    prompts = [{"prompt_token_ids": ids} for ids in job.prompts.values()]
    start = time.monotonic()
    outputs = llm.generate(prompts, [params] * len(prompts))
    seconds = time.monotonic() - start
    tokens = {n: list(o.outputs[0].token_ids) for n, o in zip(job.prompts, outputs, strict=True)}
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    if job.vericache is None:
        return Result(tokens, {}, seconds, scheduler.peak_blocks * scheduler.block_bytes)
    stats = scheduler.coordinator.stats
    by_id = {o.request_id: n for n, o in zip(job.prompts, outputs, strict=True)}
    summaries = {n: o.kv_transfer_params["vericache"] for n, o in zip(job.prompts, outputs, strict=True)}
    schedule = _schedule(stats.trace, by_id)
    return Result(tokens, summaries, seconds, stats.peak_kv_bytes, dict(stats.moved), stats.iterations, schedule)


def make_engine(job: Job) -> Any:
    if job.vericache is None:
        import vllm

        return vllm.LLM(job.model, scheduler_cls="vericache.demo.plain.RecordingScheduler", **job.engine)
    import vericache

    return vericache.LLM(job.model, vericache=job.vericache, **job.engine)


def sampling(job: Job) -> Any:
    from vllm import SamplingParams

    seed = 7 if job.temperature > 0 else None
    return SamplingParams(temperature=job.temperature, seed=seed, max_tokens=job.max_tokens, ignore_eos=job.ignore_eos)


def _schedule(trace: Sequence[Mapping[str, str]], names: Mapping[str, str]) -> dict[str, str]:
    """The timeline by prompt name. vLLM's internal ids extend the ones users see."""
    from vericache.engine.observe import timeline

    return {names[key.partition("-")[0]]: row for key, row in timeline(trace).items()}


def main(source: str, target: str) -> None:
    job = Job(**json.loads(Path(source).read_text()))
    Path(target).write_text(json.dumps(asdict(run(job))))


if __name__ == "__main__":
    main(*sys.argv[1:])
