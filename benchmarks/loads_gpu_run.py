"""One engine of ``benchmarks.loads_gpu``, in a process of its own: reads a ``Sweep``, writes what it measured after
every load."""

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.throughput_run import Engine, Job, alone

STARTS_WITHIN = 240.0  # seconds for which an engine waits for the others to have started


@dataclass(frozen=True)
class Sweep(Job):
    """``job.prompts`` serve the largest of the ``loads``. ``enough_s``: a load is run no more once its runs have taken
    so long; ``ready``: files that tell which engines have started, the first one is this engine's."""

    loads: list[int] = field(default_factory=list)
    enough_s: float = 30.0
    ready: list[str] = field(default_factory=list)


def wait_for_all(ready: list[str]) -> None:
    """An engine that starts, captures graphs or pins memory would slow down another one's run."""
    own, *others = map(Path, ready)
    own.touch()
    end = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < end and not all(other.exists() for other in others):
        time.sleep(0.1)


def at_load(engine: Engine, count: int, prefill: float) -> list[dict[str, Any]]:
    """Runs of so many requests at once; ``prefill``: seconds of one request's."""
    runs: list[dict[str, Any]] = []
    job = engine.job
    assert isinstance(job, Sweep)
    while len(runs) < job.repeats and sum(r["wall_s"] for r in runs) < job.enough_s:
        runs.append(engine.measured(count, prefill * count))
    return runs


def left_over(engine: Engine) -> str | None:
    """What is held although no request is left, in words."""
    for _ in range(3):
        engine.core.step_fn()
    scheduler, pool = engine.core.scheduler, engine.core.scheduler.kv_cache_manager.block_pool
    used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    ours = getattr(scheduler, "coordinator", None)
    held = ours is not None and (bool(ours.records) or not ours.reserved.nothing_held)
    return f"{used} blocks in use, {len(scheduler.requests)} requests, held: {held}" if used or held else None


def run(sweep: Sweep, out: Path) -> None:
    engine = Engine(sweep)
    found: dict[str, Any] = {
        "start_s": engine.start_s,
        "gpu": torch.cuda.get_device_name(),
        "blocks": engine.core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
        "loads": {},
    }
    if (ours := getattr(engine.core.scheduler, "coordinator", None)) is not None:
        found["arena"] = {"fraction": ours.plan.share.fraction, "why": ours.plan.share.why}
    wait_for_all(sweep.ready)
    with alone(sweep.lock):
        engine.warm_up()
        sample = min(sweep.prefill_sample, len(sweep.prompts))
        prefill = engine.generate(1, sample)[1] / sample
    found["prefill_s"] = round(prefill, 4)
    for count in sweep.loads:
        time.sleep(0.3)  # so that the engines take turns: a run of every load is there when time is up
        with alone(sweep.lock):
            found["loads"][str(count)] = {"runs": at_load(engine, count, prefill), "left_over": left_over(engine)}
        whole = out.with_suffix(".whole")
        whole.write_text(json.dumps(found))
        whole.replace(out)  # it is read at any time
        print(count, [r["tokens_per_s"] for r in found["loads"][str(count)]["runs"]], flush=True)


def main() -> None:
    run(Sweep(**json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
