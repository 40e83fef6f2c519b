"""Copies of KV pages between a GPU and pinned host memory: ``python -m benchmarks.transfer`` on a machine with a GPU.

Scattered pages of all layers by ``vericache.store.triton_copy`` with some numbers of programs, beside one large copy by
the copy engine, which is the link's limit; alone and beside draft attention. ``--render FILE`` makes the table of
docs/results/.
"""

import argparse
import datetime
import itertools
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.report import command, save, table

# name: layers, block shape (heads, tokens, 2 D) in bfloat16, blocks per copy
SHAPES = {
    "135M, 16 tokens a block": (30, (3, 16, 128), 512),
    "135M, 64 tokens a block": (30, (3, 64, 128), 128),
    "8B, 16 tokens a block": (32, (8, 16, 256), 128),
    "8B, 64 tokens a block": (32, (8, 64, 256), 32),
}


def gigabytes_per_second(call: Callable[[], Any], num_bytes: int, repeats: int) -> list[float]:
    """min, median, max."""
    found = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(num_bytes / start.elapsed_time(end) / 1e6)
    found = sorted(found[2:])
    return [round(x, 1) for x in (found[0], median(found), found[-1])]


def attention() -> tuple[torch.cuda.CUDAGraph, Any]:
    """Draft attention of one 8B layer, 32 rows with 8k ragged tokens kept each, as a graph; and what it reads."""
    from benchmarks.draft_attention import SHAPES as ATTENTION
    from benchmarks.draft_attention import Case, captured
    from vericache.draft.triton_attention import grid_programs

    case = Case(ATTENTION[1], ragged=True, page_tokens=32)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    call = case.attend(grid_programs(case.tables.format, processors))
    return captured(call), call


def beside(copy: Callable[[], Any], num_bytes: int, graph: torch.cuda.CUDAGraph) -> dict[str, float]:
    """Both at once on two streams: the copies' rate, and the time of the attention as a multiple of its time alone."""

    def replays(count: int) -> list[torch.cuda.Event]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        return events

    def middle(events: list[torch.cuda.Event]) -> float:
        return median(a.elapsed_time(b) for a, b in itertools.pairwise(events))

    quiet = replays(100)
    torch.cuda.synchronize()
    side, copies = torch.cuda.Stream(), max(10, int(3e9 / num_bytes))  # longer than the replays beside them
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(side):
        start.record()
        for _ in range(copies):
            copy()
        end.record()
    busy = replays(100)
    torch.cuda.synchronize()
    rate = copies * num_bytes / start.elapsed_time(end) / 1e6
    return {"gb_per_second": round(rate, 1), "attention_slowdown": round(middle(busy) / middle(quiet), 3)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from vericache.store.triton_copy import copy_pages, layer_pointers

    large, device = torch.empty(1 << 28, dtype=torch.uint8).pin_memory(), torch.empty(1 << 28, dtype=torch.uint8).cuda()
    link = {
        "to_device": gigabytes_per_second(lambda: device.copy_(large, non_blocking=True), large.nbytes, args.repeats),
        "to_host": gigabytes_per_second(lambda: large.copy_(device, non_blocking=True), large.nbytes, args.repeats),
    }
    cells, (graph, _read) = [], attention()
    for name, (layers, shape, count) in SHAPES.items():
        caches = [torch.randn(4 * count, *shape, device="cuda").bfloat16() for _ in range(layers)]
        host = torch.empty(2 * count, layers, *shape, dtype=torch.bfloat16).pin_memory()
        blocks, pages = torch.randperm(4 * count)[:count], torch.randperm(2 * count)[:count]
        block_ids, page_ids, pointers = blocks.int().cuda(), pages.int().cuda(), layer_pointers(caches)
        num_bytes = count * layers * caches[0][0].nbytes
        for to_host in (True, False):
            for programs in args.programs:

                def copy(to_host: bool = to_host, programs: int = programs) -> None:
                    copy_pages(caches, pointers, host, block_ids, page_ids, to_host, programs)  # noqa: B023

                rates = gigabytes_per_second(copy, num_bytes, args.repeats)
                cells.append({"shape": name, "piece_bytes": caches[0][0].nbytes, "bytes": num_bytes,
                              "direction": "to_host" if to_host else "to_device", "programs": programs,
                              "gb_per_second": rates, "beside": beside(copy, num_bytes, graph)})  # fmt: skip
        torch.cuda.synchronize()
        same = all(torch.equal(host[pages, layer], c[blocks.cuda()].cpu()) for layer, c in enumerate(caches))
        assert same, name
    return {
        "date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "repeats": args.repeats, "link": link, "cells": cells,
    }  # fmt: skip


def render(result: dict[str, Any], out: Path) -> None:
    programs = sorted({c["programs"] for c in result["cells"]})
    rows = []
    for shape, piece in dict.fromkeys((c["shape"], c["piece_bytes"]) for c in result["cells"]):
        for direction in ("to_host", "to_device"):
            by = {c["programs"]: c for c in result["cells"] if (c["shape"], c["direction"]) == (shape, direction)}
            alone = [" / ".join(map(str, by[p]["gb_per_second"])) for p in programs]
            both = [
                f"{b['gb_per_second']} (x {b['attention_slowdown']:.2f})" for b in (by[p]["beside"] for p in programs)
            ]
            for what, cells in (("alone", alone), ("beside attention", both)):
                rows.append([shape, f"{piece / 1024:g} KiB", direction.replace("_", " "), what, *cells])
    lines = [
        "# Copies of KV pages over the link: GB/s", "",
        f"{result['gpu']}, torch {result['torch']}, {result['date']}; min / median / max of {result['repeats']}, by "
        f"number of programs. One large copy by the copy engine: {result['link']['to_host'][1]} GB/s to the host, "
        f"{result['link']['to_device'][1]} to the device.", "",
        *table(["pages", "piece", "direction", "", *map(str, programs)], rows, left=4), "",
        "`python -m benchmarks.transfer`. Beside attention: with draft attention (8B, 32 rows, 8k ragged tokens) in a "
        "loop on another stream, and by how much that takes longer.",
    ]  # fmt: skip
    save(out, "transfer", result, "\n".join(lines))


def main() -> None:
    programs = {"type": int, "nargs": "+", "default": [1, 2, 4, 8, 16]}
    command(__doc__, measure, render, {"--programs": programs, "--repeats": {"type": int, "default": 20}})


if __name__ == "__main__":
    main()
