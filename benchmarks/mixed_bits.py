"""Would a mix of bits beat one width for all? ``python -m benchmarks.mixed_bits``: accepted drafts per round over the
compressed size on the bundled prompts and model (greedy, float32), for what KVzip keeps with one threshold for all
heads and TurboQuant's codes with

* one width (the formats ``turboquant4``, ``turboquant3`` and ``turboquant2``), keys and values alike or not,
* a width per token (RDKV, arXiv 2605.08317): reverse water-filling over the squares of KVzip's scores, eviction being
  the width 0, at the size of one width of 4 bits,
* widths per layer (KVTuner, arXiv 2502.04420) of so many bits on average (``benchmarks.layer_bits``).

Rounds are predicted (``tests.reference``); tests hold the engine with ``page_format: turboquant_mixed`` to that. Writes
JSON, a table and a plot into docs/results/.
"""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.acceptance import add_device, check_device, predicted
from benchmarks.acceptance_grid import Method
from benchmarks.layer_bits import layer_errors
from benchmarks.report import RESULTS, figure, machine_of, save, table
from compressors import Kept
from compressors.bits import WIDTHS, Pair, bits_of_layers, vector_bits, water_filling
from compressors.budget import forced_mask
from tests.packings import by_layer, by_token, kept_bits, mixed
from vericache.demo.prompts import PROMPTS
from vericache.demo.worker import ENVIRONMENT
from vericache.draft.formats import Mixed

if TYPE_CHECKING:
    from benchmarks.acceptance_rounds import Predicted

NAME = "mixed-bits"
PAGE, SINKS, RECENT, RATIO, DRAFTS = 32, 4, 32, 0.25, 25
METHOD = Method("kvzip", "per_head")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", choices=PROMPTS, default=list(PROMPTS))
    parser.add_argument("--tokens", type=int, default=128, help="output tokens per prompt")
    parser.add_argument("--threads", type=int, default=2)
    add_device(parser)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    check_device(parser, args)
    args.drafts = [DRAFTS]
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(args.threads))
    torch.set_num_threads(args.threads)  # torch is loaded by now and has read the environment
    console, lines = Console(), list[dict[str, Any]]()
    with console.status("an engine, a reference model, and the prompts' KV"):
        run = predicted(args)
        kept = {name: s.kept for name, s in run.select(METHOD, RATIO).items()}
    for line in measured(run, kept):
        lines.append(line)
        console.print(line)
        write(lines, args)
    return 0


def measured(run: "Predicted", kept: Mapping[str, Kept]) -> Iterator[dict[str, Any]]:
    layers = next(iter(kept.values())).counts.shape[0]
    pairs: list[Pair] = [(4, 4), (3, 3), (2, 2), (4, 3), (4, 2), (2, 4), (3, 2)]
    for keys, values in pairs:
        yield point(run, kept, "one width", f"keys {keys}, values {values}", [(keys, values)] * layers)
    scores = {name: s.scores for name, s in run.scores(METHOD).items()}
    for widths in (WIDTHS, (2, 3, 4), (2, 4)):
        chosen = {name: by_water_filling(s, run.head_dim, widths) for name, s in scores.items()}
        label = f"of {', '.join(map(str, widths))} bits"
        yield point(run, chosen, "by token", label, [(4, 4)] * layers)
    errors = layer_errors(run.reference, run.prompts.values())
    for mean in (3.5, 3.0, 2.5):
        yield point(run, kept, "by layer", f"{mean:g} bits on average", bits_of_layers(errors, mean))


def by_water_filling(scores: Tensor, head_dim: int, widths: Sequence[int]) -> Kept:
    """RDKV's choice at the size of ``RATIO`` of the tokens in 4 bits."""
    forced = forced_mask(scores.shape[-1], SINKS, RECENT).expand_as(scores)
    weights = torch.where(forced, scores.max(), scores).square()
    bits = water_filling(weights, forced, int(RATIO * scores.numel() * vector_bits(4, head_dim)), head_dim, widths)
    return Kept((bits > 0).sum(-1), (bits > 0).nonzero()[:, 2], bits=bits[bits > 0])


def point(
    run: "Predicted", kept: Mapping[str, Kept], kind: str, label: str, layer_bits: Sequence[Pair]
) -> dict[str, Any]:
    """``layer_bits`` of tokens that were given no width, and of those behind the context."""
    found, sizes, share, bits = dict[str, list[int]](), 0.0, 0.0, 0.0
    form = Mixed(PAGE, run.head_dim, torch.bfloat16)
    form.layer_bits = layer_bits
    for name, mine in kept.items():
        context, widths = len(run.prompts[name]), by_layer(layer_bits)
        if mine.bits is not None:
            widths = by_token(kept_bits(mine, context), widths)
            bits += float(mine.bits.double().mean()) / len(kept)
        else:
            per_layer = mine.counts.sum(1) / len(mine.positions)
            bits += float((per_layer * torch.tensor(layer_bits).sum(1) / 2).sum()) / len(kept)
        found |= run.packed_rounds({name: mine}, mixed(widths, PAGE, RECENT))
        full = mine.counts.numel() * context
        share += len(mine.positions) / full / len(kept)
        sizes += form.packed_bytes(mine) / (full * 2 * run.head_dim * 2) / len(kept)
    return {
        "kind": kind, "widths": label, "kept": round(share, 4), "bits": round(bits, 2), "size": round(sizes, 4),
        **run.pooled(found), "layer_bits": [list(pair) for pair in layer_bits], "prompts": found,
    }  # fmt: skip


def write(lines: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    found = {"date": date.today().isoformat(), "machine": machine_of(args.device), "ratio": RATIO, "drafts": DRAFTS,
             "tokens": args.tokens, "lines": list(lines)}  # fmt: skip
    rows = [
        [p["kind"], p["widths"], f"{p['kept']:.2f}", p["bits"], f"{p['size']:.3f}", f"{p['accepted']:.1f}",
         f"{p['min']} / {p['max']}", p["rounds"]]
        for p in lines
    ]  # fmt: skip
    header = ["bits", "which", "kept", "per number", "size", "accepted per round", "min / max", "rounds"]
    text = [
        "# One width, or a mix of bits?",
        "",
        f"`python -m benchmarks.mixed_bits`, {found['date']}, {found['machine']}.",
        f"SmolLM2-135M-Instruct, float32, greedy, {len(args.prompts)} prompts, {args.tokens} output tokens each, x = "
        f"{DRAFTS}; {METHOD.name}, TurboQuant.",
        "Rounds are predicted; full ones over prompts whose output does not loop. Size: pages, tables and counts of",
        "the compressed context over full KV in bfloat16.",
        "",
        *table(header, rows, left=2),
        "",
        f"![Accepted drafts per round over compressed size]({NAME}.png)",
        "",
    ]
    save(args.out, NAME, found, "\n".join(text))
    with figure(args.out / f"{NAME}.png", 8, 4.5) as (_, axes):
        for kind in dict.fromkeys(p["kind"] for p in lines):
            mine = [p for p in lines if p["kind"] == kind]
            axes.plot([p["size"] for p in mine], [p["accepted"] for p in mine], "o", label=kind)
            for p in mine:
                axes.annotate(p["widths"], (p["size"], p["accepted"]), fontsize=6, xytext=(4, 2),
                              textcoords="offset points")  # fmt: skip
        axes.set_xlabel("compressed bytes / full KV in bfloat16")
        axes.set_ylabel(f"accepted drafts per round (x = {DRAFTS})")
        axes.set_ylim(0, DRAFTS)
        axes.legend(fontsize=8)


if __name__ == "__main__":
    raise SystemExit(main())
