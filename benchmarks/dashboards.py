"""Every panel of the Grafana dashboards, drawn from a live server: ``python -m benchmarks.dashboards``.

Starts ``vericache serve`` on the bundled model and a Prometheus that scrapes it, sends the requests of the soak test
with a pause in the middle and a few certified ones, asks Prometheus for what each panel would show, and draws it:
docs/results/dashboards.png.
"""

import argparse
import asyncio
import math
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.prometheus import LivePrometheus, filled_in
from benchmarks.report import RESULTS, figure, machine, save, table
from benchmarks.server import LiveServer
from benchmarks.soak import FLAGS, soak
from deploy.dashboards import DASHBOARDS, Panel, expression
from vericache.demo import model, prompts

INTERVAL = 20  # seconds that a rate looks back
STEP = 2  # seconds between two points
COLUMNS = 4
CERTIFIED = 3  # requests; they take seconds each
UNITS = {"percentunit": "share", "ops": "per second", "s": "seconds", "Bps": "bytes per second", "short": ""}

Series = Mapping[str, Sequence[tuple[float, float]]]  # legend -> (unix seconds, value)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    console = Console()
    folder = args.model or model.prepare()
    from transformers import AutoTokenizer

    texts = list(prompts.load(list(prompts.PROMPTS), AutoTokenizer.from_pretrained(folder), 480).values())
    with tempfile.TemporaryDirectory() as temporary:
        flags = [*FLAGS.split(), "--vericache-audit-share", "0.2", "--vericache-measured-share", "0.1"]
        flags += ["--vericache-request-options", "[mode, epsilon, delta]"]
        server = LiveServer(folder, flags, Path(temporary) / "server.log")
        try:
            with console.status("starting the server"):
                server.wait_until_healthy()
            prometheus = LivePrometheus(server, Path(temporary))
            try:
                prometheus.wait_for('up{job="vericache"}', 1)
                began = time.time()
                for _ in range(2):
                    with Progress(console=console) as progress:
                        asyncio.run(soak(server.url, texts, args, progress))
                    for text in texts[:CERTIFIED]:
                        asked = {"prompt": text[:240], "max_tokens": 6, "vllm_xargs": {"vericache_mode": "certified"}}
                        server.post("/v1/completions", {"model": "soak", **asked})
                    time.sleep(args.pause)
                found = {uid: list(shown(prometheus, uid, began, time.time())) for uid in DASHBOARDS}
            finally:
                prometheus.close()
        finally:
            server.close()
    about = {"date": date.today().isoformat(), "machine": machine(), "model": folder.name, "began": round(began)}
    return {**about, "requests": 2 * args.requests, "concurrency": args.concurrency, "panels": found}


def shown(prometheus: LivePrometheus, uid: str, began: float, ended: float) -> Iterator[Series]:
    """What each panel shows, in order."""
    for panel in panels(uid):
        series: dict[str, Sequence[tuple[float, float]]] = {}
        for legend, text in panel.queries.items():
            query = filled_in(expression(text), f"{INTERVAL}s")
            for labels, points in prometheus.history(query, began, ended, STEP):  # NaN: no traffic
                name = re.sub(r"\{\{(\w+)\}\}", lambda found, known=labels: known[found[1]], legend)  # type: ignore[misc]
                series[name] = [(round(at - began), value) for at, value in points if not math.isnan(value)]
        yield series


def panels(uid: str) -> list[Panel]:
    return [panel for row in DASHBOARDS[uid][2].values() for panel in row]


def render(result: Mapping[str, Any], out: Path) -> None:
    found = [(p, s) for uid, series in result["panels"].items() for p, s in zip(panels(uid), series, strict=True)]
    rows = -(-len(found) // COLUMNS)
    with figure(out / "dashboards.png", 4.6 * COLUMNS, 2.4 * rows) as (fig, whole):
        whole.remove()
        for i, (panel, series) in enumerate(found):
            draw(fig.add_subplot(rows, COLUMNS, i + 1), panel, series)
        fig.suptitle(
            f"{result['requests']} requests, {result['concurrency']} at a time, with a pause; seconds; "
            f"{result['model']} on {result['machine']}, {result['date']}", fontsize=11,
        )  # fmt: skip
    figures = {panel.title: {name: summary(points) for name, points in each.items()} for panel, each in found}
    silent = [title for title, each in figures.items() if not any(each.values())]
    lines = [
        "# Dashboards", "",
        f"`python -m benchmarks.dashboards`, {result['date']}, {result['machine']}: what the panels of both Grafana",
        f"dashboards show of {result['requests']} mixed requests to {result['model']} on a CPU, from a Prometheus that",
        "scraped the server. Drawn with matplotlib, not a screenshot of Grafana. A gap is \"No traffic\".", "",
        "![Every panel of both dashboards](dashboards.png)", "",
        *table(
            ["panel", "series", "min", "median", "max"],
            [[t, n, *(f"{v:.3g}" for v in f)] for t, each in figures.items() for n, f in each.items() if f and any(f)],
            left=2,
        ), "",
        f"Series that were 0 all the time are left out. Panels without data: {', '.join(silent) or 'none'}.",
    ]  # fmt: skip
    save(out, "dashboards", {**result, "panels": figures}, "\n".join(lines))


def summary(points: Sequence[tuple[float, float]]) -> list[float]:
    """Min, median and max; empty without data."""
    values = [value for _, value in points]
    return [min(values), statistics.median(values), max(values)] if values else []


def draw(axes: Any, panel: Panel, series: Series) -> None:
    axes.set_title(panel.title, fontsize=10)
    for name, points in sorted(series.items()):
        if len(series) > 6 and not any(value for _, value in points):
            continue  # reasons that never were
        times = [at for at, _ in points]
        # Grafana leaves a gap where there is no point; a line would join across it.
        for first in (i for i, at in enumerate(times) if i == 0 or at - times[i - 1] > STEP):
            last = next((i for i in range(first + 1, len(times)) if times[i] - times[i - 1] > STEP), len(times))
            label = name if first == 0 else None
            colour = axes.get_lines()[-1].get_color() if first else None
            axes.plot(times[first:last], [v for _, v in points[first:last]], lw=1.2, label=label, color=colour)
    axes.set_ylabel(UNITS[panel.unit], fontsize=8)
    axes.set_ylim(bottom=0, top=panel.most)
    axes.tick_params(labelsize=8)
    if any(not name.startswith("_") for name in axes.get_legend_handles_labels()[1]):
        axes.legend(fontsize=7, loc="upper right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60, help="before and after the pause, each")
    parser.add_argument("--concurrency", type=int, default=6)
    parser.add_argument("--pause", type=int, default=45, help="seconds without traffic after each half")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="a model folder instead of the bundled model")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    render(measure(args), args.out)


if __name__ == "__main__":
    main()
