"""How many drafts survive? ``python -m benchmarks.acceptance``: accepted drafts per round of every registered
compressor, over ratios, draft lengths and temperatures, on the bundled prompts and the bundled model (float32).

One engine compresses every prompt with every (method, ratio) and times that; rounds are predicted from what was kept,
for all draft lengths at once (see ``tests.reference``, which tests hold the engine to). Writes JSON after every cell, a
table and plots at the end, into docs/results/ (``--out``). ``--add`` goes on with an existing JSON, ``--minutes`` stops
in time: a long grid can be measured in pieces. ``--quick`` (10 minutes on 2 cores): two prompts, ratios 0.25 and 0.1,
own counts, greedy, and a check of KVzip in the engine; cells that do not fit in the time are left out.
"""

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.acceptance_grid import FULL, OWN, Cell, Method, Results, grid, registered
from benchmarks.acceptance_report import NAME, Report, summed
from benchmarks.report import RESULTS, machine_of
from compressors.budget import COUNTS
from vericache.demo import model
from vericache.demo.prompts import PROMPTS
from vericache.demo.worker import ENVIRONMENT

if TYPE_CHECKING:
    from benchmarks.acceptance_rounds import Predicted, Selected

QUICK = {"prompts": ["continue_code", "summarise"], "counts": [OWN], "ratios": [0.25, 0.1], "temperatures": [0.0],
         "minutes": 5.0, "check": [Method.parse("kvzip")]}  # fmt: skip


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small grid within 10 minutes")
    parser.add_argument("--methods", nargs="+", type=Method.parse, metavar="COMPRESSOR[:COUNTS[:SETTING=VALUE,...]]",
                        help="instead of every registered compressor")  # fmt: skip
    parser.add_argument("--counts", nargs="+", choices=[OWN, *COUNTS], default=[OWN, "uniform"],
                        help="count modes of registered compressors; own: as each one spreads tokens")  # fmt: skip
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.25, 0.1, 0.5, 0.2, 0.05])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.3, 0.7, 1.0])
    parser.add_argument("--drafts", nargs="+", type=int, default=[8, 16, 25, 40], help="drafts per round")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens per prompt")
    parser.add_argument("--prompts", nargs="+", choices=PROMPTS, default=list(PROMPTS))
    parser.add_argument("--check", nargs="*", type=Method.parse, metavar="METHOD",
                        help="compare rounds in the engine: of full KV and of these, at the first ratio, the first "
                        "and the last temperature")  # fmt: skip
    parser.add_argument("--add", action="store_true", help="keep the cells that are in --out, and leave them out here")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no cell after so many")
    parser.add_argument("--threads", type=int, default=2)
    add_device(parser)
    parser.add_argument("--part", type=part, default=(0, 1), metavar="I/N", help="every Nth compressor, from the Ith "
                        "(from 0): N processes measure a grid side by side")  # fmt: skip
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="measure nothing: one result of these; a "
                        "cell that an engine measured, too, keeps that beside it")  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of acceptance.json, .md and .png")
    args = parser.parse_args(argv)
    if args.quick:
        parser.set_defaults(**QUICK)
        args = parser.parse_args(argv)
    if args.device != "engine" and args.check is not None:
        parser.error("--check (and --quick) runs rounds in an engine: leave --device out")
    check_device(parser, args)
    args.methods = of_part(args.methods or registered(args.counts), *args.part)
    args.drafts = sorted(args.drafts)
    return args


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="engine", help='"cpu" or "cuda": without an engine, see '
                        "benchmarks/acceptance_device.py (default: in the engine)")  # fmt: skip
    parser.add_argument("--model", type=Path, help="with --device: folder of the bundled model's weights")


