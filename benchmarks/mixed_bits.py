"""Would a mix of bits beat one width for all? ``python -m benchmarks.mixed_bits``: accepted drafts per round over the
compressed size on the bundled prompts and model (greedy, float32), for what KVzip keeps with one threshold for all
heads and TurboQuant's codes with

* one width (the formats ``turboquant4``, ``turboquant3`` and ``turboquant2``), keys and values alike or not,
* a width per layer (KVTuner, arXiv 2502.04420): 2 bits where they change the model's output least, 4 elsewhere,
* a width per token (RDKV, arXiv 2605.08317): reverse water-filling over KVzip's scores, eviction being the width 0, at
  the size of one width of 4 bits.

Rounds are predicted (``tests.reference``), since the arena has pages of one width. Writes JSON, a table and a plot into
docs/results/.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import DynamicCache

from benchmarks.acceptance_grid import Method
from benchmarks.report import RESULTS, figure, machine, save, table
from compressors import Kept
from compressors.budget import forced_mask
from tests.packings import Packing, turboquant
from vericache.demo.prompts import PROMPTS
from vericache.demo.worker import ENVIRONMENT

if TYPE_CHECKING:
    from benchmarks.acceptance_run import Run

NAME = "mixed-bits"
PAGE, SINKS, RECENT, RATIO, DRAFTS, SCALE_BITS = 32, 4, 32, 0.25, 25, 16
METHOD = Method("kvzip", "per_head")
TAIL_BITS = 4  # of verified tokens behind the context, where widths are by token

# layer, head and positions int64 [m] of tokens -> bits of their keys and of their values, int64 [m] each
Widths = Callable[[int, int, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Mixed(Packing):
    """TurboQuant with a width per token."""

    widths: Widths | None = None

    def pack(self, full: DynamicCache, mask: Tensor) -> DynamicCache:
        assert self.widths is not None
        context, out = mask.shape[-1], DynamicCache()
        for layer, stored in enumerate(full.layers):
            keys, values = stored.keys.clone(), stored.values.clone()
            for head, kept in enumerate(mask[layer]):
                where = torch.cat([kept.nonzero()[:, 0], torch.arange(context, keys.shape[2])])
                for side, bits in zip((keys, values), self.widths(layer, head, where), strict=True):
                    side[0, head, where] = narrowed(side[0, head, where], bits)
            out.update(keys, values, layer)
        return out


def narrowed(x: Tensor, bits: Tensor) -> Tensor:
    """``x [m, D]`` with token i as ``bits[i]`` bits leave it."""
    out = torch.empty_like(x)
    for width in bits.unique().tolist():
        out[bits == width] = turboquant(width, PAGE, RECENT).lose(x[bits == width], x[:0])[0]
    return out


def mixed(widths: Widths) -> Mixed:
    return Mixed(lambda keys, values: (keys, values), PAGE, RECENT, widths)


def everywhere(key_bits: int, value_bits: int) -> Widths:
    return lambda layer, head, where: (torch.full_like(where, key_bits), torch.full_like(where, value_bits))


def by_layer(bits: Sequence[tuple[int, int]]) -> Widths:
    return lambda layer, head, where: everywhere(*bits[layer])(layer, head, where)


def by_token(bits: Tensor) -> Widths:
    """``bits`` int64 ``[L, H, n]`` of the context."""
    context = bits.shape[-1]

    def widths(layer: int, head: int, where: Tensor) -> tuple[Tensor, Tensor]:
        mine = torch.where(where < context, bits[layer, head, where.clamp(max=context - 1)], TAIL_BITS)
        return mine, mine

    return widths


def water_filling(scores: Tensor, budget: float, menu: Sequence[int], power: float, head_dim: int) -> Tensor:
    """Bits int64 ``[L, H, n]`` out of the ascending ``menu``, which begins with 0, that cost at most ``budget`` bits
    per number, scales included: the width nearest to log2(weight / level) / 2, weight being ``scores ** power``, with
    the level that fits (the distortion of b bits falls as 4^-b). Forced tokens get the largest."""
    wanted = power * torch.log2(scores.double().clamp(min=1e-12)) / 2
    wanted[..., forced_mask(scores.shape[-1], SINKS, RECENT)] = float("inf")
    choices = torch.tensor(menu)
    edges = (choices[1:] + choices[:-1]) / 2

    def bits(level: float) -> Tensor:
        return choices[torch.bucketize(wanted - level, edges, right=True)]

    low, high = -100.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        cost = numbers_bits(bits(middle), head_dim).mean()
        low, high = (middle, high) if cost > budget else (low, middle)
    return bits(high)


def numbers_bits(bits: Tensor, head_dim: int) -> Tensor:
    """Bits per number, with a token's share of its scale."""
    return bits + (bits > 0) * (SCALE_BITS / head_dim)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", choices=PROMPTS, default=list(PROMPTS))
    parser.add_argument("--tokens", type=int, default=128, help="output tokens per prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    args.drafts = [DRAFTS]
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(args.threads))
    torch.set_num_threads(args.threads)  # torch is loaded by now and has read the environment
    from benchmarks.acceptance_run import Run  # imports vLLM, which reads the environment

    console, lines = Console(), list[dict[str, Any]]()
    with console.status("an engine, a reference model, and the prompts' KV"):
        run = Run(args)
        kept = {name: s.kept for name, s in run.select(METHOD, RATIO).items()}
    for line in measured(run, kept):
        lines.append(line)
        console.print(line)
        write(lines, args)
    return 0


