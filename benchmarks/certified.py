"""Certified decode, measured without an engine: ``python -m benchmarks.certified PART ...``, on the bundled model and
real queries. Every part adds to one JSON file in docs/results/ and draws the table and the picture anew.

* ``decisions``: how often a query's error exceeds epsilon, and what had to be fetched, with a perfect sketch and with
  the 2-bit one within 0, 1 and 2 standard deviations. Of its denominator; with ``--bound output``, in files of its own,
  of its output.
* ``budget``: the error of attention from what is kept alone, sampled and top-k, at equal budget.
* ``quality``: answers to generated retrieval questions (``benchmarks.certified_tasks``).

Contexts, KVzip's scores and the queries of decoding steps are recorded once, into ``--records``. Results are saved
after every cell. Several processes with ``--out`` and ``--records`` of their own can share the work; ``--merge`` joins
what they wrote.
"""

import argparse
import json
import math
from collections.abc import Sequence
from datetime import date
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any

import torch

from benchmarks.certified_model import Model, recorded
from benchmarks.certified_quality import quality
from benchmarks.certified_run import DELTA, EPSILONS, budget_errors, decisions
from benchmarks.certified_tasks import KINDS
from benchmarks.report import RESULTS, figure, machine_of, save, table
from vericache.certified.certificate import Bound
from vericache.errors import ConfigError

NAMES: dict[Bound, str] = {"denominator": "certified", "output": "certified-output"}
SKETCHES = (("perfect", 0.0), ("per_channel2", 0.0), ("per_channel2", 1.0), ("per_channel2", 2.0))
BUDGETS = (8, 16, 32)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["decisions", "budget", "quality", []])
    parser.add_argument("--records", type=Path, default=Path("out/certified"))
    parser.add_argument("--prompts", nargs="+", default=["find_needle", "continue_code", "summarise", "extract_json"])
    parser.add_argument("--steps", type=int, default=5, help="decoding steps of each prompt")
    parser.add_argument("--every", type=int, default=1, help="of so many layers one")
    parser.add_argument("--draws", type=int, default=8, help="samples of each step")
    parser.add_argument("--compression", type=int, default=16, help="decisions, quality: context over what is kept")
    parser.add_argument("--sketches", nargs="+", type=int, default=range(len(SKETCHES)), help="decisions: which")
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    parser.add_argument("--bound", choices=list(NAMES), default="denominator", help="decisions, quality: of what")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--questions", type=int, default=10, help="quality: at least so many of each kind and length")
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048], help="quality: tokens of a context")
    parser.add_argument("--device", default="cpu", help="torch's: cpu, cuda")
    parser.add_argument("--batch", type=int, default=1, help="decisions: steps decided at a time; a GPU wants many")
    parser.add_argument("--model", type=Path, help="folder of the model, instead of the bundled one")
    parser.add_argument("--merge", nargs="+", type=Path, default=[], metavar="FOLDER", help="join their results")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    if args.merge:
        render(
            combined([json.loads((each / f"{NAMES[args.bound]}.json").read_text()) for each in args.merge]), args.out
        )
        return
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("highest")  # float32, not TF32
    if args.device != "cpu":  # a default device costs some microseconds a call
        torch.set_default_device(args.device)
    file = args.out / f"{NAMES[args.bound]}.json"
    result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    result |= {"machine": machine_of(args.device), "date": str(date.today()), "delta": DELTA, "bound": args.bound}
    model = cache(partial(Model, args.model))
    with torch.no_grad():
        for part in args.parts:
            PARTS[part](result, args, model)
    render(result, args.out)


