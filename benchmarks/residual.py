"""Reloads that leave out what the arena holds (``residual_reload``) over whole ones, simulated.

``python -m benchmarks.residual``. Simulated time: the scheduler's own code over a modelled GPU and link
(``scheduler/simulator.py``), no arithmetic, no prefill, and the copies on the device that stand in for the link's cost
nothing. One 8B model on one 141 GB GPU at 4.2 TB/s, prompts of 32k tokens, at rho = memory bandwidth over link = 10,
25, 60, 80, with twice the requests that plain vLLM holds. Drafts are right with the same chance at every ratio, so that
only the bytes differ: more kept tokens would also make better drafts. Each ratio is over the same seed with whole
reloads; both have the arena that the byte model finds best for them.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.loads import RHOS, SHAPE, base
from benchmarks.report import command, figure, machine, save, table
from vericache.simulate.command import full_rows
from vericache.simulate.study import Load, Study, with_arena

RATIOS = (0.1, 0.25, 0.5)
MODES = {"staggered": "always draft", "auto": "auto"}
COLUMNS = ("mode", "rho", "kept", "tokens/s", "over whole reloads", "min", "max", "link bytes per accepted draft")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    requests = 2 * full_rows(base(1), SHAPE)
    runs = []
    for mode in MODES:
        for rho in RHOS:
            for ratio in RATIOS:
                pairs = [pair(mode, rho, ratio, requests, args.seconds, seed) for seed in range(args.seeds)]
                runs.append({"mode": mode, "rho": rho, "ratio": ratio, "pairs": pairs})
                print(mode, rho, ratio, [round(p["speedup"], 3) for p in pairs], flush=True)
    return {"machine": machine(), "requests": requests, "seconds": args.seconds, "runs": runs}


def pair(mode: str, rho: int, ratio: float, requests: int, seconds: float, seed: int) -> dict[str, Any]:
    """The same load with and without; bytes per accepted draft over those of whole reloads, None if nobody drafts."""
    rates, link = [], []
    for residual in (True, False):
        setup = with_arena(replace(base(rho), mode=mode, ratio=ratio, residual=residual), SHAPE)
        outcome = Study(setup, SHAPE, seconds, seed=seed).run(Load(requests))
        rates.append(outcome.rate)
        link.append(outcome.tally.link / outcome.tally.right if outcome.tally.right else None)
    bytes_over = link[0] / link[1] if link[0] is not None and link[1] else None
    return {"tokens_per_s": round(rates[0], 2), "speedup": rates[0] / rates[1], "bytes": bytes_over}


def render(found: dict[str, Any], out: Path) -> None:
    with figure(out / "residual.png", 9, 3.8) as (fig, axes):
        axes.remove()
        for mode, panel in zip(MODES, fig.subplots(1, len(MODES), sharey=True), strict=True):
            for rho in RHOS:
                mine = [r for r in found["runs"] if r["mode"] == mode and r["rho"] == rho]
                speeds = [median(p["speedup"] for p in r["pairs"]) for r in mine]
                panel.plot([r["ratio"] for r in mine], speeds, marker=".", label=f"rho {rho}")
            panel.set_title(MODES[mode], fontsize=9)
            panel.set_xlabel("share of the context that is kept")
            panel.legend(fontsize=7)
        fig.axes[0].set_ylabel("tokens per second over whole reloads")
    lines = [
        "# Reloads of what the arena does not hold, simulated",
        "",
        str(__doc__).strip(),
        "",
        f"{found['requests']} requests at a time, {found['seconds']:g} simulated seconds per point; medians over "
        f"{len(found['runs'][0]['pairs'])} seeds, with the least and the largest. Ran on {found['machine']}.",
        "",
        "![Speed over whole reloads](residual.png)",
        "",
        *table(COLUMNS, [row(r) for r in found["runs"]]),
    ]
    save(out, "residual", found, "\n".join(lines))


def row(run: dict[str, Any]) -> list[Any]:
    speeds, saved = [p["speedup"] for p in run["pairs"]], [p["bytes"] for p in run["pairs"] if p["bytes"] is not None]
    return [
        MODES[run["mode"]], run["rho"], run["ratio"], f"{median(p['tokens_per_s'] for p in run['pairs']):.0f}",
        f"{median(speeds):.2f}", f"{min(speeds):.2f}", f"{max(speeds):.2f}",
        f"{median(saved):.2f}" if saved else "nobody drafts with whole reloads",
    ]  # fmt: skip


if __name__ == "__main__":
    command(
        __doc__,
        measure,
        render,
        {
            "--seconds": {"type": float, "default": 6.0, "help": "of simulated time that count"},
            "--seeds": {"type": int, "default": 3, "help": "runs of each point"},
        },
    )
