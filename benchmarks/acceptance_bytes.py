"""How many drafts survive for how many bytes? ``python -m benchmarks.acceptance_bytes``: accepted drafts per round over
the compressed size, one line per method and page format, on the bundled prompts and model (greedy, float32). Writes
JSON, a table and a plot into docs/results/.

Only full rounds count, and the pooled figure leaves out outputs that loop. Sizes are
fractions of the full KV in bfloat16, tables and counts included; the uncompressed tail is counted apart.
"""

import argparse
import json
import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.acceptance_engine import Measured, measure, pooled
from benchmarks.report import RESULTS, figure, machine, save, table
from vericache.demo.worker import ENVIRONMENT
from vericache.draft.formats import FORMATS, page_format

NAME = "acceptance-bytes"
RECENT, PAGE = 32, 32
SIMULATED = {name for name in FORMATS if page_format(name, PAGE, 64, torch.float32).simulated}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--methods", nargs="+", default=["kvzip:per_head", "kvzip:uniform"], metavar="COMPRESSOR:COUNTS"
    )
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.1, 0.25, 0.5])
    parser.add_argument("--draft-length", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=128, help="output tokens per prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--add", action="store_true", help="keep the points that are in --out, and leave them out here")
    args = parser.parse_args(argv)
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(args.threads))
    torch.set_num_threads(args.threads)  # torch is loaded by now and has read the environment
    from benchmarks.engine import LiveEngine  # imports vLLM, which reads the environment
    from vericache.demo import model
    from vericache.demo.prompts import PROMPTS, load
    from vericache.demo.run import ENGINE

    console, lines = Console(), known(args)
    arguments = {**ENGINE, "kv_cache_memory_bytes": 6 << 30, "enable_prefix_caching": True}
    for name in args.formats:
        settings = {"min_prompt_tokens": 512, "page_format": name, "page_tokens": PAGE, "recent": RECENT}
        engine = LiveEngine(model.prepare(), arguments, settings)
        prompts = load(list(PROMPTS), engine.tokenizer)
        for method in args.methods:
            compressor, _, counts = method.partition(":")
            for ratio in args.ratios:
                if any((name, compressor, counts, ratio) == point(p) for p in lines):
                    continue
                with console.status(f"{name} {compressor} {counts} {ratio}: {len(prompts)} prompts"):
                    options = {"ratio": ratio, "draft_length": args.draft_length}
                    results = measure(engine, prompts, compressor, counts, args.tokens, **options)
                lines.append(line(name, compressor, counts, ratio, results))
                console.print({k: v for k, v in lines[-1].items() if k != "prompts"})
                write(lines, args, sum(len(p) for p in prompts.values()) / len(prompts))
        engine.close()
    return 0


def known(args: argparse.Namespace) -> list[dict[str, Any]]:
    file = args.out / f"{NAME}.json"
    if not args.add or not file.exists():
        return []
    found: list[dict[str, Any]] = json.loads(file.read_text())["lines"]
    return found


def label(name: str) -> str:
    return f"{name} (simulated)" if name in SIMULATED else name


def point(line: dict[str, Any]) -> tuple[str, str, str, float]:
    return line["format"], line["compressor"], line["counts"], line["ratio"]


def line(name: str, compressor: str, counts: str, ratio: float, results: Sequence[Measured]) -> dict[str, Any]:
    """One point. The engine reports bytes over those of float32 KV; packed pages do not depend on the dtype. Where they
    are simulated, the size is what they would take."""
    kept = sum(m.kept for m in results) / len(results)
    accepted = [a for m in results if not m.loops for a in m.accepted]
    return {
        "format": name, "compressor": compressor, "counts": counts, "ratio": ratio, "simulated": name in SIMULATED,
        "size": round(kept * (1 if name == "plain" else 2), 4), "accepted": round(pooled(results), 2),
        "rounds": len(accepted), "min": min(accepted), "max": max(accepted),
        "prompts": {m.prompt: {"accepted": m.accepted, "loops": m.loops} for m in results},
    }  # fmt: skip


def write(lines: Sequence[dict[str, Any]], args: argparse.Namespace, context: float) -> None:
    found = {"date": date.today().isoformat(), "machine": machine(), "context": round(context), "lines": list(lines),
             "draft_length": args.draft_length, "tokens": args.tokens}  # fmt: skip
    order = list(FORMATS)
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
        f"average, {args.tokens} output tokens each, x = {args.draft_length}. Measured in the engine; only rounds with",
        "at least x drafts count, over prompts whose output does not loop. Size: bytes over full KV in bfloat16, of",
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
        for name in FORMATS:
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
