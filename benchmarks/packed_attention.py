"""Draft attention over packed pages on a GPU: bytes read per second, and the time against uncompressed pages.

``python -m benchmarks.packed_attention`` on a machine with a GPU writes JSON, table and plot into docs/results/;
``--render FILE`` makes them of a JSON. One layer, one token per row, CUDA graphs, ragged heads. The ceiling is what a
sum over 4 GiB reads per second on the same machine. Every output is first compared with torch in float32 for one head.
"""

import argparse
import datetime
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.draft_attention import SHAPES, Shape, counts_of, microseconds
from benchmarks.report import command, figure, save, table

NAME = "packed-attention"
FORMATS = ("plain", "turboquant4", "turboquant3", "turboquant2", "kivi4", "kivi2")
NARROW = ("turboquant3", "turboquant2", "kivi2")  # their pages hold 64 tokens or more


class Case:
    """Full slots, one per row, of random codes whose scales are 1."""

    def __init__(self, shape: Shape, form: str, page_tokens: int) -> None:
        import compressors
        from vericache.draft.formats import page_format, pages_per_head
        from vericache.draft.pool import PagePool
        from vericache.draft.tables import ArenaTables
        from vericache.draft.triton_attention import segment_starts

        self.shape, self.scale = shape, shape.dim**-0.5
        self.form = page_format(form, page_tokens, shape.dim, torch.bfloat16)
        self.counts = counts_of(shape, True, torch.Generator().manual_seed(2))
        need = pages_per_head(self.counts, page_tokens)
        total = int(need.sum())
        pool = PagePool.of(total, self.form, "cuda")
        if self.form.packed:
            pool.bytes.random_(0, 256)
            self._ranges(pool.bytes).fill_(1.0)
        else:
            pool.data.normal_()
        width = compressors.Shape(1, shape.heads, shape.heads * shape.group, shape.dim)
        self.tables = ArenaTables.empty(self.form, pool, shape.rows, width, int(self.counts.max()) + page_tokens)
        self.pages = torch.randperm(total).int()
        ends = need.sum((1, 2)).cumsum(0).tolist()
        for slot, (lo, hi) in enumerate(zip([0, *ends], ends, strict=False)):
            self.tables.fill(slot, self.counts[slot], need[slot], self.pages[lo:hi])
        self.slots = torch.arange(shape.rows, device="cuda").int()
        self.query = torch.randn(shape.rows, shape.heads * shape.group, shape.dim, device="cuda").bfloat16()
        self.output = torch.empty_like(self.query)
        self.tails = torch.zeros_like(self.slots)
        self.starts = segment_starts(self.tables, self.slots, self.tails)

    def _ranges(self, content: torch.Tensor) -> torch.Tensor:
        """Scales and zero points of all pages."""
        codes = 2 * self.form.page_tokens * self.form.head_dim * self.form.bits // 8
        return content.view(torch.float16)[:, codes // 2 :]

    @property
    def bytes(self) -> int:
        """What has to be read of the pages."""
        return self.form.page_bytes * int(self.counts.sum()) // self.form.page_tokens

    def attend(self, programs: int) -> Any:
        from vericache.draft.triton_attention import Scratch, attend_arena

        shape = self.shape
        scratch = Scratch.of(programs, shape.rows, shape.heads, shape.group, self.form, self.query.device)
        return lambda: attend_arena(
            self.query,
            self.output,
            self.tables,
            0,
            self.slots,
            self.tails,
            self.slots,
            self.starts,
            scratch,
            self.scale,
        )

    def error(self) -> float:
        """Of the first row's first head."""
        group, count, size = self.shape.group, int(self.counts[0, 0, 0]), self.form.page_tokens
        pages = self.pages[: -(-count // size)].long().cuda()
        keys, values = (x.flatten(0, 1)[:count] for x in self.form.decode(self.tables.pool.bytes[pages]))
        query = self.form.turn(self.query[0, :group].float())
        wanted = self.form.back((query @ keys.T * self.scale).softmax(-1) @ values)
        return float((self.output[0, :group].float() - wanted).abs().max())


def ceiling() -> float:
    """TB/s of a sum over 4 GiB."""
    data = torch.zeros(1 << 30, dtype=torch.float32, device="cuda")
    return round(data.nbytes / microseconds(lambda: data.sum(), 10)[1] / 1e6, 2)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from vericache.draft.triton_attention import grid_programs

    processors = torch.cuda.get_device_properties(0).multi_processor_count
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "repeats": args.repeats, "ceiling": ceiling(), "cells": [],
    }  # fmt: skip
    for shape in SHAPES:
        for form in args.formats:
            for page_tokens in args.page_tokens:
                if form in NARROW and page_tokens < 64:
                    continue
                case = Case(shape, form, page_tokens)
                ours = case.attend(grid_programs(case.form, processors))
                ours()
                cell = {
                    **asdict(shape), "format": form, "page_tokens": page_tokens, "bytes": case.bytes,
                    "error": case.error(), "us": microseconds(ours, args.repeats),
                }  # fmt: skip
                found["cells"].append(cell)
                print(json.dumps(cell), flush=True)
                del case
                torch.cuda.empty_cache()
    return found


def render(result: dict[str, Any], out: Path) -> None:
    """The table and the plot of a result."""
    rows, ceiling_rate = [], result["ceiling"]
    plain: dict[str, float] = {}
    for cell in result["cells"]:
        if cell["format"] == "plain":
            plain[cell["name"]] = min(cell["us"][1], plain.get(cell["name"], cell["us"][1]))
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for cell in result["cells"]:
        us = cell["us"]
        rate = cell["bytes"] / us[1] / 1e6
        faster = plain[cell["name"]] / us[1] if cell["name"] in plain else None
        rows.append([cell["name"], cell["format"], cell["page_tokens"], f"{cell['bytes'] / 2**20:.1f}",
                     " / ".join(f"{u:.1f}" for u in us), f"{rate:.2f}", f"{rate / ceiling_rate:.2f}",
                     f"{faster:.2f}" if faster else "-"])  # fmt: skip
        key = cell["name"], cell["format"]
        best[key] = max(best.get(key, (0.0, 0.0)), (rate / ceiling_rate, faster or 0.0))
    header = ["shape", "page format", "page", "MiB read", "us, min / median / max", "TB/s", "of the ceiling",
              "times as fast as plain"]  # fmt: skip
    lines = [
        "# Draft attention over packed pages",
        "",
        f"{result['gpu']}, torch {result['torch']}, {result['date']}; {result['repeats']} graph replays each, ragged "
        f"heads, bfloat16. Ceiling: {ceiling_rate} TB/s (a sum over 4 GiB).",
        "",
        *table(header, rows, left=2),
        "",
        "`python -m benchmarks.packed_attention`. Plain: the faster of its page sizes.",
    ]
    save(out, NAME, result, "\n".join(lines))
    names = list(dict.fromkeys(name for name, _ in best))
    forms = [f for f in FORMATS if any(form == f for _, form in best)]
    with figure(out / f"{NAME}.png", 9, 4) as (_, axes):
        for i, form in enumerate(forms):
            places = [n + i * 0.8 / len(forms) for n in range(len(names))]
            axes.bar(places, [best.get((n, form), (0.0, 0.0))[0] for n in names], 0.8 / len(forms), label=form)
        axes.axhline(0.5, color="black", linestyle="--", linewidth=1)
        axes.set_xticks([n + 0.4 for n in range(len(names))], names, rotation=15, ha="right", fontsize=8)
        axes.set_ylabel(f"of the bytes' ceiling, {result['gpu']}")
        axes.legend(fontsize=8)


def main() -> None:
    command(
        __doc__,
        measure,
        render,
        {
            "--formats": {"nargs": "+", "default": list(FORMATS), "choices": FORMATS},
            "--page-tokens": {"nargs": "+", "type": int, "default": [32, 128]},
            "--repeats": {"type": int, "default": 30},
        },
    )


if __name__ == "__main__":
    main()