def measured(run: "Run", kept: Mapping[str, Kept]) -> Iterator[dict[str, Any]]:
    layers = next(iter(kept.values())).counts.shape[0]
    for keys, values in ((4, 4), (3, 3), (2, 2), (4, 3), (4, 2), (2, 4), (3, 2)):
        yield point(run, kept, "one width", f"keys {keys}, values {values}", (keys + values) / 2,
                    dict.fromkeys(kept, everywhere(keys, values)))  # fmt: skip
    scores = {name: s.scores for name, s in run.scores(METHOD).items()}
    budget = RATIO * (4 + SCALE_BITS / run.head_dim)
    for menu in ((0, 2, 3, 4), (0, 2, 4), (0, 3, 4)):
        for power in (1.0, 2.0):
            bits = {n: water_filling(s, budget, menu, power, run.head_dim) for n, s in scores.items()}
            chosen = {n: Kept((b > 0).sum(-1), (b > 0).nonzero()[:, 2]) for n, b in bits.items()}
            mean = sum(float(b[b > 0].double().mean()) for b in bits.values()) / len(bits)
            yield point(run, chosen, "by token", f"{menu[1:]}, scores^{power:g}", mean,
                        {n: by_token(b) for n, b in bits.items()})  # fmt: skip
    order = least_sensitive(run, kept, layers)
    for low in (layers // 3, layers // 2, layers * 2 // 3):
        bits_of = [(2, 2) if i in order[:low] else (4, 4) for i in range(layers)]
        yield point(run, kept, "by layer", f"2 bits in {low} of {layers} layers", 4 - 2 * low / layers,
                    dict.fromkeys(kept, by_layer(bits_of)))  # fmt: skip


def point(
    run: "Run", kept: Mapping[str, Kept], kind: str, label: str, bits: float, widths: Mapping[str, Widths]
) -> dict[str, Any]:
    found = {n: run.packed_rounds({n: kept[n]}, mixed(widths[n]))[n] for n in kept}
    share = sum(len(k.positions) / (k.counts.numel() * len(run.prompts[n])) for n, k in kept.items()) / len(kept)
    return {
        "kind": kind, "widths": label, "kept": round(share, 4), "bits": round(bits, 2),
        "size": round(share * (bits + SCALE_BITS / run.head_dim) / 16, 4), **run.pooled(found), "prompts": found,
    }  # fmt: skip


def least_sensitive(run: "Run", kept: Mapping[str, Kept], layers: int) -> list[int]:
    """Layers by how much 2 bits there, and 4 elsewhere, change the next-token distribution of all output tokens:
    Kullback-Leibler divergence from 4 bits everywhere, summed over prompts."""
    base = {n: run.distribution(n, kept[n], mixed(everywhere(4, 4))) for n in kept}
    loss = []
    for low in track(range(layers), "sensitivity of layers"):
        packing = mixed(by_layer([(2, 2) if i == low else (4, 4) for i in range(layers)]))
        found = {n: run.distribution(n, kept[n], packing) for n in kept}
        loss.append(sum(float((base[n].exp() * (base[n] - found[n])).sum(-1).mean()) for n in kept))
    return sorted(range(layers), key=loss.__getitem__)


def write(lines: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    found = {"date": date.today().isoformat(), "machine": machine(), "ratio": RATIO, "drafts": DRAFTS,
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
        "Rounds are predicted; full ones over prompts whose output does not loop. Size: codes and scales of the",
        "compressed context over full KV in bfloat16.",
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
