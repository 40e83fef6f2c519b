"""Is the output plain vLLM's, token for token? ``python -m benchmarks.lossless [--full]``.

Greedy runs are compared with stock vLLM in a process of its own; sampled runs with the same engine and sampler and
every request resident (stock vLLM's V1 sampler draws sequential noise, see docs/architecture.md). In float32 every
cell must be identical. In lower precision a first divergence is accepted only as a near tie: by teacher-forced
full-KV logits in float32 neither token may lie farther behind the best one than the dtype moves such differences
elsewhere in the same outputs.

Writes JSON, a table and a plot into docs/results/ (``--name``) after every cell: an interrupted run continues where
it stopped. ``--shard i/n`` runs every n-th cell; the files of all shards are merged.
"""

import argparse
import itertools
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks import lossless_report as report
from benchmarks.report import RESULTS
from compressors import METHODS
from compressors.budget import COUNTS
from vericache.demo.worker import ENVIRONMENT

# One compressor of each kind: without scoring rows, with rows that replay, with rows that append, and no method at all.
FULL_COMPRESSORS, FULL_COUNTS = ("streaming_llm", "snapkv", "kvzip", "random"), ("uniform", "per_layer", "per_head")


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


def cells(args: argparse.Namespace) -> list[Cell]:
    """In a random but fixed order: what an unfinished run has covered is a fair sample of everything."""
    methods = [(c, n) for c in args.compressor for n in METHODS[c].counts if n in args.counts]
    rest = itertools.product(methods, args.ratio, args.temperature, args.policy, args.concurrency)
    found = [Cell(*method, *values) for method, *values in rest]
    random.Random(0).shuffle(found)
    return found


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="every method, count mode, ratio, policy and concurrency")
    parser.add_argument("--prompts", type=int, default=8, help="how many of the bundled prompts")
    parser.add_argument("--prompt-tokens", type=int, default=480, help="cut the prompts' text to so many tokens")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens per request")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--compressor", nargs="+", choices=METHODS, default=["kvzip"])
    parser.add_argument("--counts", nargs="+", choices=COUNTS, default=["per_head", "uniform"])
    parser.add_argument("--ratio", nargs="+", type=float, default=[0.25])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0])
    parser.add_argument("--policy", nargs="+", choices=["staggered", "lockstep"], default=["staggered"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[4])
    parser.add_argument("--draft-length", type=int, default=5)
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="every N-th cell, from the I-th (0 .. N - 1) on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", help="name of the files (default: lossless-DTYPE)")
    parser.add_argument("--json", type=Path, help="copy the final JSON to this file too")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the files")
    args = parser.parse_args(argv)
    if args.dtype != "float32" and any(args.temperature):
        parser.error("a near tie is judged on greedy output only: --temperature above 0 needs --dtype float32")
    if args.full:
        args.compressor, args.counts, args.ratio = list(FULL_COMPRESSORS), list(FULL_COUNTS), [0.5, 0.25, 0.1]
        args.temperature = [0.0, 0.7] if args.dtype == "float32" else [0.0]
        args.policy, args.concurrency = ["staggered", "lockstep"], [1, 4]
    args.name = args.name or f"lossless-{args.dtype}"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(args.threads))
    torch.set_num_threads(args.threads)  # torch is loaded by now and has read the environment
    from benchmarks.lossless_run import Run  # imports vLLM, which reads the environment

    console = Console()
    files = report.Files(args.out, args.name, args.shard)
    index, count = map(int, args.shard.split("/"))
    done = files.done()
    todo = [c for c in cells(args)[index::count] if c.key not in done]
    run = Run(args, console) if todo else None
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:
        task = progress.add_task("lossless", total=len(todo))
        for cell in todo:
            assert run is not None
            progress.update(task, description="/".join(map(str, asdict(cell).values())))
            start = time.monotonic()
            result = {**asdict(cell), **run.cell(cell)}
            files.add(cell.key, {**result, "seconds": round(time.monotonic() - start, 1)}, run.header)
            progress.advance(task)
    wanted = {c.key for c in cells(args)}
    failed = report.merge(files, wanted, console)
    if args.json is not None:
        args.json.write_text(files.merged.read_text())
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
