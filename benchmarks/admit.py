"""Latency of admission: one request into rings of a given load, and a whole tick with 1,000 requests.

Admission runs in the scheduler's process between two iterations, so its time is added to every iteration. The aim
is 50 us at the 99th percentile for one request. Sizes are those of an 8B model (128 KiB of KV per token) with a
25 GB/s link and iterations of 50 ms; the sizes of requests are spread from 2k to 128k tokens.
"""

import argparse
import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from time import perf_counter_ns
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import RESULTS, figure, machine, save
from benchmarks.report import table as markdown_table
from scheduler.admission import Demand, Limits, Staggered, book, reload_span
from scheduler.planner import Planner
from scheduler.rings import Rings

WINDOW = 256
REQUESTS = 1000
SITUATIONS = 20  # differently filled rings per load level
SAMPLES = 200  # requests asked for per situation
REPEATS = 5  # the same request again: the fastest shows what the work costs without interruptions
TICKS = 600
TARGET_US = 50.0

ITERATION_NS = 50_000_000
LINK_BYTES_PER_SECOND = 25e9
TOKEN_BYTES = 128 * 1024
PAGE_TOKENS = 16
LIMITS = Limits(ITERATION_NS, 40_000)  # 80 GiB of transient KV
DRAFT_LENGTH = 25

LOAD_AT_START = os.getloadavg()[0]  # other work on the machine lengthens the tail

LEVELS = {
    "empty": "nothing is booked",
    "half full": "half of the link time is booked",
    "congested": "nothing more fits",
}


@dataclass
class Series:
    """Timed calls, in nanoseconds, the fastest of each one's repeats, and the share that was admitted."""

    name: str
    note: str
    ns: list[int] = field(default_factory=list)
    fastest: list[int] = field(default_factory=list)
    admitted: float | None = None

    def summary(self) -> dict[str, float]:
        named = {"min": min(self.ns), "median": median(self.ns), "p99": p99(self.ns), "max": max(self.ns)}
        if self.fastest:
            named["p99 of fastest"] = p99(self.fastest)
        return {k: round(v / 1000, 2) for k, v in named.items()}


