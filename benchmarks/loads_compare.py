"""What the simulator says of a load that was measured: ``python -m benchmarks.loads_compare [FILE]``.

FILE is a result of ``benchmarks.loads_gpu``. Each of its engines and loads is simulated (``scheduler/simulator.py``)
with the same memory, arena, requests and chance of a right draft, over the memory and link bandwidth given there, and
set beside the measured rate of decoded tokens (outputs without their first tokens, over the time beyond the prefills,
which the simulator does not know). Writes JSON, a table and a plot into docs/results/.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import RESULTS, figure, machine, save, table
from scheduler.byte_model import Machine
from scheduler.simulated import Setup
from scheduler.workload import Job
from vericache.simulate.study import Load, Shape, Study

NAME = "loads-compare"
MODES = {"plain": "plain", "auto": "auto", "always": "staggered"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=RESULTS / "loads-gpu-8b.json")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    render(compared(json.loads(args.file.read_text())), args.out)


def compared(measured: Mapping[str, Any]) -> dict[str, Any]:
    options, rows = measured["options"], []
    if options["acceptance"] is None:
        raise SystemExit("the chance of a right draft must be known: expected a result with --acceptance")
    for requests in options["loads"]:
        for variant, engine in measured["engines"].items():
            runs = engine["loads"][str(requests)]["runs"]
            rate = median(run["decode_tokens_per_s"] for run in runs)
            busy = median(run.get("link_busy", 0.0) for run in runs)
            rows.append({"requests": requests, "variant": variant, "measured": rate, "link": busy,
                         **simulated(setup(measured, variant), options, requests)})  # fmt: skip
    about = {name: options[name] for name in ("model", "prompt_tokens", "tokens", "kv_gib", "acceptance", "ratio")}
    return {"gpu": measured["gpu"], "measured": measured["date"], "machine": machine(), **about, "rows": rows}


def setup(measured: Mapping[str, Any], variant: str) -> Setup:
    options, geometry = measured["options"], measured["geometry"]
    memory, bandwidth = geometry["weights"] + options["kv_gib"] * 2**30, options["hbm_tb_s"] * 1e12
    arena = options["auto_arena_fraction"] if variant == "auto" else options["arena_fraction"]
    return Setup(
        Machine(memory, bandwidth, options["link_gb_s"] * 1e9), MODES[variant], geometry["weights"],
        geometry["kv_per_token"], ratio=options["ratio"], arena=arena, draft_length=options["draft_length"],
    )  # fmt: skip


def simulated(setup: Setup, options: Mapping[str, Any], requests: int) -> dict[str, float]:
    """All requests at once, all alike."""
    shape = Shape(options["prompt_tokens"], options["tokens"], options["acceptance"], spread=0.0)
    jobs = [Job(f"r{i}", shape.prompt, shape.output, shape.chance) for i in range(requests)]
    outcome = Study(setup, shape, 0.0).run(Load(None, jobs))
    return {"simulated": outcome.figures()["tokens_per_s"], "simulated_link": outcome.figures()["link_busy"]}


def render(found: Mapping[str, Any], out: Path) -> None:
    rows = found["rows"]
    ratio = {id(r): r["measured"] / r["simulated"] for r in rows}
    spans = []
    for variant in dict.fromkeys(r["variant"] for r in rows):
        shares = sorted(ratio[id(r)] for r in rows if r["variant"] == variant)
        spans.append(f"{variant} {shares[0]:.2f} / {median(shares):.2f} / {shares[-1]:.2f}")
    about = f"{found['tokens']} output tokens, {found['kv_gib']} GiB for KV, each draft right with chance"
    lines = [
        "# Simulated and measured",
        "",
        f"{found['gpu']}, measured {found['measured']} ([table](loads-gpu-8b.md)); {found['model']}, prompts of "
        f"{found['prompt_tokens']} tokens, {about} {found['acceptance']} (synthetic).",
        "`python -m benchmarks.loads_compare`.",
        "",
        f"Measured over simulated rate, min / median / max over the loads: {'; '.join(spans)}.",
        "",
        "Decoded tokens per second. The simulator knows bytes and the link, and nothing of prefills, scoring rows, the",
        "host and graphs.",
        "",
        *table(
            ["requests", "engine", "measured", "simulated", "measured over simulated", "link busy", "simulated"],
            [
                [r["requests"], r["variant"], f"{r['measured']:.0f}", f"{r['simulated']:.0f}", f"{ratio[id(r)]:.2f}",
                 f"{r['link']:.2f}", f"{r['simulated_link']:.2f}"]
                for r in rows
            ],
            2,
        ),
        "",
        f"![Decoded tokens per second over requests, measured and simulated]({NAME}.png)",
    ]  # fmt: skip
    save(out, NAME, dict(found), "\n".join(lines))
    with figure(out / f"{NAME}.png", 7, 4) as (_, axes):
        for i, variant in enumerate(dict.fromkeys(r["variant"] for r in rows)):
            mine = [r for r in rows if r["variant"] == variant]
            loads = [r["requests"] for r in mine]
            axes.plot(loads, [r["measured"] for r in mine], "o-", color=f"C{i}", label=f"{variant}, measured")
            axes.plot(loads, [r["simulated"] for r in mine], "--", color=f"C{i}", label=f"{variant}, simulated")
        axes.set(xscale="log", xlabel="requests at once", ylabel="decoded tokens per second")
        axes.legend(fontsize=8)


if __name__ == "__main__":
    main()
