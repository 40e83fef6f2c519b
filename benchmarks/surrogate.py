"""How good is a surrogate? ``python -m benchmarks.surrogate``: accepted drafts per round of kvzap, beside KVzip, whose
scores it predicts, and SnapKV, on the bundled prompts and model (greedy, float32). Writes JSON and a table into
docs/results/.

Every prompt is held out: the prompts are dealt into groups, and a group is drafted with a surrogate (ridge) that was
trained on the others. As in ``benchmarks.acceptance`` only full rounds count, and the pooled figure leaves out outputs
that loop.
"""

import argparse
import gc
import os
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.acceptance_engine import Measured, measure, pooled
from benchmarks.report import RESULTS, machine, save, table
from compressors import Surrogate
from vericache.demo import model
from vericache.demo.prompts import PROMPTS, load
from vericache.demo.worker import ENVIRONMENT
from vericache.surrogate import file
from vericache.surrogate.metrics import Agreement
from vericache.surrogate.ridge import Ridge

NAME = "surrogate"
OTHERS = (("kvzip", "per_head"), ("snapkv", "per_head"), ("snapkv", "uniform"))

Seen = list[tuple[Tensor, Tensor]]  # of a prompt, layer by layer: features [m, F], KVzip's log scores [H, m]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--ratio", type=float, default=0.25)
    parser.add_argument("--draft-length", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=128, help="output tokens per prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(args.threads))
    torch.set_num_threads(args.threads)  # torch is loaded by now and has read the environment
    from transformers import AutoTokenizer

    console, folder = Console(), model.prepare()
    prompts = load(list(PROMPTS), AutoTokenizer.from_pretrained(folder))
    with console.status(f"KVzip's scores of {len(prompts)} prompts"):
        seen, fingerprint = recorded(folder, prompts)
    gc.collect()  # the engine
    agreement, results = Agreement(), dict[str, list[Measured]]()
    by_prompt = dict[str, Measured]()
    for group in (list(prompts)[i :: args.groups] for i in range(args.groups)):
        surrogate = trained([s for name, s in seen.items() if name not in group])
        for name in group:
            predicted = [surrogate.predict(layer, features) for layer, (features, _) in enumerate(seen[name])]
            agreement.add(torch.stack(predicted), torch.stack([log_scores for _, log_scores in seen[name]]))
        with tempfile.TemporaryDirectory() as place, console.status(f"kvzap: {', '.join(group)}"):
            path = Path(place) / "kvzap.safetensors"
            file.save(path, file.Stored(Ridge.method, surrogate, fingerprint))
            (measured,) = accepted(folder, {n: prompts[n] for n in group}, [("kvzap", "per_head")], args, path)
            by_prompt |= {m.prompt: m for m in measured}
    results["kvzap per_head"] = [by_prompt[name] for name in prompts]
    with console.status(f"{', '.join(' '.join(o) for o in OTHERS)}: {len(prompts)} prompts"):
        for (compressor, counts), found in zip(OTHERS, accepted(folder, prompts, OTHERS, args), strict=True):
            results[f"{compressor} {counts}"] = found
    write(results, agreement, args)
    for name, measured in results.items():
        console.print(f"{name}: {pooled(measured):.1f} accepted per round")
    return 0


def recorded(folder: Path, prompts: Mapping[str, Sequence[int]]) -> tuple[dict[str, Seen], str]:
    """What a surrogate sees of each prompt, and the model's fingerprint."""
    from vericache.demo.run import ENGINE
    from vericache.surrogate.scoring import scores

    seen = {name: Seen() for name in prompts}
    longest = max(len(ids) for ids in prompts.values())
    engine = {"dtype": ENGINE["dtype"], "kv_cache_memory_bytes": 4 << 30}
    with scores(str(folder), longest, engine) as running:
        for name, ids in prompts.items():
            running.of(ids, lambda _, *layer, to=seen[name]: to.append(layer))
        return seen, running.fingerprint


def trained(texts: Sequence[Seen]) -> Surrogate:
    fitting = Ridge()
    for text in texts:
        for layer, (features, log_scores) in enumerate(text):
            fitting.add(layer, features, log_scores)
    return fitting.fit()


def accepted(
    folder: Path,
    prompts: Mapping[str, Sequence[int]],
    methods: Sequence[tuple[str, str]],
    args: argparse.Namespace,
    surrogate: Path | None = None,
) -> list[list[Measured]]:
    """One list per method, from an engine of its own."""
    from benchmarks.engine import LiveEngine
    from vericache.demo.run import ENGINE

    arguments = {**ENGINE, "kv_cache_memory_bytes": 6 << 30, "enable_prefix_caching": True}
    settings = {"min_prompt_tokens": 512, "surrogate": None if surrogate is None else str(surrogate)}
    engine = LiveEngine(folder, arguments, settings)
    options = {"ratio": args.ratio, "draft_length": args.draft_length}
    found = [measure(engine, prompts, compressor, counts, args.tokens, **options) for compressor, counts in methods]
    engine.close()
    return found


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


def write(results: Mapping[str, Sequence[Measured]], agreement: Agreement, args: argparse.Namespace) -> None:
    layers = agreement.layers()
    mean = {name: round(sum(row[name] for row in layers) / len(layers), 3) for name in layers[0]}
    threshold = {name: round(value, 3) for name, value in agreement.pooled().items()}
    report: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "options": {k: v for k, v in vars(args).items() if k != "out"},
        "pooled": {k: round(pooled(ms), 2) for k, ms in results.items()},
        "agreement": {"layers": layers, "mean": mean, "one_threshold": threshold, "tokens": agreement.tokens},
        "results": [m.__dict__ for ms in results.values() for m in ms],
    }
    header = ["prompt", "distinct 4-grams", *results]
    per_head = ["every head by itself", *mean.values()]
    pooled_heads = ["one threshold", *(threshold.get(name, "") for name in mean)]
    text = [
        "# A surrogate of KVzip",
        "",
        f"`python -m benchmarks.surrogate`, {report['date']}, {machine()}.",
        f"SmolLM2-135M-Instruct, float32, greedy, {args.tokens} output tokens per prompt, ratio {args.ratio},",
        f"drafts per round x = {args.draft_length}. Measured in the engine; only rounds with at least x drafts count.",
        f"kvzap: ridge on {args.groups - 1} of {args.groups} groups of the prompts, measured on the prompts of the",
        "group left out. It needs no forward pass; KVzip needs one over the context.",
        "",
        *table(header, rows(results)),
        "",
        f"Predicted scores against KVzip's, {agreement.tokens} held-out tokens, mean over layers and heads:",
        "",
        *table(["", *mean], [per_head, pooled_heads]),
        "",
        "overlap_c: the share of KVzip's largest c of the scores that is among the largest c predicted.",
        "",
    ]
    save(args.out, NAME, report, "\n".join(text))


if __name__ == "__main__":
    raise SystemExit(main())