def check_device(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.device == "engine" and args.model is not None:
        parser.error("--model is read with --device only: the engine runs the bundled model")


def part(text: str) -> tuple[int, int]:
    index, count = map(int, text.split("/"))
    if not 0 <= index < count:
        raise ValueError(f"part {text}, expected I/N with I from 0 to N - 1")
    return index, count


def of_part(methods: Sequence[Method], index: int, count: int) -> list[Method]:
    """All count modes of a compressor are in one part, which asks its scorer once."""
    mine = set(list(dict.fromkeys(m.compressor for m in methods))[index::count])
    return [m for m in methods if m.compressor in mine]


def main(argv: Sequence[str] | None = None) -> int:
    started, args, console = monotonic(), arguments(argv), Console()
    if args.merge:
        merged(args.merge, args.out).write(args.out)
        return 0
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(args.threads))
    torch.set_num_threads(args.threads)  # torch is loaded by now and has read the environment
    options = {"tokens": args.tokens, "drafts": args.drafts, "prompts": args.prompts}
    described = f"{machine_of(args.device)}, {args.threads} thread(s)"
    header = {"date": date.today().isoformat(), "machine": described, "model": model.NAME, "options": options}
    header["engine"] = args.device == "engine"
    try:
        results = Results(args.out / f"{NAME}.json", header, args.add)
    except ValueError as error:
        console.print(str(error))
        return 2
    todo = list(results.missing(grid(args.methods, args.ratios, args.temperatures)))
    if todo or args.check is not None:
        with console.status("the model, and the prompts' KV"):
            run = predicted(args)
        fill(results, run, todo, started + 60 * args.minutes, console)
        check(results, run, args, console)
    if not results.cells:
        return 0
    report = Report(results.content())
    report.write(args.out)
    console.print("\n".join(report.grid(report.temperatures[0], report.main)))
    return 0


def predicted(args: argparse.Namespace) -> "Predicted":
    if args.device != "engine":
        from benchmarks.acceptance_device import DeviceRun

        torch.set_default_device(args.device)
        return DeviceRun(args.model or model.prepare(), args)
    from benchmarks.acceptance_run import Run  # imports vLLM, which reads the environment

    return Run(args)


def merged(files: Sequence[Path], out: Path) -> Report:
    results = Results(out / f"{NAME}.json", {}, keep=False)
    for file in files:
        results.add(json.loads(file.read_text()))
    results.save({})
    return Report(results.content())


def fill(
    results: Results, run: "Predicted", todo: Sequence[tuple[Method, float, list[float]]], end: float, console: Console
) -> None:
    """Measure what is missing, saving after every cell, until ``end``."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:
        task = progress.add_task("acceptance", total=sum(len(temperatures) for *_, temperatures in todo))
        for method, ratio, temperatures in todo:
            if monotonic() >= end:
                console.print("out of time: go on with --add")
                break
            progress.update(task, description=f"{method.name} {ratio}")
            for cell in measured(run, method, ratio, temperatures):
                results.cells[cell["key"]] = cell
                results.save(run.header)
                progress.advance(task)


def measured(run: "Predicted", method: Method, ratio: float, temperatures: Sequence[float]) -> Iterator[dict[str, Any]]:
    """One cell per temperature; the method compresses once."""
    from benchmarks.acceptance_rounds import Refused

    start, prompts = monotonic(), run.prompts
    try:
        selected, refused = run.select(method, ratio), None
    except Refused as reason:
        selected, refused = {}, str(reason)
    for temperature in temperatures:
        cell = Cell(method, ratio, temperature)
        found: dict[str, Any] = {"key": cell.key, "method": method.name, "ratio": ratio, "temperature": temperature}
        if refused is not None:
            yield {**found, "refused": refused}
            continue
        rounds = run.rounds(selected, temperature)
        yield {
            **found,
            "kept": round(sum(s.fraction for s in selected.values()) / len(selected), 4),
            **scoring(selected, prompts),
            "rounds": {name: summed(of_prompt) for name, of_prompt in rounds.items()},
            "seconds": round(monotonic() - start, 1),
        }
        start = monotonic()


def scoring(selected: "Mapping[str, Selected]", prompts: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Milliseconds per 1,000 tokens, where an engine was timed."""
    times = [1e6 * s.seconds / len(prompts[name]) for name, s in selected.items() if s.seconds is not None]
    return {"scoring_ms": round(median(times), 1)} if times else {}


def check(results: Results, run: "Predicted", args: argparse.Namespace, console: Console) -> None:
    """Full KV and the methods of ``--check`` in the engine."""
    if args.check is None:
        return
    from benchmarks.acceptance_run import Run

    assert isinstance(run, Run)
    for temperature in dict.fromkeys((args.temperatures[0], args.temperatures[-1])):
        for method in (FULL, *args.check):
            cell = Cell(method, 1.0 if method == FULL else args.ratios[0], temperature)
            with console.status(f"checked in the engine: {cell.key}"):
                results.checks[cell.key] = {"key": cell.key, **run.check(method, cell.ratio, temperature)}
            console.print({k: v for k, v in results.checks[cell.key].items() if k != "key"})
            results.save(run.header)


if __name__ == "__main__":
    raise SystemExit(main())
