"""How many drafts survive? ``python -m benchmarks.acceptance``: accepted drafts per round, by compressor, on the
bundled prompts and the bundled model (greedy, float32). Writes JSON, a table and a plot into docs/results/.

Only full rounds count (at least ``--draft-length`` drafts): shorter ones are cut by the end of the output. The pooled
figure leaves out prompts whose output loops, since any drafter is right there.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import RESULTS, figure, machine, save, table
from vericache.demo.worker import ENVIRONMENT

if TYPE_CHECKING:
    from benchmarks.engine import LiveEngine

LOOPS_BELOW = 0.3  # share of distinct 4-grams in the output


@dataclass(frozen=True)
class Measured:
    """One prompt with one method: full rounds as (drafted, accepted)."""

    prompt: str
    method: str
    rounds: list[tuple[int, int]]
    distinct: float  # share of distinct 4-grams of the output
    kept: float  # compressed bytes over full KV bytes; where pages are simulated, what they would be

    @property
    def accepted(self) -> list[int]:
        return [a for _, a in self.rounds]

    @property
    def loops(self) -> bool:
        return self.distinct < LOOPS_BELOW


def distinct_4_grams(ids: Sequence[int]) -> float:
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return len(set(grams)) / max(1, len(grams))


def measure(
    engine: "LiveEngine",
    prompts: Mapping[str, Sequence[int]],
    compressor: str,
    counts: str,
    tokens: int,
    **settings: Any,
) -> list[Measured]:
    """All prompts at once with one method; ``settings`` as in ``VeriCacheConfig`` (``draft_length`` is needed)."""
    from vllm import SamplingParams

    from benchmarks.engine import summaries

    engine.configure(compressor=compressor, counts=counts, **settings)
    outputs = engine.generate(list(prompts.values()), SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    found = []
    for name, output, report in zip(prompts, outputs, summaries(outputs), strict=True):
        pairs = zip(report["drafted_per_round"], report["accepted_per_round"], strict=True)
        rounds = [(k, a) for k, a in pairs if k >= settings["draft_length"]]
        distinct = distinct_4_grams(output.outputs[0].token_ids)
        kept = report.get("simulated_fraction", report["compressed_fraction"])
        found.append(Measured(name, f"{compressor} {counts}", rounds, distinct, kept))
    return found


def pooled(results: Sequence[Measured]) -> float:
    """Accepted drafts per full round over the prompts that do not loop."""
    accepted = [a for m in results if not m.loops for a in m.accepted]
    return sum(accepted) / max(1, len(accepted))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    methods = ["kvzip:per_head", "kvzip:per_layer", "kvzip:uniform", "snapkv:uniform", "streaming_llm:uniform"]
    parser.add_argument("--methods", nargs="+", default=[*methods, "random:uniform"], metavar="COMPRESSOR:COUNTS")
    parser.add_argument("--ratio", type=float, default=0.25)
    parser.add_argument("--draft-length", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=128, help="output tokens per prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of acceptance.json, .md and .png")
    args = parser.parse_args(argv)
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(args.threads))
    torch.set_num_threads(args.threads)  # torch is loaded by now and has read the environment
    from benchmarks.engine import LiveEngine  # imports vLLM, which reads the environment
    from vericache.demo import model
    from vericache.demo.prompts import PROMPTS, load
    from vericache.demo.run import ENGINE

    console = Console()
    arguments = {**ENGINE, "kv_cache_memory_bytes": 6 << 30, "enable_prefix_caching": True}
    engine = LiveEngine(model.prepare(), arguments, {"min_prompt_tokens": 512})
    prompts = load(list(PROMPTS), engine.tokenizer)
    results: dict[str, list[Measured]] = {}
    for method in args.methods:
        compressor, _, counts = method.partition(":")
        with console.status(f"{compressor} {counts}: {len(prompts)} prompts"):
            key = f"{compressor} {counts}"
            options = {"ratio": args.ratio, "draft_length": args.draft_length}
            results[key] = measure(engine, prompts, compressor, counts, args.tokens, **options)
        console.print(f"{key}: {pooled(results[key]):.1f} accepted per round")
    write(results, args, console)
    return 0


def rows(results: Mapping[str, Sequence[Measured]]) -> list[list[str]]:
    """Prompt by prompt: mean accepted per full round of each method, then the pooled line."""
    out = []
    for i, first in enumerate(next(iter(results.values()))):
        means = [m[i].accepted for m in results.values()]
        cells = [f"{sum(a) / len(a):.1f}" if a else "-" for a in means]
        out.append([first.prompt, f"{first.distinct:.2f}" + (" (loops)" if first.loops else ""), *cells])
    spread = [[a for m in ms if not m.loops for a in m.accepted] for ms in results.values()]
    out.append(["**pooled, without loops**", "", *(f"**{pooled(ms):.1f}**" for ms in results.values())])
    out.append(["min / median / max", "", *(f"{min(s)} / {median(s):.0f} / {max(s)}" for s in spread)])
    out.append(["KV kept", "", *(f"{sum(m.kept for m in ms) / len(ms):.1%}" for ms in results.values())])
    return out


def write(results: Mapping[str, Sequence[Measured]], args: argparse.Namespace, console: Console) -> None:
    header = ["prompt", "distinct 4-grams", *results]
    shown = Table(*header, title=f"accepted drafts per round of at least {args.draft_length}", title_justify="left")
    for row in rows(results):
        shown.add_row(*(cell.strip("*") for cell in row))
    console.print(shown)
    report = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "pooled": {k: round(pooled(ms), 2) for k, ms in results.items()},
        "results": [m.__dict__ for ms in results.values() for m in ms],
    }
    lines = [
        "# Accepted drafts per round",
        "",
        f"`python -m benchmarks.acceptance`, {report['date']}, {machine()}.",
        f"SmolLM2-135M-Instruct, float32, greedy, {args.tokens} output tokens per prompt, ratio {args.ratio},",
        f"drafts per round x = {args.draft_length}. Measured in the engine; only rounds with at least x drafts count.",
        f"An output loops when fewer than {LOOPS_BELOW:.0%} of its 4-grams are distinct.",
        "",
        *table(header, rows(results)),
        "",
        "![Accepted drafts per round, by prompt and method](acceptance.png)",
        "",
    ]
    save(args.out, "acceptance", report, "\n".join(lines))
    picture(results, args.draft_length, args.out / "acceptance.png")


def picture(results: Mapping[str, Sequence[Measured]], draft_length: int, file: Path) -> None:
    with figure(file, 9, 4.5) as (fig, axes):
        width = 0.8 / len(results)
        for i, (method, ms) in enumerate(results.items()):
            means = [sum(m.accepted) / max(1, len(m.accepted)) for m in ms]
            axes.bar([x + i * width for x in range(len(ms) + 1)], [*means, pooled(ms)], width, label=method)
        names = [m.prompt + (" (loops)" if m.loops else "") for m in next(iter(results.values()))]
        axes.set_xticks([x + 0.4 for x in range(len(names) + 1)], [*names, "pooled"], rotation=25, ha="right")
        axes.axhline(draft_length, color="black", linestyle="--", linewidth=1)
        axes.set_ylabel(f"accepted drafts per round (x = {draft_length})")
        fig.legend(loc="outside upper center", ncols=3, frameon=False)


if __name__ == "__main__":
    raise SystemExit(main())
