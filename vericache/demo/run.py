"""``vericache demo``: the same prompts on plain vLLM and on VeriCache, compared."""

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from vericache.demo import model, prompts, show
from vericache.demo.worker import Job, Result, run_in_process

BLOCK_TOKENS = 32
MAX_MODEL_LEN = 3072
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": MAX_MODEL_LEN,
    "enforce_eager": True,
    "block_size": BLOCK_TOKENS,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 1536,
    "enable_prefix_caching": False,
}


@dataclass(frozen=True)
class DemoOptions:
    """``kv_blocks``: device KV blocks VeriCache gets (the arena gets as much again)."""

    names: Sequence[str]
    max_tokens: int
    kv_blocks: int
    settings: dict[str, Any]
    model: Path | None


def run(options: DemoOptions, console: Console) -> dict[str, Any]:
    """Run both engines and return what ``--json`` writes."""
    with console.status("preparing the bundled model (once)"):
        folder = options.model or model.prepare()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    loaded = prompts.load(options.names, tokenizer)
    settings = {
        "mode": "draft",
        "draft_policy": "fixed",
        "min_prompt_tokens": 512,
        "trace_iterations": 100_000,
        **options.settings,
    }
    console.print(f"[bold]plain vLLM[/bold]: {len(loaded)} prompts of {[len(p) for p in loaded.values()]} tokens")
    plain = run_in_process(Job(str(folder), loaded, options.max_tokens, {**ENGINE, "kv_cache_memory_bytes": 2 << 30}))
    console.print("[bold]VeriCache[/bold]: the same prompts, drafting on compressed KV")
    budget = {**ENGINE, "kv_cache_memory_bytes": 2 << 30, "num_gpu_blocks_override": options.kv_blocks}
    ours = run_in_process(Job(str(folder), loaded, options.max_tokens, budget, settings))
    report = compare(loaded, plain, ours)
    report |= {"model": model.NAME, "dtype": ENGINE["dtype"], "settings": settings, "machine": machine()}
    return report


def compare(loaded: dict[str, list[int]], plain: Result, ours: Result) -> dict[str, Any]:
    requests = []
    for name, ids in loaded.items():
        summary = ours.summaries[name]
        requests.append(
            {
                "name": name,
                "identical": plain.tokens[name] == ours.tokens[name],
                "prompt_tokens": len(ids),
                "output_tokens": len(ours.tokens[name]),
                **summary,
            }
        )
    return {
        "identical": all(r["identical"] for r in requests),
        "requests": requests,
        "rounds": sum(r.get("rounds", 0) for r in requests),
        "reload_bytes": ours.moved.get("Load", 0),
        "offload_bytes": ours.moved.get("Offload", 0),
        "writeback_bytes": ours.moved.get("WriteBack", 0),
        "peak_kv_bytes": ours.peak_kv_bytes,
        "peak_kv_bytes_full_kv": plain.peak_kv_bytes,
        "iterations": ours.iterations,
        "seconds": round(ours.seconds, 2),
        "seconds_full_kv": round(plain.seconds, 2),
        "schedule": ours.schedule,
    }


def machine() -> str:
    import torch

    return f"{platform.machine()}, {torch.get_num_threads()} threads, CPU only, torch {torch.__version__}"


def main(options: DemoOptions, json_file: Path | None, png: Path | None) -> int:
    """Run, print, write the files. Returns the process's exit status: 0 when every request is identical."""
    console = Console()
    report = run(options, console)
    show.table(report, console)
    show.schedule_text(report["schedule"], console)
    if png is not None:
        png.parent.mkdir(parents=True, exist_ok=True)
        show.schedule_png(report["schedule"], png)
        console.print(f"schedule picture: {png}")
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report, indent=1) + "\n")
        console.print(f"report: {json_file}")
    return 0 if report["identical"] else 1
