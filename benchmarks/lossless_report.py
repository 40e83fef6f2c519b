"""Files, table and plot of ``benchmarks.lossless``."""

import json
from collections.abc import Collection, Mapping
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import figure, table

Results = dict[str, dict[str, Any]]  # by cell key


class Files:
    """``NAME.json`` holds everything; a shard adds to ``NAME-I.json`` until all cells are done."""

    def __init__(self, folder: Path, name: str, shard: str) -> None:
        index, _, count = shard.partition("/")
        self.folder, self.name = folder, name
        self.merged = folder / f"{name}.json"
        self.own = folder / f"{name}-{index}.json" if count != "1" else self.merged

    def done(self) -> Results:
        return {k: v for report in self._reports() for k, v in report["cells"].items()}

    def add(self, key: str, result: Mapping[str, Any], header: Mapping[str, Any]) -> None:
        cells = json.loads(self.own.read_text())["cells"] if self.own.exists() else {}
        write(self.own, {"date": date.today().isoformat(), **header, "cells": {**cells, key: dict(result)}})

    def merge(self, wanted: Collection[str]) -> dict[str, Any]:
        """One report of all shards, written to ``NAME.json``; shard files go once every wanted cell is there."""
        reports = self._reports()
        merged = {**reports[-1], "cells": dict(sorted(self.done().items()))}
        write(self.merged, merged)
        if set(wanted) <= set(merged["cells"]):
            for file in self._shards():
                file.unlink()
        return merged

    def _shards(self) -> list[Path]:
        return sorted(f for f in self.folder.glob(f"{self.name}-*.json") if f.stem[len(self.name) + 1 :].isdigit())

    def _reports(self) -> list[dict[str, Any]]:
        return [json.loads(f.read_text()) for f in (self.merged, *self._shards()) if f.exists()]


def write(file: Path, content: Mapping[str, Any]) -> None:
    """Never half a file: an interrupted run continues from it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.rename(file)


def merge(files: Files, wanted: Collection[str], console: Console) -> int:
    """Write JSON, table and plot, and print the table. Returns the number of cells that failed."""
    merged = files.merge(wanted)
    cells: Results = merged["cells"]
    header, lines = summary(cells)
    shown = Table(*header)
    for line in lines:
        shown.add_row(*line)
    console.print(shown)
    failed = [key for key, c in cells.items() if not c["passed"]]
    same, total = sum(c["identical"] for c in cells.values()), sum(c["requests"] for c in cells.values())
    verdict = f"{same} of {total} requests identical in {len(cells)} cells; {len(failed)} cells failed"
    console.print(f"{verdict}; {files.merged}")
    for key in failed:
        console.print(f"failed: {key}: {cells[key]['divergences'] or cells[key]['resident']}")
    (files.folder / f"{files.name}.md").write_text(markdown(merged, verdict, files.name, len(wanted)))
    picture(cells, verdict, files.folder / f"{files.name}.png")
    return len(failed)


def summary(cells: Results) -> tuple[list[str], list[list[str]]]:
    """One line per compressor, count mode and ratio, over temperatures, policies and concurrencies."""
    groups: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for c in cells.values():
        groups.setdefault((c["compressor"], c["counts"], c["ratio"]), []).append(c)
    header = ["compressor", "counts", "ratio", "KV kept", "cells", "identical", "accepted per round, min/median/max"]
    lines = []
    for (compressor, counts, ratio), members in sorted(groups.items(), key=lambda g: (g[0][0], g[0][1], -g[0][2])):
        accepted = [c["accepted_per_round"] for c in members]
        same, total = sum(c["identical"] for c in members), sum(c["requests"] for c in members)
        kept = f"{members[0]['compressed_fraction']:.1%}"
        spread = f"{min(accepted):.1f} / {median(accepted):.1f} / {max(accepted):.1f}"
        lines.append([compressor, counts, str(ratio), kept, str(len(members)), f"{same} of {total}", spread])
    return header, lines


def markdown(merged: Mapping[str, Any], verdict: str, name: str, wanted: int) -> str:
    options, cells, lengths = merged["options"], merged["cells"], merged["prompts"].values()
    header, lines = summary(cells)
    unfinished = "" if len(cells) >= wanted else f" **Unfinished: {len(cells)} of {wanted} cells so far.**"
    out = [
        f"# Is the output plain vLLM's? {options['dtype']}",
        "",
        f"`python -m benchmarks.lossless`, {merged['date']}, {merged['machine']}.",
        f"{merged['model']}, {len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens,",
        f"{options['tokens']} output tokens each, x = {options['draft_length']}. Greedy runs are compared",
        "with stock vLLM in its own process, sampled runs with the same engine and every request resident.",
        "",
        f"**{verdict}.**{unfinished}",
        "",
        *table(header, lines, left=2),
        "",
        f"![Accepted drafts per round]({name}.png)",
        "",
    ]
    if "noise" in merged:
        out += near_ties(merged)
    return "\n".join(out)


def near_ties(merged: Mapping[str, Any]) -> list[str]:
    """Every divergence with its float32 logits, and how stock vLLM compares with itself."""
    noise, itself = merged["noise"], merged["plain_against_itself"]
    found = {(d["prompt"], d["at"], *d["tokens"]): d for c in merged["cells"].values() for d in c["divergences"]}
    every = [("VeriCache", d) for d in found.values()] + [("stock vLLM", d) for d in itself["divergences"]]
    rows = [
        [who, d["prompt"], d["at"], *d["logits"], d["gap"], f"{d['rank'][0]}, {d['rank'][1]}", d["near_tie"]]
        for who, d in sorted(every, key=lambda e: (e[0], e[1]["prompt"], e[1]["at"]))
    ]
    return [
        "## Divergences",
        "",
        f"In these outputs {merged['options']['dtype']} moves the difference between the best two logits by",
        f"{noise['median']:.3f} (median), at most {noise['max']:.3f}, over {noise['positions']} positions.",
        "A divergence is a near tie when neither of its tokens lies farther behind the best one of float32 (gap) than",
        "that maximum. Stock vLLM against itself, one request at a time against eight at once:",
        f"{itself['identical']} of {itself['requests']} identical.",
        "",
        *table(["who", "prompt", "token", "logit", "other logit", "gap", "ranks", "near tie"], rows, left=2),
        "",
    ]


def picture(cells: Results, verdict: str, file: Path) -> None:
    """Accepted drafts per round against the ratio, greedy, median over policies and concurrencies."""
    curves: dict[str, dict[float, list[float]]] = {}
    for c in cells.values():
        if c["temperature"] == 0:
            curve = curves.setdefault(f"{c['compressor']} {c['counts']}", {})
            curve.setdefault(c["ratio"], []).append(c["accepted_per_round"])
    with figure(file, 8, 4.5) as (fig, axes):
        for name, curve in sorted(curves.items()):
            xs = sorted(curve)
            axes.plot(xs, [median(curve[x]) for x in xs], marker="o", label=name)
        axes.set_xlabel("kept fraction of the context (ratio)")
        axes.set_ylabel("accepted drafts per round, greedy")
        axes.set_title(verdict, fontsize=10)
        fig.legend(loc="outside right center", frameon=False)