def combined(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result of several, the cells of all."""

    def join(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        both = one.keys() & other.keys()
        inner = {k: join(one[k], other[k]) for k in both if isinstance(one[k], dict) and k != "methods"}
        return {**one, **other, **inner}

    merged = reduce(join, results)
    return {**merged, "machine": "; ".join(sorted({r["machine"] for r in results}))}


def _decisions(result: dict[str, Any], args: argparse.Namespace, model: Any) -> None:
    prompts = recorded(args.records, args.prompts, args.every, model)
    rows = result.setdefault("decisions", {})
    for sketch, z in (SKETCHES[i] for i in args.sketches):
        for eps in args.epsilons:
            ratio, how = 1 / args.compression, (args.steps, args.draws, args.batch, args.bound)
            row = decisions(prompts, ratio, sketch, z, eps, *how)
            key = f"{sketch} {z:g} {eps:g}"
            about = {"sketch": sketch, "z": z, "eps": eps, "compression": args.compression}
            about |= {
                "bound": args.bound,
                "prompts": list(prompts),
                "layers": len(next(iter(prompts.values())).context.scores),
            }
            rows[key] = about | row
            print(key, row, flush=True)
            render(result, args.out)


def _budget(result: dict[str, Any], args: argparse.Namespace, model: Any) -> None:
    prompts = recorded(args.records, args.prompts, args.every, model)
    for n in BUDGETS:
        methods = budget_errors(prompts, 1 / n, args.steps, 2)
        found = {"prompts": list(prompts), "every": args.every, "methods": methods}
        result.setdefault("budget", {})[str(n)] = found
        print(f"budget {n}x", methods, flush=True)
        render(result, args.out)


def _quality(result: dict[str, Any], args: argparse.Namespace, model: Any) -> None:
    for tokens in args.tokens:
        for kind in args.kinds:
            found = quality(model(), kind, tokens, args.questions, 1 / args.compression, 0.05, 1.0, args.bound)
            about = {"compression": args.compression, "eps": 0.05, "z": 1.0}
            result.setdefault("quality", {}).setdefault(kind, {})[str(tokens)] = about | found
            print(kind, tokens, found, flush=True)
            render(result, args.out)


PARTS = {"decisions": _decisions, "budget": _budget, "quality": _quality}


def render(result: dict[str, Any], out: Path) -> None:
    bound: Bound = result.get("bound", "denominator")
    command = "python -m benchmarks.certified" + (" --bound output" if bound == "output" else "")
    lines = [
        "# Certified decode" + (" of the output" if bound == "output" else ""),
        "",
        f"`{command}`, {result['date']}, {result['machine']}.",
        "SmolLM2-135M-Instruct in float32, KVzip's scores, the same number of tokens in every head;",
        f"delta = {result['delta']}. What it means: [docs/certified.md](../certified.md).",
        "",
    ]
    for title, part in (("Decisions", _decision_lines), ("Equal budget", _budget_lines), ("Quality", _quality_lines)):
        if found := result.get(title.split()[-1].lower()):
            lines += [f"## {title}", "", *part(found), ""]
    if picture(list(result.get("decisions", {}).values()), out, NAMES[bound]):
        lines += [f"![Share of the context that decisions fetch, over epsilon]({NAMES[bound]}.png)", ""]
    save(out, NAMES[bound], result, "\n".join(lines))


def picture(rows: list[dict[str, Any]], out: Path, name: str) -> bool:
    """Of decisions; whether there is one."""
    try:
        if not rows:
            return False
        with figure(out / f"{name}.png", 9, 4) as (_, axes):
            for sketch, z in SKETCHES:
                mine = sorted((r for r in rows if (r["sketch"], r["z"]) == (sketch, z)), key=lambda r: r["eps"])
                if mine:
                    label = sketch if sketch == "perfect" else f"2-bit, z = {z:g}"
                    axes.plot([r["eps"] for r in mine], [100 * r["fetched"] for r in mine], marker="o", label=label)
            axes.set(xscale="log", xlabel="epsilon", ylabel="% of the context fetched", title="What decisions fetch")
            axes.legend()
    except ConfigError as error:  # the numbers are worth more than their picture
        print(error, flush=True)
        return False
    return True


def _decision_lines(rows: dict[str, Any]) -> list[str]:
    some = next(iter(rows.values()))
    what = some.get("bound", "denominator")
    header = (
        "sketch", "z", "epsilon", "queries", "decisions", "failed", "worst layer", "fetching", "fetched",
        "of those that fetch", "all tokens", "output error",
    )  # fmt: skip
    ordered = sorted(rows.values(), key=lambda r: (r["sketch"] != "perfect", r["z"], r["eps"]))
    found = [
        [
            r["sketch"], f"{r['z']:g}", f"{r['eps']:g}", f"{r['queries']:,}", f"{r['decisions']:,}",
            *(f"{100 * r[name]:.2f} %" for name in ("failed", "worst_layer")),
            *(f"{100 * r[name]:.1f} %" for name in ("fetching", "fetched", "fetched_when_fetching", "fallback")),
            f"{r['output']:.4f}",
        ]
        for r in ordered
    ]  # fmt: skip
    return [
        f"{some['compression']}x; prompts {', '.join(some['prompts'])}; {some['layers']} of 30 layers;",
        "queries are distinct: (step, layer, query head). Each is decided with several samples.",
        f"Failed: a query's {what} is off by more than epsilon, of all queries and samples. Fetching, and all",
        "tokens (more than half was needed): of (step, layer, KV head). Fetched: share of the context per KV head, the",
        "union over its 3 queries. Output error: of the attention's output, mean.",
        "",
        *table(header, found),
    ]


def _budget_lines(budgets: dict[str, Any]) -> list[str]:
    some = next(iter(budgets.values()))
    names = list(some["methods"])
    rows = [
        [name, *(f"{b['methods'][name]['mean']:.3f} / {b['methods'][name]['p95']:.3f}" for b in budgets.values())]
        for name in names
    ]
    ratios = [
        ["shrinkage (sketch) over top-k"]
        + [f"{b['methods'][names[-1]]['mean'] / b['methods']['top-k']['mean']:.2f}" for b in budgets.values()]
    ]
    return [
        "Relative error of the attention's output from what is kept alone, mean / 95th percentile; prompts",
        f"{', '.join(some['prompts'])}, of {some['every']} layers one, {some['methods']['top-k']['queries']} queries,",
        "two samples of each. A Poisson sample is a little smaller than its budget (16x: 0.060 of the tokens).",
        "",
        *table(["method", *(f"{n}x" for n in budgets)], rows + ratios),
    ]


def _share(found: dict[str, float], dense: dict[str, float]) -> str:
    right = f"{100 * found['right'] / dense['right']:.0f} %" if dense["right"] else "-"
    return f"{right} / {100 * math.exp(found['logprob'] - dense['logprob']):.0f} %"


def _quality_lines(kinds: dict[str, Any]) -> list[str]:
    cells = [(kind, found) for kind, of in kinds.items() for _, found in sorted(of.items(), key=lambda c: int(c[0]))]
    some = cells[0][1]
    names = list(some["methods"])
    shares = [f"{n}, share of dense" for n in names[1:]]
    rows = []
    for kind, found in cells:
        of = found["methods"]
        shown = [f"{100 * of[n]['right']:.0f} % / {of[n]['logprob']:.2f}" for n in names]
        relative = [_share(of[n], of[names[0]]) for n in names[1:]]
        rows.append(
            [
                *(kind, found["tokens"], found["contexts"], found["questions"], *shown, *relative),
                f"{100 * found['fetched']:.0f} %",
            ]
        )
    return [
        f"Whole answers that are right / log probability of the right answer's tokens, at {some['compression']}x,",
        f"certified with epsilon {some['eps']:g}, z = {some['z']:g}. The context is compressed, then asked about;",
        "fetched: share of it per KV head and token. Share of dense: right answers over those of dense attention / the",
        "probability of the right answer's tokens over theirs, geometric mean.",
        "",
        *table(["task", "tokens", "contexts", "questions", *names, *shares, "fetched"], rows),
    ]


if __name__ == "__main__":
    main()
