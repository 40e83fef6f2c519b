"""Draft attention on a GPU: our kernel on ragged head pages against FlashAttention, by bytes of KV read per second.

``python -m benchmarks.draft_attention`` on a machine with a GPU and vLLM writes JSON, table, plot into docs/results/;
``--render FILE`` makes them of a JSON. One layer, one token per row, CUDA graphs. "stock" is vLLM's FlashAttention over
ordinary pages with equal lengths; "views" is FlashAttention over the arena, one sequence per row and KV head; "ours" is
``vericache.draft.triton_attention``. Every output of the latter two is first compared with plain torch in float32.
"""

import argparse
import datetime
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.report import command, figure, save, table

BLOCK = 16  # tokens of a stock page


@dataclass(frozen=True)
class Shape:
    """``kept`` tokens of context per head on average."""

    name: str
    rows: int
    heads: int
    group: int
    dim: int
    kept: int

    @property
    def bytes(self) -> int:
        return 2 * 2 * self.rows * self.heads * self.kept * self.dim


SHAPES = (
    Shape("8B, 32 rows, 2k kept", 32, 8, 4, 128, 2048),
    Shape("8B, 32 rows, 8k kept", 32, 8, 4, 128, 8192),
    Shape("8B, 8 rows, 8k kept", 8, 8, 4, 128, 8192),
    Shape("8B, 1 row, 8k kept", 1, 8, 4, 128, 8192),
    Shape("135M, 128 rows, 2k kept", 128, 3, 3, 64, 2048),
    Shape("135M, 4 rows, 2k kept", 4, 3, 3, 64, 2048),
)


def counts_of(shape: Shape, ragged: bool, generator: torch.Generator) -> torch.Tensor:
    """int64 ``[rows, 1, heads]``; ragged ones are spread like kept tokens under a global threshold (the longest about
    four times the mean), and add up to the same."""
    if not ragged:
        return torch.full((shape.rows, 1, shape.heads), shape.kept)
    weights = torch.rand(shape.rows, 1, shape.heads, generator=generator) ** 3 + 0.01
    counts = (weights / weights.mean() * shape.kept).long().clamp(min=1)
    counts.view(-1)[0] += shape.rows * shape.heads * shape.kept - int(counts.sum())
    return counts


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """The call as a graph. It must keep alive what it reads."""
    for _ in range(3):  # kernels are compiled outside the capture
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def microseconds(call: Callable[[], Any], repeats: int) -> list[float]:
    """min, median, max of graph replays."""
    graph = captured(call)
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return [round(x, 2) for x in (min(times), median(times), max(times))]


def worst(output: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((output.float().view_as(wanted) - wanted).abs().max())


def stock(shape: Shape, repeats: int) -> list[float]:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    blocks = shape.rows * shape.kept // BLOCK
    cache = torch.randn(blocks, 2, BLOCK, shape.heads, shape.dim, device="cuda").bfloat16()
    block_table = torch.randperm(blocks, device="cuda").int().view(shape.rows, -1)
    query = torch.randn(shape.rows, shape.heads * shape.group, shape.dim, device="cuda").bfloat16()
    arguments = {
        "q": query, "k": cache[:, 0], "v": cache[:, 1], "out": torch.empty_like(query), "max_seqlen_q": 1,
        "cu_seqlens_q": torch.arange(shape.rows + 1, device="cuda").int(), "max_seqlen_k": shape.kept,
        "seqused_k": torch.full((shape.rows,), shape.kept, device="cuda").int(), "softmax_scale": shape.dim**-0.5,
        "causal": True, "block_table": block_table, "fa_version": 3,
    }  # fmt: skip
    return microseconds(lambda: flash_attn_varlen_func(**arguments), repeats)


class Case:
    """Full slots, one per row, in pages of ``page_tokens``, and a query of every row."""

    def __init__(self, shape: Shape, ragged: bool, page_tokens: int) -> None:
        from tests.interpreted.arena_tables import Rows, random_tables
        from vericache.draft.triton_attention import segment_starts

        self.shape, self.scale = shape, shape.dim**-0.5
        self.counts = counts_of(shape, ragged, torch.Generator().manual_seed(2)).cuda()
        none = torch.zeros(shape.rows, dtype=torch.int64, device="cuda")
        generator = torch.Generator("cuda").manual_seed(1)
        self.tables = random_tables(self.counts, none, page_tokens, shape.dim, torch.bfloat16, generator)
        self.rows = Rows(torch.arange(shape.rows, device="cuda").int(), none.int())
        self.query = torch.randn(shape.rows, shape.heads * shape.group, shape.dim, device="cuda").bfloat16()
        self.output = torch.empty_like(self.query)
        self.starts = segment_starts(self.tables, self.rows.slot, self.rows.tail)

    def attend(self, programs: int) -> Callable[[], None]:
        """Our kernel on a grid of ``programs``."""
        from vericache.draft.triton_attention import Scratch, attend_arena

        shape = self.shape
        scratch = Scratch.of(programs, shape.rows, shape.heads, shape.group, self.tables.format, self.query.device)
        rows = self.rows  # one token each: the slots' numbers are the tokens' too
        return lambda: attend_arena(
            self.query, self.output, self.tables, 0, rows.slot, rows.tail, rows.slot, self.starts, scratch, self.scale
        )


def arena(shape: Shape, ragged: bool, page_tokens: int, programs: list[int], repeats: int) -> dict[str, Any]:
    """Ours with each number of programs per multiprocessor, and FlashAttention on views, on the same pages."""
    from tests.interpreted.arena_tables import expected

    case = Case(shape, ragged, page_tokens)
    counts, tables, query, scale = case.counts, case.tables, case.query, case.scale
    wanted = expected(query, tables, 0, case.rows, scale)
    found: dict[str, Any] = {"longest": int(counts.max()), "ours": {}}
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for each in programs:
        ours = case.attend(each * processors)
        case.output.fill_(7.0)
        ours()
        found["ours"][each] = {"error": worst(case.output, wanted), "us": microseconds(ours, repeats)}
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError:
        return found
    sequences = shape.rows * shape.heads
    out = torch.empty_like(query)
    arguments = {
        "q": query.view(sequences, shape.group, shape.dim), "k": tables.pool.data[:, 0].unsqueeze(2),
        "v": tables.pool.data[:, 1].nan_to_num().unsqueeze(2), "out": out.view(sequences, shape.group, shape.dim),
        "max_seqlen_q": 1, "cu_seqlens_q": torch.arange(sequences + 1, device="cuda").int(),
        "max_seqlen_k": int(counts.max()), "seqused_k": counts.view(-1).int(), "softmax_scale": scale, "causal": True,
        "block_table": tables.table[:, 0].clamp(max=len(tables.pool.bytes) - 1).reshape(sequences, -1).contiguous(),
        "fa_version": 3,
    }  # fmt: skip
    flash_attn_varlen_func(**arguments)
    found["views"] = {
        "error": worst(out, wanted),
        "us": microseconds(lambda: flash_attn_varlen_func(**arguments), repeats),
    }
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    cells = []
    for shape in SHAPES:
        base = None if args.without_vllm else stock(shape, args.repeats)
        for ragged in (False, True):
            for page_tokens in args.page_tokens:
                cell = arena(shape, ragged, page_tokens, args.programs, args.repeats)
                cells.append({**asdict(shape), "bytes": shape.bytes, "ragged": ragged, "page_tokens": page_tokens,
                              "stock_us": base, **cell})  # fmt: skip
                print(json.dumps(cells[-1]), flush=True)
                torch.cuda.empty_cache()
    head = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "repeats": args.repeats,
    }
    return {**head, "cells": cells}


