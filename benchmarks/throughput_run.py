"""One engine of ``benchmarks.throughput``, in a process of its own: reads a ``Job``, writes what it measured."""

import fcntl
import itertools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm import SamplingParams
from vllm.outputs import RequestOutput

import vericache


@dataclass(frozen=True)
class Job:
    """What one process runs: ``prompts`` are token ids; ``settings`` None is stock vLLM; ``acceptance`` the chance that
    a draft is accepted (None: as the model decides); ``prefill_sample`` how many prompts' prefill is timed."""

    folder: str
    prompts: list[list[int]]
    tokens: int
    engine: dict[str, Any]
    settings: dict[str, Any] | None
    acceptance: float | None
    repeats: int
    prefill_sample: int
    lock: str


def accept_by_chance(rate: float) -> None:
    """Replace the comparison of drafts and samples: each draft is accepted with chance ``rate``, up to the first that
    is not. For models with random weights, whose drafts would all be wrong; the output means nothing then."""
    from vericache.engine import runner_v2

    def accept_rows(sampled: Tensor, inputs: Tensor, first_logit: Tensor, tokens: Tensor, kept: Tensor) -> None:
        place = torch.arange(tokens.shape[1], device=tokens.device)
        drafts = (first_logit[1:] - first_logit[:-1])[: len(kept), None] - 1
        lucky = (torch.rand(tokens.shape, device=tokens.device) < rate) & (place < drafts)
        tokens.copy_(sampled[(first_logit[: len(kept), None] + place).clamp(max=len(sampled) - 1)])
        kept.copy_(torch.where(kept > 0, 1 + lucky.int().cumprod(1).sum(1), 0))

    runner_v2.accept_rows = accept_rows


class Trace:
    """When each step was planned, what was in it, and how long its graph ran on the GPU."""

    def __init__(self, core: Any) -> None:
        self.steps: list[tuple[float, str, int]] = []  # planned at, kind, rows
        self.link: list[float] = []  # seconds the link has been busy with reloads by then
        self.graphs: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []  # step, start, end
        self.pages = 0
        scheduler, manager = core.scheduler, core.model_executor.driver_worker.worker.model_runner.cudagraph_manager
        schedule, run = scheduler.schedule, manager.run_fullgraph

        def traced_schedule(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            plan = getattr(scheduler, "_plan", None)
            drafts, verifies = (len(plan.drafts), len(plan.verifies)) if plan is not None else (0, 0)
            counts = output.num_scheduled_tokens.values()
            others = len(counts) - drafts - verifies
            if sum(counts) > drafts + others + sum(1 + len(v.drafts) for v in (plan.verifies if plan else ())):
                kind = "prefill"
            elif verifies:
                kind = "verify"
            else:
                kind = "draft" if drafts else "plain"
            self.steps.append((time.perf_counter(), kind if counts else "idle", len(counts)))
            if plan is not None:
                self.link.append(scheduler.coordinator.stats.seconds["Load"])
                self.pages = max(self.pages, *scheduler.coordinator.planner.rings.pages.cells)
            return output

        def traced_run(desc: Any) -> Any:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            out = run(desc)
            end.record()
            self.graphs.append((len(self.steps) - 1, start, end))
            return out

        scheduler.schedule, manager.run_fullgraph = traced_schedule, traced_run

    def clear(self) -> None:
        self.steps, self.link, self.graphs, self.pages = [], [], [], 0

    def steady_link(self) -> float | None:
        """Share of time the link was busy in the middle half of the steps after the last prefill, with every request
        drafting."""
        prefills = [i for i, (_, kind, _) in enumerate(self.steps) if kind == "prefill"]
        after = len(self.steps) - 1 - (prefills[-1] if prefills else 0)
        lo, hi = len(self.steps) - 1 - after * 3 // 4, len(self.steps) - 1 - after // 4
        if not self.link or hi - lo < 10:
            return None
        return round((self.link[hi] - self.link[lo]) / (self.steps[hi][0] - self.steps[lo][0]), 3)

    def summary(self) -> dict[str, dict[str, Any]]:
        """By kind of step: how many, rows, wall time to the next step and GPU time of the graph, medians in ms."""
        torch.cuda.synchronize()
        wall: dict[str, list[float]] = defaultdict(list)
        gpu: dict[str, list[float]] = defaultdict(list)
        rows: dict[str, list[int]] = defaultdict(list)
        for (at, kind, count), (then, *_) in zip(self.steps, self.steps[1:], strict=False):
            wall[kind].append(1e3 * (then - at))
            rows[kind].append(count)
        for step, start, end in self.graphs:
            gpu[self.steps[step][1]].append(start.elapsed_time(end))
        return {
            kind: {
                "steps": len(times),
                "rows": median(rows[kind]),
                "most_rows": max(rows[kind]),
                "wall_ms": round(median(times), 3),
                "wall_total_s": round(sum(times) / 1e3, 3),
                "graphs": len(gpu[kind]),
                "graph_ms": round(median(gpu[kind]), 3) if gpu[kind] else None,
            }
            for kind, times in wall.items()
        }


@contextmanager
def alone(path: str) -> Iterator[None]:
    """Engines start side by side, and run one after the other."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Counts:
    """Requests that left the device, came back and were preempted, since the start or ``clear``."""

    def __init__(self, scheduler: Any) -> None:
        self.preemptions, self.events = 0, defaultdict[tuple[str, str], float](float)
        preempt, coordinator = scheduler._preempt_request, getattr(scheduler, "coordinator", None)

        def preempted(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = preempted
        if coordinator is not None:
            telemetry = coordinator.stats.telemetry
            count = telemetry.count

            def counted(name: str, amount: float = 1, label: str = "") -> None:
                self.events[name, label] += amount
                count(name, amount, label)

            telemetry.count = counted

    def clear(self) -> None:
        self.preemptions = 0
        self.events.clear()

    def summary(self) -> dict[str, Any]:
        promotions = {label: int(n) for (name, label), n in self.events.items() if name == "vericache_promotions"}
        return {
            "preemptions": self.preemptions,
            "demotions": int(self.events["vericache_demotions", ""]),
            "promotions": promotions,
            "recompressions": int(self.events["vericache_recompressions", ""]),
            "shared_bytes": int(self.events["vericache_shared_reload_bytes", ""]),
        }


class Engine:
    """The job's engine, and its runs."""

    def __init__(self, job: Job) -> None:
        if job.acceptance is not None and job.settings is not None:
            accept_by_chance(job.acceptance)
        start = time.perf_counter()
        make: Any = vllm.LLM if job.settings is None else vericache.LLM
        ours = {} if job.settings is None else {"vericache": job.settings}
        self.job, self.llm = job, make(job.folder, **ours, **job.engine)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.trace, self.counts = Trace(self.core), Counts(self.core.scheduler)
        self._calls = itertools.count()
        self.start_s = round(time.perf_counter() - start, 1)

    def generate(self, tokens: int, count: int, **extra: str) -> tuple[list[RequestOutput], float]:
        """Outputs and seconds of the first ``count`` prompts. ``extra`` holds for every second request."""
        usual: dict[str, Any] = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(**usual, extra_args=extra if extra and i % 2 == 0 else None) for i in range(count)]
        # Another first token in every call: no cache may know the prompts from the last one.
        first = 100 + next(self._calls)
        prompts = [{"prompt_token_ids": [first, *p[1:]]} for p in self.job.prompts[:count]]
        before = time.perf_counter()
        out = self.llm.generate(prompts, params, use_tqdm=False)
        torch.cuda.synchronize()
        return out, time.perf_counter() - before

    def warm_up(self) -> None:
        """Compiles what is compiled late. Where few requests would not draft, half of them are told to."""
        auto = self.job.settings is not None and self.job.settings["mode"] == "auto"
        count = min(4 if auto else 2, len(self.job.prompts))
        self.generate(self.job.tokens, count, **({"vericache_mode": "draft"} if auto else {}))

    def measured(self, count: int, prefill: float) -> dict[str, Any]:
        """One run of so many requests; ``prefill``: seconds that only their first tokens take."""
        self.trace.clear()
        self.counts.clear()
        before = moved(self.core, self.job)
        out, wall = self.generate(self.job.tokens, count)
        return {
            **one_run(self.job, out, wall, prefill),
            "steps": self.trace.summary(),
            **moved(self.core, self.job, before, wall),
            "ring_pages": self.trace.pages,
            "steady_link": self.trace.steady_link(),
            "counts": self.counts.summary(),
        }


