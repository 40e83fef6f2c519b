"""Tables and plots of ``benchmarks.acceptance``. Everything is computed from its JSON."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.acceptance_engine import LOOPS_BELOW
from benchmarks.acceptance_grid import FULL
from benchmarks.report import figure, table

NAME = "acceptance"
Cells = Iterable[Mapping[str, Any]]


class Report:
    """A finished or unfinished grid: what is not there is a dash."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self.found, self.outputs = found, found["outputs"]
        self.cells = [c for c in found["cells"] if "refused" not in c]
        self.refused = [c for c in found["cells"] if "refused" in c]
        self.drafts: list[int] = found["options"]["drafts"]
        self.main = 25 if 25 in self.drafts else self.drafts[-1]
        self.methods = list(dict.fromkeys(c["method"] for c in self.cells if c["method"] != FULL.name))
        self.ratios = sorted({c["ratio"] for c in self.cells if c["method"] != FULL.name}, reverse=True)
        self.temperatures = sorted({c["temperature"] for c in self.cells})
        # Cells that an engine measured, and what is said of its run; others may have come after it.
        self._timed = [c if "scoring_ms" in c else c.get("in_engine", {}) for c in self.cells]
        self._timed = [c for c in self._timed if "scoring_ms" in c]
        self._engine: Mapping[str, Any] = found.get("in_engine", found)
        self._by_key = {(c["method"], c["ratio"], c["temperature"]): c for c in self.cells}

    def loops(self, prompt: str, temperature: float) -> bool:
        return bool(self.outputs[str(temperature)][prompt] < LOOPS_BELOW)

    def accepted(self, method: str, ratio: float, temperature: float, drafts: int) -> float | None:
        """Accepted drafts per round over the outputs that do not loop; None where nothing was measured."""
        cell = self._by_key.get((method, ratio, temperature))
        if cell is None:
            return None
        pairs = [r[str(drafts)] for p, r in cell["rounds"].items() if not self.loops(p, temperature)]
        rounds, accepted = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (0, 0)
        return accepted / rounds if rounds else None

    def over_ratios(self, method: str, temperature: float, drafts: int) -> dict[float, float]:
        found = {r: self.accepted(method, r, temperature, drafts) for r in self.ratios}
        return {r: a for r, a in found.items() if a is not None}

    # -- tables --------------------------------------------------------------------------------------------------

    def grid(self, temperature: float, drafts: int) -> list[str]:
        """Accepted drafts per round and their share, methods by ratios; the best of a ratio in bold."""
        columns = {r: {m: self.accepted(m, r, temperature, drafts) for m in self.methods} for r in self.ratios}
        best = {r: max((a for a in column.values() if a is not None), default=None) for r, column in columns.items()}
        floor = self.accepted(FULL.name, 1.0, temperature, drafts)
        rows = [[f"{FULL.name} (noise floor)", *[shown(floor, drafts)] + [""] * (len(self.ratios) - 1)]]
        for method in self.methods:
            values = [(columns[r][method], best[r]) for r in self.ratios]
            rows.append([method, *(shown(a, drafts, a is not None and a == b) for a, b in values)])
        return table(["method", *map(str, self.ratios)], rows)

    def collapse(self, temperature: float, drafts: int) -> list[str]:
        floor = self.accepted(FULL.name, 1.0, temperature, drafts)
        rows = []
        for method in self.methods:
            points = self.over_ratios(method, temperature, drafts)
            own = max(points.values(), default=None)
            rows.append([method, *(str(collapse(points, best) or "-") for best in (own, floor))])
        return table(["method", "half of its own best", "half of full KV"], rows)

    def costs(self) -> list[str]:
        prefill, rows = self._engine.get("prefill_ms"), []
        for method in self.methods:
            times = [c["scoring_ms"] for c in self._timed if c["method"] == method]
            cost = [f"{median(times):.0f}", f"{median(times) / prefill:.2f}"] if times and prefill else ["-", "-"]
            rows.append([method, *cost, *(self._kept(method, r) for r in self.ratios)])
        return table(["method", "ms per 1,000 tokens", "of a prefill", *(f"kept at {r}" for r in self.ratios)], rows)

    def _kept(self, method: str, ratio: float) -> str:
        shares = [c["kept"] for c in self.cells if (c["method"], c["ratio"]) == (method, ratio)]
        return f"{shares[0]:.3f}" if shares else "-"

    def texts(self) -> list[str]:
        rows = []
        for prompt, length in self.found["prompts"].items():
            shares = [
                f"{self.outputs[str(t)][prompt]:.2f}" + " (loops)" * self.loops(prompt, t) for t in self.temperatures
            ]
            rows.append([prompt, length, *shares])
        return table(["prompt", "tokens", *(f"T = {t}" for t in self.temperatures)], rows)

    def twice(self) -> list[str]:
        """Cells that were measured in an engine and without one, by draft length."""
        pairs = [(c["rounds"], c["in_engine"]["rounds"]) for c in self.cells if "in_engine" in c]
        if not pairs:
            return []
        rows = []
        for drafts in map(str, self.drafts):
            means = [(pooled(a, drafts), pooled(b, drafts)) for a, b in pairs]
            apart = sorted(abs(a - b) for a, b in means)
            same = sum(a[p][drafts] == b[p][drafts] for a, b in pairs for p in a)
            rows.append([drafts, len(pairs), f"{same} of {sum(len(a) for a, _ in pairs)}",
                         f"{apart[0]:.2f} / {median(apart):.2f} / {apart[-1]:.2f}"])  # fmt: skip
        header = ["rounds of", "cells", "prompts with the same sums", "accepted per round apart, min / median / max"]
        return [
            f"What an engine kept and said ({self._engine['date']}, {self._engine['machine']}), beside the same cells",
            "without one:",
            "",
            *table(header, rows),
            "",
        ]

    def checks(self) -> list[str]:
        rows = [
            [c["method"], c["ratio"], c["temperature"], f"{c['rounds_equal']} of {c['rounds']}",
             f"{c['accepted']} of {c['drafted']}", c["predicted"], "yes" if c["outputs_equal"] else "NO"]
            for c in self.found["checks"]
        ]  # fmt: skip
        header = ["method", "ratio", "T", "rounds as predicted", "accepted in the engine", "predicted", "output exact"]
        return table(header, rows) if rows else ["Not made in this run."]

    def _kept_by(self) -> str:
        if self.found.get("engine", True):
            return "the engine scores and compresses each prompt; an independent forward"
        return "scores, selections and outputs are the reference model's own (`--device`), in float32; its forward"

    def _timed_where(self) -> list[str]:
        if "prefill_ms" not in self._engine:
            return ["Not measured without an engine."]
        return [
            f"In the engine, on {self._engine['machine']}: wall time of scoring rows, selection and the copy into the",
            "arena, one request at a time, median over prompts and ratios; 1,000 tokens of prefill take "
            f"{self._engine['prefill_ms']:.0f} ms there (other work on the machine lengthens both).",
        ]

    def markdown(self) -> str:
        options, first = self.found["options"], self.temperatures[0]
        lines = [
            "# Accepted drafts", "",
            f"`python -m benchmarks.acceptance`, {self.found['date']}, {self.found['machine']}.",
            f"{self.found['model']}, float32, {len(self.found['prompts'])} bundled prompts, {options['tokens']} output "
            f"tokens each, {len(self.cells)} cells of a method, a ratio and a temperature.",
            "",
            "Tables show accepted drafts per round and their share of the round; vLLM's *acceptance length* is one",
            "more, the verifier's own token. Rounds are **predicted, not run**: " + self._kept_by(),
            "then follows the full-KV output and compares token by token. What",
            "a round accepts depends on where it starts and on nothing before: all draft lengths share that work and",
            "nothing is approximated ([checked below](#checked-against-the-engine)). Counted are rounds whose drafts",
            f"all lie within the output, of outputs that do not loop ({LOOPS_BELOW:.0%} of their 4-grams or more are",
            "distinct). The noise floor keeps everything: what it loses is rounding, between a draft row and the",
            "verifier's.", "",
        ]  # fmt: skip
        for temperature in self.temperatures:
            title = f"## Temperature {temperature}, rounds of {self.main}"
            lines += [title, "", *self.grid(temperature, self.main), ""]
        lines += [f"![Accepted drafts over ratio]({NAME}.png)", "", f"![Share accepted]({NAME}-map.png)", ""]
        for drafts in (d for d in self.drafts if d != self.main):
            lines += [f"## Temperature {first}, rounds of {drafts}", "", *self.grid(first, drafts), ""]
        lines += [
            "## Where it collapses", "",
            f"The smallest ratio that still has more than half of the accepted drafts (T = {first}, rounds of "
            f"{self.main}): of the method's own best ratio, and of full KV.", "",
            *self.collapse(first, self.main), "",
            "## What scoring costs", "",
            *self._timed_where(), "And the share of token-heads that was kept.", "",
            *self.costs(), "",
            "## Checked against the engine", "",
            "Rounds as the engine runs them (its schedule decides how long each one gets) beside the prediction for",
            "rounds of as many drafts, all prompts at once.", "",
            *self.checks(), "", *self.twice(),
            "## Outputs", "", "Share of distinct 4-grams.", "", *self.texts(), "",
        ]  # fmt: skip
        if self.refused:
            reasons = {f"- {c['method']}, ratio {c['ratio']}: {c['refused']}" for c in self.refused}
            lines += ["## Not measured", "", *sorted(reasons), ""]
        return "\n".join(lines)

    # -- plots -----------------------------------------------------------------------------------------------------

    def lines(self, file: Path) -> None:
        temperature = self.temperatures[0]
        compressors = list(dict.fromkeys(m.split()[0] for m in self.methods))
        with figure(file, 9, 5.5) as (fig, axes):
            for method in self.methods:
                compressor, *counts = method.split()
                points = sorted(self.over_ratios(method, temperature, self.main).items())
                if points:
                    axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=method,
                              linestyle="--" if counts[:1] == ["uniform"] else "-",
                              color=f"C{compressors.index(compressor) % 10}")  # fmt: skip
            floor = self.accepted(FULL.name, 1.0, temperature, self.main)
            if floor is not None:
                axes.axhline(floor, color="black", linestyle=":", linewidth=1, label="full KV")
            axes.set_xscale("log")
            axes.minorticks_off()
            axes.set_xticks(self.ratios, [str(r) for r in self.ratios])
            axes.set_xlabel("ratio")
            axes.set_ylabel(f"accepted drafts per round (x = {self.main}, T = {temperature})")
            fig.legend(loc="outside right upper", fontsize=7, frameon=False)

    def map(self, file: Path) -> None:
        """Share of accepted drafts: methods by ratios, one block of columns per temperature."""
        columns = [(t, r) for t in self.temperatures for r in self.ratios]
        shares = [
            [(self.accepted(m, r, t, self.main) or float("nan")) / self.main for t, r in columns] for m in self.methods
        ]
        with figure(file, 3 + 0.55 * len(columns), 1.5 + 0.3 * len(self.methods)) as (fig, axes):
            image = axes.imshow(shares, vmin=0, vmax=1, aspect="auto", cmap="viridis")
            axes.set_xticks(range(len(columns)), [str(r) for _, r in columns], rotation=90)
            axes.set_yticks(range(len(self.methods)), self.methods)
            for i, temperature in enumerate(self.temperatures):
                place = i * len(self.ratios)
                axes.axvline(place - 0.5, color="white", linewidth=2)
                axes.text(place + len(self.ratios) / 2 - 0.5, -0.7, f"T = {temperature}", ha="center")
            for y, row in enumerate(shares):
                for x, share in enumerate(row):
                    if share == share:  # measured
                        color = "black" if share > 0.6 else "white"
                        axes.text(x, y, f"{share:.2f}", ha="center", va="center", fontsize=7, color=color)
            axes.set_xlabel("ratio")
            fig.colorbar(image, label=f"share of drafts accepted (x = {self.main})")

    def write(self, folder: Path) -> None:
        """Everything but the JSON."""
        (folder / f"{NAME}.md").write_text(self.markdown().rstrip("\n") + "\n")
        if self.methods:
            self.lines(folder / f"{NAME}.png")
            self.map(folder / f"{NAME}-map.png")


def shown(accepted: float | None, drafts: int, best: bool = False) -> str:
    if accepted is None:
        return "-"
    text = f"{accepted:.1f} ({accepted / drafts:.0%})"
    return f"**{text}**" if best else text


def collapse(points: Mapping[float, float], best: float | None) -> float | None:
    """The smallest ratio with more than half of ``best``."""
    return min((r for r, a in points.items() if best is not None and a > best / 2), default=None)


def pooled(rounds: Mapping[str, Mapping[str, Sequence[int]]], drafts: str) -> float:
    """Accepted drafts per round of all prompts."""
    count, accepted = (sum(column) for column in zip(*(r[drafts] for r in rounds.values()), strict=True))
    return accepted / max(1, count)


def summed(rounds: Mapping[int, Sequence[int]]) -> dict[str, list[int]]:
    """Accepted drafts of every round -> (rounds, accepted in all), by draft length as JSON has it."""
    return {str(x): [len(accepted), sum(accepted)] for x, accepted in rounds.items()}
