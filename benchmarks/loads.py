"""Plain vLLM, always drafting and mode auto from one request to ten times what memory holds, simulated; and ablations.

``python -m benchmarks.loads``. Simulated time: the scheduler's own code over a modelled GPU and link
(``scheduler/simulator.py``), no arithmetic, no prefill. One 8B model on one 141 GB GPU at 4.2 TB/s, prompts of 32k
tokens, at rho = memory bandwidth over link = 10, 25, 60, 80; every load is a number of requests at a time.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report import command, figure, machine, save, table
from scheduler.acceptance import chance_of
from scheduler.byte_model import Machine
from scheduler.simulated import Setup
from scheduler.workload import Shape
from vericache.simulate.command import full_rows
from vericache.simulate.show import curves
from vericache.simulate.study import Load, Study, with_arena

MEMORY, BANDWIDTH, WEIGHTS, TOKEN = 130e9, 4.2e12, 16e9, 131072.0
RHOS = (10, 25, 60, 80)
SHAPE = Shape(32768, 512, chance_of(0.64, 25))  # KVzip per head on the bundled model: docs/results/acceptance.md
LOADS = (0.04, 0.25, 0.5, 0.75, 1.0, 1.25, 2.0, 4.0, 10.0)  # of what plain vLLM holds
ABLATIONS: dict[str, dict[str, str]] = {
    "auto": {},
    "auto, fixed length": {"draft_policy": "fixed"},
    "auto, bandit": {"draft_policy": "bandit"},
    "always": {"mode": "staggered"},
    "always, fixed length": {"mode": "staggered", "draft_policy": "fixed"},
    "always, lock-step": {"mode": "lockstep", "draft_policy": "fixed"},
}
MODES = ("plain", "staggered", "auto")
COLUMNS = (
    "rho", "requests", "mode", "over plain", "tokens/s", "plain rows", "drafting", "x", "accepted", "link", "arena",
)  # fmt: skip


def measure(args: argparse.Namespace) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    ablated: list[dict[str, Any]] = []
    for rho in RHOS:
        more = at(rho, args.seconds)
        runs, ablated = runs + more[0], ablated + more[1]
        print(f"rho {rho}: auto {[r['speedup'] for r in more[0] if r['mode'] == 'auto']}", flush=True)
    return {"machine": machine(), "full": full_rows(base(1), SHAPE), "seconds": args.seconds} | {
        "runs": runs, "ablations": ablated,
    }  # fmt: skip


def base(rho: int) -> Setup:
    return Setup(Machine(MEMORY, BANDWIDTH, BANDWIDTH / rho), "auto", WEIGHTS, TOKEN)


def at(rho: int, seconds: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All loads, and the ablations."""
    full = full_rows(base(rho), SHAPE)
    plain: dict[str, dict[str, str]] = {name: {} for name in MODES}
    runs = [r for share in LOADS for r in measured(base(rho), rho, max(1, round(share * full)), plain, seconds)]
    return runs, measured(base(rho), rho, 2 * full, ABLATIONS, seconds)


def measured(base: Setup, rho: int, requests: int, modes: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
    """Figures of each mode at one load; ``speedup`` is over plain vLLM."""
    plain = Study(replace(base, mode="plain"), SHAPE, seconds).run(Load(requests))
    found = []
    for name, changes in modes.items():
        setup = with_arena(replace(base, **({"mode": name} if name in MODES else changes)), SHAPE)
        outcome = plain if name == "plain" else Study(setup, SHAPE, seconds).run(Load(requests))
        speedup = round(outcome.rate / plain.rate, 4)
        arena = None if name == "plain" else round(setup.arena, 3)
        found.append(
            {"rho": rho, "mode": name, "requests": requests, "speedup": speedup, "arena": arena, **outcome.figures()}
        )
    return found


def shown(mode: str) -> str:
    return "always draft" if mode == "staggered" else mode


def render(found: dict[str, Any], out: Path) -> None:
    runs, full = found["runs"], found["full"]
    with figure(out / "loads.png", 10, 7) as (fig, axes):
        axes.remove()
        for rho, panel in zip(RHOS, fig.subplots(2, 2).flat, strict=True):
            curves(panel, [{**r, "mode": shown(r["mode"])} for r in runs if r["rho"] == rho], full)
            panel.set_title(f"rho {rho}", fontsize=9)
            panel.legend(fontsize=7)
    auto = [r for r in runs if r["mode"] == "auto"]
    short = [r["speedup"] for r in auto if r["requests"] > full]
    lines = [
        "# Speed over load, simulated",
        "",
        str(__doc__).strip(),
        "",
        f"Plain vLLM holds {full} requests. Drafts: 0.64 of 25 accepted. Arena: the best by the byte model for each",
        f"mode (`vericache plan`). {found['seconds']:g} simulated seconds are counted per point.",
        "",
        f"Mode auto over plain vLLM: lowest {min(r['speedup'] for r in auto):.3f} of all loads; with more requests "
        f"than memory holds {min(short):.2f} to {max(short):.2f}.",
        "",
        "![Speed over load](loads.png)",
        "",
        *table(COLUMNS, [row(r) for r in runs], 3),
        "",
        "## Ablations, with twice the requests that memory holds",
        "",
        *table(COLUMNS, [row(r) for r in found["ablations"]], 3),
    ]
    save(out, "loads", found, "\n".join(lines))


def row(r: dict[str, Any]) -> list[Any]:
    return [
        r["rho"], r["requests"], shown(r["mode"]), f"{r['speedup']:.2f}", f"{r['tokens_per_s']:.0f}", r["plain_rows"],
        r["drafting_rows"], r["draft_length"], r["accepted"], f"{r['link_busy']:.0%}",
        "" if r["arena"] is None else f"{r['arena']:.2f}",
    ]  # fmt: skip


if __name__ == "__main__":
    command(
        __doc__, measure, render, {"--seconds": {"type": float, "default": 6.0, "help": "of simulated time that count"}}
    )
