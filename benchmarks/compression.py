"""What one compression of a long context costs on a GPU: scoring, selecting and filling the arena.

``python -m benchmarks.compression`` on a machine with a GPU and vLLM writes JSON and a table into docs/results/;
``--render FILE`` makes the table of a JSON. Wall time with the GPU idle before and after, so that waiting for the GPU
counts: other requests' steps wait as long. Random keys, so the spread over heads is that of noise.
"""

import argparse
import datetime
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.report import command, save, table
from compressors import METHODS, MethodSpec, Shape, create
from vericache.draft.arena import DraftArena, page_bound
from vericache.draft.formats import Plain
from vericache.engine.pages_cuda import SideBySideLayout

BLOCK = 16
PHASES = ("score", "select", "fill")


@dataclass(frozen=True)
class Case:
    name: str
    shape: Shape
    context: int
    spec: MethodSpec
    page_tokens: int


def cases() -> list[Case]:
    big, small = Shape(32, 8, 32, 128), Shape(30, 3, 9, 64)
    snapkv, kvzip = MethodSpec("snapkv", "per_head"), MethodSpec("kvzip", "per_head")
    return [
        Case("8B, 32k tokens", big, 32_000, MethodSpec("snapkv", "uniform"), 64),
        Case("8B, 32k tokens", big, 32_000, snapkv, 64),
        Case("8B, 8k tokens", big, 8_000, snapkv, 64),
        Case("135M, 8k tokens", small, 8_000, snapkv, 64),
        Case("8B, 32k tokens", big, 32_000, kvzip, 64),
        Case("135M, 8k tokens", small, 8_000, kvzip, 64),
    ]


class Stopwatch:
    """Milliseconds per phase, the device idle at both ends."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        yield
        torch.cuda.synchronize()
        self.times[name].append(1e3 * (time.perf_counter() - start))


def one(case: Case, repeats: int) -> dict[str, list[float]]:
    shape, device = case.shape, torch.device("cuda")
    blocks = -(-case.context // BLOCK)
    size = (blocks, shape.kv_heads, BLOCK, 2 * shape.head_dim)
    caches = [torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(shape.layers)]
    texts = {name: [0] * 16 for name in ("first", "next", "turn")}  # instructions of about the usual length
    probes = METHODS[case.spec.name].probes(range(case.context), case.spec, texts)
    longest = max(len(probe.tokens) for probe in probes)
    query = torch.randn(longest, shape.query_heads, shape.head_dim, device=device, dtype=torch.bfloat16)
    key = torch.randn(longest, shape.kv_heads, shape.head_dim, device=device, dtype=torch.bfloat16)
    layout, order = SideBySideLayout(caches, BLOCK, shape.head_dim), torch.randperm(blocks, device=device)
    kept = int(case.spec.ratio * case.context) + 1
    pages = page_bound(kept, shape.layers * shape.kv_heads, case.page_tokens)
    arena = DraftArena(shape, pages, Plain(case.page_tokens, shape.head_dim, torch.bfloat16), device)
    arena.with_tables(1, case.context)
    watch = Stopwatch()
    for _ in range(repeats + 1):
        with device, watch.phase("score"):
            compressor = create(case.spec, shape, case.context)
            for index, probe in enumerate(probes):
                rows = slice(len(probe.tokens))
                for layer, cache in enumerate(caches):
                    cached = layout.tokens(cache, order)
                    compressor.observe(layer, index, query[rows], key[rows], cached, shape.head_dim**-0.5)
            if compressor.reads_cache:
                for layer, cache in enumerate(caches):
                    compressor.read(layer, layout.tokens(cache, order))
        with device, watch.phase("select"):
            selection = compressor.select()
        with watch.phase("fill"):
            arena.put(0, selection, layout.source(caches, order, case.context))
    return {name: sorted(times[1:]) for name, times in watch.times.items()}  # the first run compiles


def measure(args: argparse.Namespace) -> dict[str, Any]:
    found = [
        {"case": c.name, "method": c.spec.name, "counts": c.spec.counts, "ms": one(c, args.repeats)} for c in cases()
    ]
    return {
        "date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "repeats": args.repeats, "cases": found,
    }  # fmt: skip


def render(result: dict[str, Any], out: Path) -> None:
    rows = []
    for case in result["cases"]:
        times = [case["ms"][p] for p in PHASES]
        figures = [f"{t[0]:.1f} / {median(t):.1f} / {t[-1]:.1f}" for t in times]
        rows.append([case["case"], case["method"], case["counts"], *figures, f"{sum(map(median, times)):.1f}"])
    lines = [
        "# Compressing a context: milliseconds", "",
        f"{result['gpu']}, torch {result['torch']}, {result['date']}; ratio 0.25, bfloat16; min / median / max "
        f"of {result['repeats']}, and the sum of the medians.", "",
        *table(["context", "method", "counts", *PHASES, "in all"], rows, left=3), "",
        "`python -m benchmarks.compression`. Score: attention of the scoring rows' queries to the keys, all layers and "
        "rows, without the rows' forward passes. Select: counts and kept positions. "
        "Fill: kept tokens from vLLM's pages to the arena's.",
    ]  # fmt: skip
    save(out, "compression", result, "\n".join(lines))


def main() -> None:
    command(__doc__, measure, render, {"--repeats": {"type": int, "default": 10}})


if __name__ == "__main__":
    main()