def p99(values: list[int]) -> int:
    return sorted(values)[min(len(values) - 1, len(values) * 99 // 100)]


def demands(rng: random.Random, anchors: tuple[int, int]) -> list[Demand]:
    """One round of each of the 1,000 requests; contexts are spread evenly in their logarithm."""
    out = []
    for _ in range(REQUESTS):
        tokens = int(2048 * 64 ** rng.random())
        span, link_ns = reload_span(tokens * TOKEN_BYTES, LINK_BYTES_PER_SECOND, ITERATION_NS, WINDOW)
        pages = -(-(tokens + DRAFT_LENGTH) // PAGE_TOKENS)
        out.append(Demand(rng.randint(*anchors), span, link_ns, pages))
    return out


def fill(rings: Rings, level: str, rng: random.Random) -> None:
    """Book rounds that verify anywhere in the window, until the level is reached."""
    if level == "empty":
        return
    half = WINDOW * ITERATION_NS // 2
    for demand in demands(rng, (1, WINDOW - 1)):
        book(rings, Staggered(), demand, LIMITS)
        if level == "half full" and sum(rings.link.cells) >= half:
            return


def admissions(level: str) -> Series:
    """Every sample finds the same load: what was admitted is cancelled again, untimed."""
    out, admitted = Series(level, LEVELS[level]), 0
    for seed in range(SITUATIONS):
        rng, rings = random.Random(seed), Rings(WINDOW)
        fill(rings, level, rng)
        policy = Staggered()
        for demand in rng.sample(demands(rng, (1, 2 * DRAFT_LENGTH)), SAMPLES):
            ns = []
            for _ in range(REPEATS):
                start = perf_counter_ns()
                booking = book(rings, policy, demand, LIMITS)
                ns.append(perf_counter_ns() - start)
                if booking is not None:
                    admitted += 1
                    rings.cancel(booking)
            out.ns += ns
            out.fastest.append(min(ns))
    out.admitted = admitted / len(out.ns)
    return out


class Crowd:
    """The planner's host for 1,000 requests that always want another round and always find their pages."""

    def __init__(self) -> None:
        self.rounds = dict(enumerate(demands(random.Random(1), (DRAFT_LENGTH, DRAFT_LENGTH))))

    def draft_length(self, request_id: str) -> int:
        return DRAFT_LENGTH

    def draft_limit(self, request_id: str) -> int:
        return WINDOW - 1

    def demand(self, request_id: str, anchor: int) -> Demand:
        return self.rounds[int(request_id)]

    def drafts_ahead(self, request_id: str) -> bool:
        return False

    def take_pages(self, request_id: str) -> bool:
        return True


def ticks() -> list[Series]:
    """Whole iterations of the planner while the ring is congested: a few dozen rounds run, the others wait."""
    host, planner = Crowd(), Planner(WINDOW, Staggered(), verify_tokens=2 * WINDOW)
    for i in range(REQUESTS):
        planner.demote(str(i))
        planner.demoted(str(i), 0)
    early = Series("tick, first window", "1,000 waiting, all may be tried")
    late = Series("tick, later", "the oldest has waited for a window: nobody overtakes it")
    for i in range(TICKS):
        start = perf_counter_ns()
        out = planner.tick(host, LIMITS)
        (early if i < WINDOW else late).ns.append(perf_counter_ns() - start)
        for request_id in out.drafts:
            planner.drafted(request_id, last=False)
        for request_id, _ in out.verifies:
            planner.verified(request_id, 0, WINDOW - 1)
    return [early, late]


def rows(series: list[Series]) -> list[list[str]]:
    out = []
    for s in series:
        numbers = [f"{v:,.1f}" for v in s.summary().values()] + [""] * (not s.fastest)
        share = "" if s.admitted is None else f"{s.admitted:.0%}"
        out.append([s.name, str(len(s.ns)), share, *numbers, s.note])
    return out


HEADER = [
    "call",
    "samples",
    "admitted",
    "min us",
    "median us",
    "p99 us",
    "max us",
    f"p99 us, fastest of {REPEATS}",
    "situation",
]


def verdict(series: list[Series]) -> str:
    worst = max(s.summary()["p99"] for s in series)
    quiet = max(s.summary()["p99 of fastest"] for s in series)
    met = "met" if worst <= TARGET_US else "missed"
    return (
        f"Aim: p99 of one admission at most {TARGET_US:.0f} us. Worst load level: {worst:,.1f} us ({met}); "
        f"counting the fastest of {REPEATS} repeats, {quiet:.1f} us."
    )


def show(single: list[Series], whole: list[Series], console: Console) -> None:
    table = Table(title=f"Admission, W = {WINDOW}, {REQUESTS:,} requests", caption=machine(), title_justify="left")
    for name in HEADER:
        table.add_column(name, justify="left" if name in ("call", "situation") else "right")
    for row in rows(single):
        table.add_row(*row)
    table.add_section()
    for row in rows(whole):
        table.add_row(*row)
    console.print(table)
    console.print(verdict(single))


def markdown(single: list[Series], whole: list[Series]) -> str:
    lines = [
        "# Latency of admission",
        "",
        f"`python -m benchmarks.admit`: window {WINDOW}, {REQUESTS:,} requests of 2k to 128k tokens. {machine()},",
        f"load average {LOAD_AT_START:.1f} from other work when it started.",
        verdict(single),
        "A tick plans one whole iteration for all requests; it is held to no aim here.",
        "",
        *markdown_table(HEADER, rows([*single, *whole])),
        "",
        "![Distribution of the time of one admission](admit.png)",
        "",
    ]
    return "\n".join(lines)


def picture(single: list[Series], file: Path) -> None:
    low, high = min(min(s.ns) for s in single) / 1000, max(max(s.ns) for s in single) / 1000
    edges = [low * (max(high, TARGET_US * 1.2) / low) ** (i / 80) for i in range(81)]
    with figure(file, 8, 4.5) as (fig, axes):
        for s, colour in zip(single, ("#0072b2", "#009e73", "#d55e00"), strict=True):
            axes.hist([v / 1000 for v in s.ns], bins=edges, alpha=0.6, label=f"{s.name}: {s.note}", color=colour)
        axes.axvline(TARGET_US, color="black", linestyle="--", linewidth=1, label=f"aim for p99: {TARGET_US:.0f} us")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("time of one admission [us]")
        axes.set_ylabel("samples")
        axes.set_title(f"Admission into rings of {WINDOW} iterations")
        fig.legend(loc="outside lower center", ncols=2, frameon=False)


def report(single: list[Series], whole: list[Series]) -> dict[str, Any]:
    def entry(s: Series) -> dict[str, Any]:
        return {
            "call": s.name,
            "situation": s.note,
            "samples": len(s.ns),
            "admitted": s.admitted,
            "mean_us": round(fmean(s.ns) / 1000, 2),
            **{f"{k.replace(' ', '_')}_us": v for k, v in s.summary().items()},
        }

    return {
        "machine": machine(),
        "load_average": round(LOAD_AT_START, 2),
        "window": WINDOW,
        "requests": REQUESTS,
        "aim_p99_us": TARGET_US,
        "admission": [entry(s) for s in single],
        "tick": [entry(s) for s in whole],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of admit.json, .md and .png")
    out: Path = parser.parse_args(argv).out
    admissions("congested")  # the first pass warms caches and the interpreter's specialised code
    single, whole = [admissions(level) for level in LEVELS], ticks()
    show(single, whole, Console())
    save(out, "admit", report(single, whole), markdown(single, whole))
    picture(single, out / "admit.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
