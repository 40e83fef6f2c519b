"""The demo's table and its picture of the schedule, in the terminal and as PNG."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vericache.engine.observe import LEGEND
from vericache.figure import figure

# One colour per state, light enough for black text and apart in grey scale.
COLOURS = {
    "P": "#9ecae1",
    "R": "#d9d9d9",
    "S": "#fdd0a2",
    "C": "#fd8d3c",
    "D": "#c7e9c0",
    "L": "#74c476",
    "V": "#d62728",
    "B": "#9467bd",
    ".": "#f7f7f7",
    " ": "#ffffff",
}


def mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"


def table(report: Mapping[str, Any], console: Console) -> None:
    requests = Table(title="VeriCache against plain vLLM", title_justify="left")
    for column in ("request", "prompt", "output", "identical", "rounds", "acceptance length", "KV kept"):
        requests.add_column(column, justify="left" if column == "request" else "right", no_wrap=column == "request")
    for r in report["requests"]:
        kept = f"{r['compressed_fraction']:.0%}" if r["mode"] == "draft" else f"all ({r['reason']})"
        if "simulated_fraction" in r:
            kept += f" ({r['simulated_fraction']:.0%} simulated)"
        same = "[green]yes[/green]" if r["identical"] else "[bold red]NO[/bold red]"
        length = f"{r['acceptance_length']:.1f}" if r.get("acceptance_length") else "-"
        requests.add_row(
            r["name"], str(r["prompt_tokens"]), str(r["output_tokens"]), same, str(r.get("rounds", 0)), length, kept
        )
    console.print(requests)
    totals = Table(show_header=False, box=None)
    peak, full = report["peak_kv_bytes"], report["peak_kv_bytes_full_kv"]
    for name, value in (
        ("all outputs identical", "[green]yes[/green]" if report["identical"] else "[bold red]NO[/bold red]"),
        ("peak KV memory", f"{mib(peak)} (vLLM blocks + arena), plain vLLM {mib(full)}: {peak / full:.0%}"),
        ("reloaded from host memory", f"{mib(report['reload_bytes'])} in {report['rounds']} rounds"),
        ("offloaded, written back", f"{mib(report['offload_bytes'])}, {mib(report['writeback_bytes'])}"),
        ("time", f"{report['seconds']} s, plain vLLM {report['seconds_full_kv']} s (no second memory to win on here)"),
    ):
        totals.add_row(name, value)
    console.print(totals)


def schedule_text(schedule: Mapping[str, str], console: Console) -> None:
    """One line per request, one letter per iteration, folded to the terminal."""
    if not schedule:
        return
    label = max(map(len, schedule)) + 1
    width = max(20, console.width - label - 1)
    length = max(map(len, schedule.values()))
    console.print("\nschedule, one letter per iteration: " + ", ".join(f"{k} {v}" for k, v in LEGEND.items()))
    for start in range(0, length, width):
        for name, row in schedule.items():
            line = Text(name.ljust(label))
            for letter in row[start : start + width]:
                line.append(letter, style=f"black on {COLOURS[letter]}" if letter != " " else "")
            console.print(line, soft_wrap=True)
        if start + width < length:
            console.print()


def schedule_png(schedule: Mapping[str, str], file: Path) -> None:
    """The same as a picture: requests down, iterations across."""
    letters = list(COLOURS)
    length = max(map(len, schedule.values()))
    grid = [[letters.index(c) for c in row.ljust(length)] for row in schedule.values()]
    used = [c for c in LEGEND if any(c in row for row in schedule.values())]
    with figure(file, 12, 1.2 + 0.45 * len(schedule)) as (fig, axes):
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch

        axes.imshow(
            grid,
            cmap=ListedColormap(list(COLOURS.values())),
            vmin=0,
            vmax=len(letters) - 1,
            aspect="auto",
            interpolation="nearest",
        )
        axes.set_yticks(range(len(schedule)), list(schedule))
        axes.set_xlabel("iteration")
        axes.set_title("Which request drafts, loads and verifies in each iteration")
        handles = [Patch(facecolor=COLOURS[c], edgecolor="grey", label=LEGEND[c]) for c in used]
        fig.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