def render(result: dict[str, Any], out: Path) -> None:
    """The table and the plot of a result."""
    rows, labels, ratios = [], [], []
    for cell in result["cells"]:
        rate = lambda us, cell=cell: cell["bytes"] / us / 1e6  # noqa: E731  # TB/s
        best = min(cell["ours"].values(), key=lambda o: o["us"][1])
        ours, views = rate(best["us"][1]), rate(cell["views"]["us"][1]) if "views" in cell else None
        base = rate(cell["stock_us"][1]) if cell["stock_us"] else None
        lengths = f"ragged, longest {cell['longest']}" if cell["ragged"] else "equal"
        spread = " / ".join(f"{rate(us):.2f}" for us in reversed(best["us"]))
        rows.append([cell["name"], lengths, cell["page_tokens"], f"{base:.2f}" if base else "-",
                     f"{views:.2f}" if views else "-", spread, f"{ours / base:.2f}" if base else "-"])  # fmt: skip
        if base:
            labels.append(f"{cell['name']}\n{'ragged' if cell['ragged'] else 'equal'}, page {cell['page_tokens']}")
            ratios.append((views / base if views else 0, ours / base))
    header = ["shape", "lengths", "page", "stock FA3", "FA3 on views", "ours, min / median / max", "ours / stock"]
    lines = [
        "# Draft attention: TB/s of KV read", "",
        f"{result['gpu']}, torch {result['torch']}, {result['date']}; {result['repeats']} graph replays each.", "",
        *table(header, rows, left=2), "",
        "`python -m benchmarks.draft_attention`. Stock: equal lengths, the same bytes. Ours: with the best number of "
        "programs per multiprocessor (all are in the JSON).",
    ]  # fmt: skip
    save(out, "draft-attention", result, "\n".join(lines))
    if ratios:
        with figure(out / "draft-attention.png", 9, 0.32 * len(labels) + 1.2) as (_, axes):
            places = range(len(labels))
            axes.barh([p - 0.2 for p in places], [r[1] for r in ratios], 0.38, label="ours")
            axes.barh([p + 0.2 for p in places], [r[0] for r in ratios], 0.38, label="FA3 on views")
            axes.axvline(0.75, color="black", linewidth=0.8, linestyle="--", label="aim: 0.75")
            axes.set_yticks(list(places), labels, fontsize=6)
            axes.invert_yaxis()
            axes.set_xlabel("rate / stock FlashAttention's at equal bytes")
            axes.legend()


def main() -> None:
    options: dict[str, dict[str, Any]] = {
        "--page-tokens": {"type": int, "nargs": "+", "default": [16, 32, 64, 128]},
        "--programs": {"type": int, "nargs": "+", "default": [2, 4, 8], "help": "per multiprocessor"},
        "--repeats": {"type": int, "default": 40},
        "--without-vllm": {"action": "store_true", "help": "only our kernel"},
    }
    command(__doc__, measure, render, options)


if __name__ == "__main__":
    main()
