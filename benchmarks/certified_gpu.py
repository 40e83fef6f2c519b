"""Certified attention on a GPU against dense attention: ``python -m benchmarks.certified_gpu`` writes JSON, table and
plot into docs/results/; ``--render FILE`` makes them of a JSON.

One layer, one row at a time, as the engine launches it: a random sample of the context in an arena slot, the full
cache in pinned host memory. "dense" is attention over the whole context in device memory (vLLM's FlashAttention,
torch's where vLLM is missing), "offload" the same behind a copy of the layer's context from pinned memory: what
decoding from an offloaded cache costs without certificates. Each is a CUDA graph; the engine runs certified rows
without one, hence "eager". All are timed in turn, so that each ratio is one of neighbours.

Keys are random and queries scaled by ``--spreads``, from flat attention to peaked: how much is fetched depends on that,
and stands beside every time. Real queries are those of ``benchmarks.certified``. ``--dry`` runs a tiny case through
Triton's interpreter (TRITON_INTERPRET=1) on a CPU: it shows that the program works, and its times mean nothing.
"""

import argparse
import datetime
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import command, figure, machine_of, save, table

NAME, BLOCK, TAIL = "certified-gpu", 16, 16
DRY = {"contexts": [64], "heads": 2, "group": 2, "dim": 16, "repeats": 1, "compression": 4, "spreads": [2.0]}
Call = Callable[[], Any]


class Case:
    """One layer's context, in the arena, on the host, and as pages of the dense kernel."""

    def __init__(self, args: argparse.Namespace, tokens: int, spread: float) -> None:
        from tests.interpreted.certified_world import DEVICE, CertifiedWorld
        from vericache.certified.attention import Policy
        from vericache.certified.certificate import Target
        from vericache.certified.device import limits_of

        self.on_gpu = DEVICE.type == "cuda"
        self.world = CertifiedWorld(
            (tokens / args.compression,) * args.heads, args.group, args.dim, tokens, TAIL, BLOCK, args.page_tokens,
            spread=spread, dtype=torch.bfloat16 if self.on_gpu else torch.float32,
        )  # fmt: skip
        world = self.world
        both = torch.stack([world.keys, world.values]).unflatten(2, (-1, BLOCK))  # [2, H, blocks, block, D]
        self.cache = both.permute(2, 0, 3, 1, 4).contiguous()
        self.host = self.cache.cpu().pin_memory() if self.on_gpu else self.cache.clone()
        self.query = world.query.flatten(0, 1)[None].contiguous()
        self.policy = Policy(Target(args.epsilon, args.delta))
        self.limits = limits_of(self.policy, DEVICE)

    def certified(self) -> Any:
        from vericache.certified.device import attend

        world = self.world
        return attend(world.query, world.sampled, world.scale, self.policy.max_fetch, self.limits, world.work)

    def dense(self) -> tuple[str, Call]:
        """Which kernel, and its call, whose output is ``[1, Hq, D]``."""
        tokens, device, out = self.world.tokens, self.cache.device, torch.empty_like(self.query)
        try:
            from vllm.vllm_flash_attn import flash_attn_varlen_func
        except ImportError:
            keys, values = self.cache.permute(1, 3, 0, 2, 4).flatten(2, 3)[:, None].unbind(0)  # [1, H, n, D]
            query, scale = self.query[:, :, None], self.world.scale
            attention = torch.nn.functional.scaled_dot_product_attention
            return "torch", lambda: attention(query, keys, values, scale=scale, enable_gqa=True)[:, :, 0]
        arguments = {
            "q": self.query, "k": self.cache[:, 0], "v": self.cache[:, 1], "out": out, "max_seqlen_q": 1,
            "cu_seqlens_q": torch.arange(2, device=device).int(), "max_seqlen_k": tokens,
            "seqused_k": torch.full((1,), tokens, device=device).int(), "softmax_scale": self.world.scale,
            "causal": True, "block_table": torch.arange(len(self.cache), device=device).int()[None], "fa_version": 3,
        }  # fmt: skip
        return "FlashAttention 3", lambda: flash_attn_varlen_func(**arguments)

    def offload(self, dense: Call) -> Call:
        def call() -> Any:
            self.cache.copy_(self.host, non_blocking=True)
            return dense()

        return call