def run(job: Job) -> dict[str, Any]:
    engine = Engine(job)
    found: dict[str, Any] = {"start_s": engine.start_s, "runs": []}
    with alone(job.lock):
        engine.warm_up()
        sample = min(job.prefill_sample, len(job.prompts))
        found["prefill_s"] = round(engine.generate(1, sample)[1] * len(job.prompts) / sample, 3)
        for _ in range(job.repeats):
            found["runs"].append(engine.measured(len(job.prompts), found["prefill_s"]))
    found["blocks"] = engine.core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
    found["gpu"] = torch.cuda.get_device_name()
    return found


def one_run(job: Job, out: Sequence[RequestOutput], wall: float, prefill: float) -> dict[str, Any]:
    made = sum(len(o.outputs[0].token_ids) for o in out)
    result: dict[str, Any] = {
        "wall_s": round(wall, 3),
        "tokens_per_s": round(made / wall, 1),
        "decode_tokens_per_s": round((made - len(out)) / (wall - prefill), 1),
    }
    if job.settings is not None:
        every = [o.kv_transfer_params["vericache"] for o in out]
        summaries = [s for s in every if s["mode"] == "draft"]
        rounds = [a for s in summaries for a in s.get("accepted_per_round", ())]
        result |= {
            "drafting": len(summaries),
            "rounds": len(rounds),
            "accepted_tokens": sum(s.get("accepted_tokens", 0) for s in every),
            "tokens_per_round": round(1 + sum(rounds) / max(1, len(rounds)), 2),
            "compressed_fraction": round(median(s["compressed_fraction"] for s in summaries), 4) if summaries else 1.0,
        }
    return result


def moved(core: Any, job: Job, before: dict[str, float] | None = None, wall: float = 1.0) -> dict[str, float]:
    """Bytes and busy time of the link so far, or since ``before``."""
    if job.settings is None:
        return {}
    stats = core.scheduler.coordinator.stats
    now = {"load_bytes": float(stats.moved["Load"]), "load_s": stats.seconds["Load"]}
    if before is None:
        return now
    delta = {name: value - before[name] for name, value in now.items()}
    return {**delta, "link_busy": round(delta["load_s"] / wall, 3), "peak_kv_bytes": stats.peak_kv_bytes}


def main() -> None:
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(run(job)))


if __name__ == "__main__":
    main()
