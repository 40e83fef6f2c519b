"""Simulated runs for people: a table, the curve over load, the schedule as a picture, CSV."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from vericache.figure import figure

COLOURS = {
    "R": "#9aa5b1", "D": "#7fc97f", "L": "#33a02c", "l": "#b2df8a", "V": "#d95f02", "C": "#7570b3", ".": "#eeeeee",
}  # fmt: skip
MEANING = {
    "R": "plain row", "D": "draft", "L": "draft, KV is loaded", "l": "KV is loaded", "V": "verify",
    "C": "leaves the device", ".": "waits",
}  # fmt: skip
STYLES = {"plain": "k-", "staggered": "C1-", "always draft": "C1-", "lockstep": "C3:", "auto": "C0-"}


def show(runs: Sequence[dict[str, Any]], console: Console) -> None:
    """``runs``: figures of each mode at each load, in order."""
    numbers = ("requests", "tokens/s", "over plain", "plain rows", "drafting", "x", "accepted", "link", "moves")
    table = Table(
        "mode",
        *(Column(name, justify="right") for name in numbers),
        caption="moves: demotions, promotions, preemptions",
    )
    for run in runs:
        table.add_row(
            run["mode"], str(run["requests"]), f"{run['tokens_per_s']:.0f}", f"{run['speedup']:.2f}",
            f"{run['plain_rows']:.1f}", f"{run['drafting_rows']:.1f}", f"{run['draft_length']:.1f}",
            f"{run['accepted']:.1f}", f"{run['link_busy']:.0%}",
            f"{run['demotions']}, {run['promotions']}, {run['preemptions']}",
        )  # fmt: skip
    console.print(table)


def write_csv(runs: Sequence[dict[str, Any]], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, list(runs[0]))
        writer.writeheader()
        writer.writerows(runs)


def draw_loads(runs: Sequence[dict[str, Any]], full: int, file: Path) -> None:
    """Speed over plain vLLM's at each load; ``full``: requests that plain vLLM holds. Raises ConfigError without
    matplotlib."""
    with figure(file, 7, 4) as (_, axes):
        curves(axes, runs, full)
        axes.legend(fontsize=8)


def curves(axes: Any, runs: Sequence[dict[str, Any]], full: int) -> None:
    for mode in dict.fromkeys(run["mode"] for run in runs):
        points = [(run["requests"] / full, run["speedup"]) for run in runs if run["mode"] == mode]
        axes.plot(*zip(*points, strict=True), STYLES.get(mode, "--"), label=mode, marker=".", linewidth=1.4)
    axes.axvline(1, color="#cccccc", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("requests at a time, over those that plain vLLM holds")
    axes.set_ylabel("tokens per second over plain vLLM's")


def draw_schedule(trace: Sequence[dict[str, str]], file: Path) -> None:
    """A row per request, a column per iteration. Raises ConfigError without matplotlib."""
    from matplotlib.patches import Patch

    rows = list(dict.fromkeys(name for step in trace for name in step))
    with figure(file, 10, 1.5 + 0.16 * len(rows)) as (_, axes):
        for y, name in enumerate(rows):
            start = 0
            letters = [step.get(name, " ") for step in trace]
            for x in range(1, len(letters) + 1):
                if x == len(letters) or letters[x] != letters[start]:
                    if letters[start] != " ":
                        axes.broken_barh([(start, x - start)], (y - 0.4, 0.8), color=COLOURS[letters[start]])
                    start = x
        axes.set_yticks(range(len(rows)), rows, fontsize=6)
        axes.invert_yaxis()
        axes.set_xlabel("iteration")
        seen = {letter for step in trace for letter in step.values()}
        patches = [Patch(color=COLOURS[k], label=text) for k, text in MEANING.items() if k in seen]
        axes.legend(handles=patches, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=len(patches))