def timed(calls: dict[str, Call], repeats: int, on_gpu: bool) -> dict[str, list[float]]:
    """Microseconds of every call, one after the other in every repeat."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            if on_gpu:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                end.record()
                torch.cuda.synchronize()
                found[name].append(start.elapsed_time(end) * 1e3)
            else:
                begin = time.perf_counter()
                call()
                found[name].append((time.perf_counter() - begin) * 1e6)
    return found


def three(values: list[float], digits: int) -> list[float]:
    """min, median, max."""
    return [round(x, digits) for x in (min(values), median(values), max(values))]


def cell(args: argparse.Namespace, tokens: int, spread: float) -> dict[str, Any]:
    case = Case(args, tokens, spread)
    by, dense = case.dense()
    outcome, exact = case.certified(), dense()
    calls: dict[str, Call] = {"certified": case.certified, "dense": dense, "offload": case.offload(dense)}
    if case.on_gpu:
        from benchmarks.draft_attention import captured

        calls = {name: captured(call).replay for name, call in calls.items()}
        calls["eager"] = case.certified
        timed(calls, 3, True)
    times = timed(calls, args.repeats, case.on_gpu)
    over = {
        name: three([a / b for a, b in zip(times["certified"], times[name], strict=True)], 3)
        for name in times
        if name != "certified"
    }
    context = tokens * args.heads
    return {
        "context": tokens, "spread": spread, "dense_by": by, "us": {k: three(v, 1) for k, v in times.items()},
        "over": over, "fetched": round(int(outcome.fetched.sum()) / context, 4),
        "fallbacks": int((outcome.fallback > 0).sum()), "resident": round(int(case.world.resident.sum()) / context, 4),
        "largest_certificate": float(outcome.error.max()), "error": _error(outcome.output, case.world.dense),
        "dense_error": _error(exact.view(case.world.query.shape), _without_tail(case)),
    }  # fmt: skip


def _error(got: Tensor, wanted: Tensor) -> float:
    """The largest relative error of a query's output."""
    return float(((got.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def _without_tail(case: Case) -> Tensor:
    world = case.world
    return (world.query.float() @ world.keys.float().mT * world.scale).softmax(-1) @ world.values.float()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    if args.dry:
        vars(args).update(DRY)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cells = []
    for tokens in args.contexts:
        for spread in args.spreads:
            cells.append(cell(args, tokens, spread))
            print(json.dumps(cells[-1]), flush=True)
    about = ("epsilon", "delta", "compression", "heads", "group", "dim", "page_tokens", "repeats", "dry")
    head = {"date": datetime.date.today().isoformat(), "machine": machine_of(device), "torch": torch.__version__}
    return {**head, **{name: getattr(args, name) for name in about}, "cells": cells}


def render(result: dict[str, Any], out: Path) -> None:
    columns = ["context", "spread", "fetched", "all read by", "output error", "certified us", "over dense",
               "over offload", "over eager"]  # fmt: skip
    rows = []
    for each in result["cells"]:
        over = [_spread(each["over"].get(name)) for name in ("dense", "offload", "eager")]
        rows.append([f"{each['context']:,}", f"{each['spread']:g}", f"{each['fetched']:.1%}",
                     f"{each['fallbacks']} of {result['heads']}", f"{each['error']:.2g}",
                     _spread(each["us"]["certified"]), *over])  # fmt: skip
    kernels = sorted({each["dense_by"] for each in result["cells"]})
    lines = [
        "# Certified attention on a GPU", "",
        f"`python -m benchmarks.certified_gpu`, {result['date']}, {result['machine']}, torch {result['torch']}.",
        f"One layer and row: {result['heads']} KV heads of {result['group']} queries, head size {result['dim']}; "
        f"sample {result['compression']}x, epsilon {result['epsilon']}, delta {result['delta']}. Dense: "
        f"{', '.join(kernels)}. Ratios of time, min / median / max of {result['repeats']} repeats.", "",
        *(["**A dry run through Triton's interpreter: its times mean nothing.**", ""] if result["dry"] else []),
        *table(columns, rows), "",
        f"![Certified attention over dense attention and over an offloaded cache]({NAME}.png)",
    ]  # fmt: skip
    save(out, NAME, result, "\n".join(lines))
    picture(result, out)


def picture(result: dict[str, Any], out: Path) -> None:
    with figure(out / f"{NAME}.png", 9, 4) as (_, axes):
        for spread in sorted({each["spread"] for each in result["cells"]}):
            mine = [each for each in result["cells"] if each["spread"] == spread]
            for name, style in (("dense", "-"), ("offload", "--")):
                low, middle, high = zip(*(each["over"][name] for each in mine), strict=True)
                contexts = [each["context"] for each in mine]
                (line,) = axes.plot(contexts, middle, style, marker="o", label=f"over {name}, spread {spread:g}")
                axes.fill_between(contexts, low, high, alpha=0.2, color=line.get_color())
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens of context")
        axes.set_ylabel("time over the other's")
        axes.legend(fontsize=7)


def _spread(values: list[float] | None) -> str:
    return "-" if values is None else " / ".join(f"{value:g}" for value in values)


def main() -> None:
    options: dict[str, dict[str, Any]] = {
        "--contexts": {"type": int, "nargs": "+", "default": [8192, 16384, 32768, 65536]},
        "--spreads": {"type": float, "nargs": "+", "default": [1.0, 2.0, 4.0], "help": "standard deviation of logits"},
        "--epsilon": {"type": float, "default": 0.05},
        "--delta": {"type": float, "default": 0.1},
        "--compression": {"type": int, "default": 16, "help": "context over what is kept of it"},
        "--heads": {"type": int, "default": 8, "help": "KV heads"},
        "--group": {"type": int, "default": 4, "help": "queries of each"},
        "--dim": {"type": int, "default": 128, "help": "head size"},
        "--page-tokens": {"type": int, "default": 32, "help": "of the arena"},
        "--repeats": {"type": int, "default": 30},
        "--dry": {"action": "store_true", "help": "a tiny case, through Triton's interpreter"},
    }
    command(__doc__, measure, render, options)


if __name__ == "__main__":
    main()
