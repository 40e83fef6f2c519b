"""Is the output plain vLLM's, token for token? ``python -m benchmarks.lossless [--full]``.

Greedy runs are compared with stock vLLM in a process of its own; sampled runs with the same engine and sampler and
every request resident (stock vLLM's V1 sampler draws sequential noise, see docs/architecture.md). In float32 every
cell must be identical. In lower precision a first divergence is accepted only as a near tie: the teacher-forced full
KV logits of the two tokens, in float32, must lie closer than the dtype's noise on this model.

Writes JSON, a table and a plot into docs/results/ (``--name``), after every cell, so that an interrupted run keeps
what it has and continues.
"""

import argparse
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vericache.demo.worker import ENVIRONMENT

RESULTS = Path(__file__).parent.parent / "docs" / "results"
METHODS = {
    "streaming_llm": ("uniform",),
    "snapkv": ("uniform", "per_layer", "per_head"),
    "kvzip": ("uniform", "per_layer", "per_head"),
    "random": ("uniform", "per_layer", "per_head"),
}


@dataclass(frozen=True)
class Cell:
    """One configuration: all prompts, ``concurrency`` at a time."""

    compressor: str
    counts: str
    ratio: float
    temperature: float
    policy: str
    concurrency: int

    @property
    def key(self) -> str:
        return "/".join(map(str, asdict(self).values()))


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    for compressor in args.compressor:
        for counts in METHODS[compressor]:
            if counts not in args.counts:
                continue
            rest = itertools.product(args.ratio, args.temperature, args.policy, args.concurrency)
            for ratio, temperature, policy, concurrency in rest:
                yield Cell(compressor, counts, ratio, temperature, policy, concurrency)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="every method, count mode, ratio, policy and concurrency")
    parser.add_argument("--prompts", type=int, default=8, help="how many of the bundled prompts")
    parser.add_argument("--prompt-tokens", type=int, default=480, help="cut the prompts' text to so many tokens")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens per request")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--compressor", nargs="+", choices=METHODS, default=["kvzip"])
    parser.add_argument("--counts", nargs="+", default=["per_head", "uniform"])
    parser.add_argument("--ratio", nargs="+", type=float, default=[0.25])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0])
    parser.add_argument("--policy", nargs="+", choices=["staggered", "lockstep"], default=["staggered"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[4])
    parser.add_argument("--draft-length", type=int, default=16)
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th cell, for several processes side by side")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", help="name of the files in docs/results (default: lossless-DTYPE)")
    parser.add_argument("--json", type=Path, help="write the JSON here instead")
    args = parser.parse_args(argv)
    if args.dtype != "float32" and any(args.temperature):
        parser.error("a near tie is judged on greedy output only: --temperature above 0 needs --dtype float32")
    if args.full:
        args.compressor, args.counts = list(METHODS), ["uniform", "per_layer", "per_head"]
        args.ratio, args.temperature = [0.5, 0.25, 0.1], [0.0, 0.7]
        args.policy, args.concurrency = ["staggered", "lockstep"], [1, 4]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    os.environ.update(ENVIRONMENT)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    from benchmarks.lossless_run import Run  # imports vLLM, which reads the environment

    console = Console()
    index, count = map(int, args.shard.split("/"))
    todo = [c for i, c in enumerate(cells(args)) if i % count == index]
    name = args.name or f"lossless-{args.dtype}"
    file = args.json or RESULTS / f"{name}{f'-{index}' if count > 1 else ''}.json"
    done: dict[str, dict[str, Any]] = json.loads(file.read_text())["cells"] if file.exists() else {}
    run = Run(args, console)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("lossless", total=len(todo))
        for cell in todo:
            progress.update(task, description=f"{cell.compressor} {cell.counts} {cell.ratio}")
            if cell.key not in done:
                start = time.monotonic()
                done[cell.key] = {**asdict(cell), **run.cell(cell), "seconds": round(time.monotonic() - start, 1)}
                write(file, args, run.header(), done)
            progress.advance(task)
    failed = [c for c in done.values() if not c["passed"]]
    same = sum(c["identical"] for c in done.values())
    total = sum(c["requests"] for c in done.values())
    console.print(f"{same} of {total} requests identical in {len(done)} cells; {len(failed)} cells failed; {file}")
    return 1 if failed else 0


def write(file: Path, args: argparse.Namespace, header: dict[str, Any], done: dict[str, dict[str, Any]]) -> None:
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    report = {"date": date.today().isoformat(), "options": options, **header, "cells": done}
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    temporary.rename(file)


if __name__ == "__main__":
    raise SystemExit(main())
