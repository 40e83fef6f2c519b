"""Cost of choosing victims, by plain rows, and of Admit in congested rings, by window.

``python -m benchmarks.residency``. Both run in the scheduler's process between two iterations. What counts is how the
cost grows: in proportion to the rows and to W. Of 15 calls with the same input the fastest is taken, since the machine
does other work; minimum, median and maximum are over 40 inputs.
"""

import argparse
import os
import random
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

from benchmarks.admit import LIMITS, demands
from benchmarks.report import command, figure, machine, save, table
from scheduler.admission import Staggered, book
from scheduler.residency import Candidate, Mix, Pace, Residency
from scheduler.rings import Rings

ROWS = (250, 500, 1000, 2000)
WINDOWS = (64, 128, 256, 512)
INPUTS, REPEATS = 40, 15
PACE = Pace(fixed=0.03, page=0.0, reload=1e-5)


def fastest(call: Callable[[], object]) -> float:
    """Microseconds."""
    best = float("inf")
    for _ in range(REPEATS):
        start = perf_counter_ns()
        call()
        best = min(best, (perf_counter_ns() - start) / 1000)
    return best


def victims(count: int, rng: random.Random) -> float:
    """So many plain rows, of which a few make the room that is missing, or none can."""
    rows = [
        Candidate(str(i), rng.randint(100, 8000), rng.uniform(0.3, 0.9), rng.randint(60, 2000), 0, 25, 500.0)
        for i in range(count)
    ]
    short, mix, policy = rng.choice([20_000, 10**9]), Mix(plain=count), Residency(64)
    return fastest(lambda: policy.victims(rows, short, lambda n, pages: pages, 1000, mix, PACE, joining=[8000] * 16))


def admit(window: int, rng: random.Random) -> float:
    """One request more where nothing fits: the longest search there is."""
    rings, policy = Rings(window), Staggered()
    for demand in demands(rng, (1, window - 1)):
        book(rings, policy, demand, LIMITS)
    (demand,) = rng.sample(demands(rng, (1, 50)), 1)
    return fastest(lambda: policy.find(rings, demand, LIMITS))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"machine": machine(), "load_average": round(os.getloadavg()[0], 2), "series": []}
    for name, sizes, one in (("victims, by plain rows", ROWS, victims), ("Admit, by window", WINDOWS, admit)):
        rng = random.Random(0)
        for size in sizes:
            us = [one(size, rng) for _ in range(INPUTS)]
            values = {"min": min(us), "median": median(us), "max": max(us)}
            found["series"].append({"call": name, "size": size, **{k: round(v, 1) for k, v in values.items()}})
    return found


def render(found: dict[str, Any], out: Path) -> None:
    series = found["series"]
    with figure(out / "residency.png", 7, 4) as (_, axes):
        for name in dict.fromkeys(s["call"] for s in series):
            points = [(s["size"], s["median"]) for s in series if s["call"] == name]
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlabel("plain rows, or iterations of the window")
        axes.set_ylabel("median time [us]")
        axes.legend()
    rows = [[s["call"], s["size"], s["min"], s["median"], s["max"], f"{s['median'] / s['size']:.3f}"] for s in series]
    lines = [
        "# Cost of choosing victims and of Admit",
        "",
        str(__doc__).strip(),
        "",
        f"{found['machine']}, load average {found['load_average']} from other work when it started.",
        "",
        *table(["call", "size", "min us", "median us", "max us", "median us over size"], rows),
        "",
        "![Time over size](residency.png)",
    ]
    save(out, "residency", found, "\n".join(lines))


if __name__ == "__main__":
    command(__doc__, measure, render, {})
