"""How many drafts survive for how many bytes? ``python -m benchmarks.acceptance_bytes``: accepted drafts per round over
the compressed size, one line per method and page format, on the bundled prompts and model (greedy, float32). Writes
JSON, a table and a plot into docs/results/ after every point.

The engine says what a method keeps; rounds are predicted from that and from what each format loses (tests hold the
engine to ``tests.reference`` and ``tests.packings``). Only full rounds count, and the pooled figure leaves out outputs
that loop. Sizes are fractions of the full KV in bfloat16, tables and counts included; the uncompressed tail is counted
apart.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.acceptance import add_device, check_device, predicted
from benchmarks.acceptance_grid import Method
from benchmarks.report import RESULTS, figure, machine_of, save, table
from compressors import Kept
from vericache.demo.prompts import PROMPTS
from vericache.demo.worker import ENVIRONMENT
from vericache.draft.formats import FORMATS, Simulated, page_format, pages_per_head

if TYPE_CHECKING:
    from benchmarks.acceptance_rounds import Predicted

NAME = "acceptance-bytes"
RECENT, PAGE = 32, 32
ONE_WIDTH = [name for name in FORMATS if name != "turboquant_mixed"]  # that one: ``benchmarks.mixed_bits``
SIMULATED = {name for name in ONE_WIDTH if page_format(name, PAGE, 64, torch.float32).simulated}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    methods = [Method("kvzip", "per_head"), Method("kvzip", "uniform")]
    parser.add_argument("--methods", nargs="+", type=Method.parse, default=methods, metavar="COMPRESSOR:COUNTS")
    parser.add_argument("--formats", nargs="+", choices=ONE_WIDTH, default=ONE_WIDTH)
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.25, 0.5, 0.1])
    parser.add_argument("--draft-length", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=128, help="output tokens per prompt")
    parser.add_argument("--threads", type=int, default=2)
    add_device(parser)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--add", action="store_true", help="keep the points that are in --out, and leave them out here")
    args = parser.parse_args(argv)
    check_device(parser, args)
    args.prompts, args.drafts = list(PROMPTS), [args.draft_length]
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(args.threads))
    torch.set_num_threads(args.threads)  # torch is loaded by now and has read the environment
    console, lines = Console(), known(args)
    with console.status("an engine, a reference model, and the prompts' KV"):
        run = predicted(args)
    average = sum(len(p) for p in run.prompts.values()) / len(run.prompts)
    todo = {(m, r): [f for f in args.formats if (f, *of(m), r) not in map(point, lines)]
            for r in args.ratios for m in args.methods}  # fmt: skip
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:
        task = progress.add_task(NAME, total=sum(map(len, todo.values())))
        for (method, ratio), formats in todo.items():
            kept = {name: s.kept for name, s in run.select(method, ratio).items()} if formats else {}
            for name in formats:
                progress.update(task, description=f"{name} {method.name} {ratio}")
                lines.append(measured(run, name, method, ratio, kept))
                write(lines, args, average)
                progress.advance(task)
    return 0


def known(args: argparse.Namespace) -> list[dict[str, Any]]:
    file = args.out / f"{NAME}.json"
    if not args.add or not file.exists():
        return []
    found: list[dict[str, Any]] = json.loads(file.read_text())["lines"]
    return found


def of(method: Method) -> tuple[str, str]:
    return method.compressor, method.counts


def label(name: str) -> str:
    return f"{name} (simulated)" if name in SIMULATED else name


def point(line: dict[str, Any]) -> tuple[str, str, str, float]:
    return line["format"], line["compressor"], line["counts"], line["ratio"]


def measured(run: "Predicted", name: str, method: Method, ratio: float, kept: Mapping[str, Kept]) -> dict[str, Any]:
    """One point: all prompts in one format."""
    found = run.packed_rounds(kept, run.packing(name, PAGE, RECENT))
    prompts = {p: {"accepted": rounds, "loops": run.loops(p)} for p, rounds in found.items()}
    sizes = [size(name, kept[p], len(run.prompts[p]), run.head_dim) for p in kept]
    return {
        "format": name, "compressor": method.compressor, "counts": method.counts, "ratio": ratio,
        "simulated": name in SIMULATED, "size": round(sum(sizes) / len(sizes), 4), **run.pooled(found),
        "prompts": prompts,
    }  # fmt: skip


def size(name: str, kept: Kept, context: int, head_dim: int) -> float:
    """Bytes of a slot (``DraftArena.bytes_held``) over those of full KV, both in bfloat16. Where pages are simulated,
    what packed ones would take."""
    form = page_format(name, PAGE, head_dim, torch.bfloat16)
    layers, heads = kept.counts.shape
    pages = int(pages_per_head(kept.counts, PAGE).sum())
    held = form.packed_bytes(kept) if isinstance(form, Simulated) else form.slot_bytes(pages, layers, heads)
    return held / (layers * heads * context * head_dim * 2 * torch.bfloat16.itemsize)


def write(lines: Sequence[dict[str, Any]], args: argparse.Namespace, context: float) -> None:
    found = {"date": date.today().isoformat(), "machine": machine_of(args.device), "context": round(context),
             "lines": list(lines), "draft_length": args.draft_length, "tokens": args.tokens}  # fmt: skip
    order = ONE_WIDTH
    rows = [
        [label(p["format"]), f"{p['compressor']} {p['counts']}", p["ratio"], f"{p['size']:.3f}",
         f"{p['accepted']:.1f}", f"{p['min']} / {p['max']}", p["rounds"]]
        for p in sorted(lines, key=lambda p: (p["compressor"], p["counts"], order.index(p["format"]), p["ratio"]))
    ]  # fmt: skip
    header = ["page format", "method", "ratio", "size", "accepted per round", "min / max", "rounds"]
    text = [
        "# Accepted drafts per round over compressed size",
        "",
        f"`python -m benchmarks.acceptance_bytes`, {found['date']}, {found['machine']}.",
        f"SmolLM2-135M-Instruct, float32, greedy, {len(lines[0]['prompts'])} prompts of {found['context']} tokens on "
        f"average, {args.tokens} output tokens each, x = {args.draft_length}. Rounds are predicted from what is kept",
        "(tests hold the engine to that); full rounds over prompts whose output does not loop. Size: bytes over full",
        "KV in bfloat16, of",
        f"the compressed context. Behind it are uncompressed the last {RECENT} to {RECENT + PAGE - 1} verified tokens "
        "(all of them where the format is plain) and the running round. Simulated: drafts are measured, the size is "
        "computed, since the pages drafted on are plain ones that hold rounded numbers.",
        "",
        *table(header, rows, left=2),
        "",
        f"![Accepted drafts per round over compressed size]({NAME}.png)",
        "",
    ]
    save(args.out, NAME, found, "\n".join(text))
    with figure(args.out / f"{NAME}.png", 8, 4.5) as (_, axes):
        methods = list(dict.fromkeys((p["compressor"], p["counts"]) for p in lines))
        for name in ONE_WIDTH:
            for method in methods:
                points = sorted((p["size"], p["accepted"]) for p in lines
                                if p["format"] == name and (p["compressor"], p["counts"]) == method)  # fmt: skip
                if points:
                    style = "-" if method == methods[0] else "--"
                    axes.plot(*zip(*points, strict=True), style, marker="o", color=f"C{order.index(name)}",
                              label=f"{label(name)}, {' '.join(method)}")  # fmt: skip
        axes.set_xscale("log")
        axes.minorticks_off()
        ticks = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5]
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.set_xlabel("compressed bytes / full KV in bfloat16")
        axes.set_ylabel(f"accepted drafts per round (x = {args.draft_length})")
        axes.axhline(args.draft_length, color="black", linestyle=":", linewidth=1)
        axes.legend(fontsize=7)


if __name__ == "__main__":
    raise SystemExit(main())
