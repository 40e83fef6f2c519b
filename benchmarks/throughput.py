"""Tokens per second on a GPU at one memory budget: plain vLLM, its CPU offload, lock-step and staggered drafting.

``python -m benchmarks.throughput --model FOLDER`` on a machine with a GPU and vLLM writes JSON, table and plot into
docs/results/; ``--render FILE`` makes them of a JSON. Every engine has a process of its own, the same weights and the
same bytes for KV (``--kv-gib``, the arena included); ratios are of medians over ``--repeats`` runs in that process.
"short" is stock vLLM over contexts of ratio x length: what a lossy compressor alone would reach at best. "uniform" is
staggered drafting with equal counts, "packed" with pages of ``--page-format``; all of these draft at a fixed
length. With lengths that adapt, and everything else at its default as well: "auto", mode auto; "always", mode draft;
"residual", as "always" with reloads of what the arena does not hold;
"unshared", as "always" without shared verifies (give ``--common``, the share of every prompt that is the same; the
prefix cache is on then). Beside each figure stands what a byte model predicts for it (``predicted``), but for auto.

``--acceptance P`` replaces the verifier's comparison by a coin (a draft is accepted with chance P): for random weights.
"""

import argparse
import datetime
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.report import RESULTS, figure, save, table
from scheduler.byte_model import Load, Machine, Rounds, lockstep, plain, room_plain, room_short, short, staggered
from vericache.plan.geometry import read_geometry

if TYPE_CHECKING:
    from benchmarks.throughput_run import Job

FIXED = ("lockstep", "staggered", "uniform", "packed")
ADAPTIVE = ("auto", "always", "unshared", "residual")
DRAFTING = (*FIXED, *ADAPTIVE)
RUN = "benchmarks.throughput_run"
VARIANTS = ("plain", "offload", "short", *DRAFTING)


def options(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model (with --dummy: its config is enough)")
    parser.add_argument("--name", default="throughput", help="of the result files")
    parser.add_argument("--dummy", action="store_true", help="random weights and prompts")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS[:5]))
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=7680)
    parser.add_argument("--tokens", type=int, default=256, help="output tokens per request")
    parser.add_argument("--common", type=float, help="share of all prompts that is the same; the prefix cache is on")
    parser.add_argument("--kv-gib", type=float, default=1.5, help="device memory for KV, the arena included")
    parser.add_argument("--host-gib", type=float, default=12.0)
    parser.add_argument("--compressor", default="snapkv")
    parser.add_argument("--counts", default="per_head")
    parser.add_argument("--ratio", type=float, default=0.25)
    parser.add_argument("--draft-length", type=int, default=25)
    parser.add_argument("--arena-fraction", type=float, default=0.5)
    parser.add_argument(
        "--auto-arena-fraction",
        type=share,
        default="auto",
        help="of mode auto (default: auto, what the engine chooses)",
    )
    parser.add_argument("--expected-context", type=int, help="setting of mode auto (default: not set)")
    parser.add_argument("--auto-page-format", default="plain", help="of mode auto")
    parser.add_argument("--page-tokens", type=int, default=32)
    parser.add_argument("--page-format", default="turboquant4", help='of the variant "packed"')
    parser.add_argument("--backend", default="FLASH_ATTN")
    parser.add_argument("--acceptance", type=float, help="accept each draft with this chance instead of comparing")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prefill-sample", type=int, help="prompts whose prefill alone is timed (default: all)")
    parser.add_argument("--at-once", type=int, default=2, help="engines that may exist at a time (they run in turn)")
    parser.add_argument("--hbm-tb-s", type=float, default=4.2, help="memory bandwidth for the prediction")
    parser.add_argument("--link-gb-s", type=float, default=50.0, help="link bandwidth for the prediction")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--render", type=Path, metavar="FILE", help="only make table and plot of this JSON")
    return parser


def share(text: str) -> float | str:
    return text if text == "auto" else float(text)


def arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    args = parser.parse_args(argv)
    if args.model is None and args.render is None:
        parser.error("--model is needed")
    return args


def prompts(args: argparse.Namespace) -> list[list[int]]:
    """One per request, all with the same beginning where they have something in common."""
    found = texts(args)
    same = int((args.common or 0) * args.prompt_tokens)
    return [found[0][:same] + one[same:] for one in found]


def texts(args: argparse.Namespace) -> list[list[int]]:
    """Random tokens, or the bundled texts one after the other, each request beginning with another one."""
    if args.dummy:
        rng = random.Random(0)
        return [[rng.randrange(10, 30_000) for _ in range(args.prompt_tokens)] for _ in range(args.requests)]
    from transformers import AutoTokenizer

    from vericache.demo.prompts import PROMPTS, load

    every = list(load(list(PROMPTS), AutoTokenizer.from_pretrained(args.model)).values())
    found = []
    for i in range(args.requests):
        order = random.Random(i).sample(every, len(every))
        found.append([t for text in order for t in text][: args.prompt_tokens])
    return found


def job(args: argparse.Namespace, variant: str, texts: list[list[int]], lock: str) -> "Job":
    from benchmarks.throughput_run import Job

    window = 4 * args.draft_length  # where the link is the limit, rounds draft longer than they aim at
    longest = args.prompt_tokens + args.tokens + 8
    verify_tokens = 4 * (window + 1)
    engine: dict[str, Any] = {
        "dtype": "bfloat16", "max_model_len": longest, "max_num_seqs": args.requests + 1,
        "max_num_batched_tokens": 8192, "kv_cache_memory_bytes": int(args.kv_gib * 2**30),
        "enable_prefix_caching": args.common is not None,
        "skip_tokenizer_init": args.compressor != "kvzip" or args.dummy,
        "gpu_memory_utilization": 0.4, "attention_config": {"backend": args.backend},
        "kernel_config": {"enable_jit_warmup": False},
        "compilation_config": {
            "mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": capture_sizes(args.requests, verify_tokens),
        },
    }  # fmt: skip
    if args.dummy:
        engine["load_format"] = "dummy"
    settings: dict[str, Any] | None = None
    if variant in ADAPTIVE:
        settings = adaptive(args, variant)
    elif variant in FIXED:
        settings = {
            "mode": "draft", "draft_policy": "fixed",
            "min_prompt_tokens": min(1024, args.prompt_tokens), "compressor": args.compressor,
            "policy": "lockstep" if variant == "lockstep" else "staggered",
            "counts": "uniform" if variant == "uniform" else args.counts,
            "page_format": args.page_format if variant == "packed" else "plain", "ratio": args.ratio,
            "draft_length": args.draft_length, "window": window,
            "verify_tokens": verify_tokens, "arena_fraction": args.arena_fraction, "page_tokens": args.page_tokens,
            "host_memory_gib": args.host_gib, "trace_iterations": 0,
        }  # fmt: skip
    elif variant == "offload":
        engine["kv_offloading_size"] = args.host_gib
    elif variant == "short":
        texts = [t[: int(args.ratio * len(t))] for t in texts]
    sample = args.prefill_sample or args.requests
    return Job(str(args.model), texts, args.tokens, engine, settings, args.acceptance, args.repeats, sample, lock)


def adaptive(args: argparse.Namespace, variant: str) -> dict[str, Any]:
    """As a user gets it: window, cap of verify tokens and draft policy are left at their defaults."""
    auto = variant == "auto"
    return {
        "mode": "auto" if auto else "draft", "shared_verifies": "off" if variant == "unshared" else "on",
        "min_prompt_tokens": min(1024, args.prompt_tokens), "compressor": args.compressor, "counts": args.counts,
        "ratio": args.ratio, "draft_length": args.draft_length,
        "arena_fraction": args.auto_arena_fraction if auto else args.arena_fraction,
        "expected_context": args.expected_context if auto else None,
        "page_tokens": args.page_tokens, "page_format": args.auto_page_format if auto else "plain",
        "residual_reload": "on" if variant == "residual" else "off",
        "host_memory_gib": args.host_gib, "trace_iterations": 0,
    }  # fmt: skip


def capture_sizes(requests: int, verify_tokens: int) -> list[int]:
    """Graph sizes for draft-only steps, and for steps with verify rows."""
    most = requests + verify_tokens
    sizes = {1, 2, 4, *range(8, most, 8 if most <= 128 else 16), requests, most}
    return sorted(s for s in sizes if s <= most)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Saved after every engine: a run may be cut short."""
    given_texts = prompts(args)
    results: dict[str, Any] = {}
    found: dict[str, Any] = {**described(args), "engines": results}
    with tempfile.TemporaryDirectory() as folder:
        waiting = [(v, Path(folder) / f"{v}.in", Path(folder) / f"{v}.out") for v in args.variants]
        for variant, given, _ in waiting:
            given.write_text(json.dumps(asdict(job(args, variant, given_texts, f"{folder}/lock"))))
        for some in batches(waiting, args.at_once):
            running = [(v, out, start(RUN, given, out, log_of(args, v))) for v, given, out in some]
            for variant, out, process in running:
                if process.wait():
                    raise SystemExit(f"the engine of {variant!r} failed, see {log_of(args, variant)}")
                results[variant] = json.loads(out.read_text())
                print(variant, json.dumps(results[variant]["runs"]), flush=True)
                found["gpu"] = results[variant]["gpu"]
                save(args.out, args.name, found, "")
    return found


def batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    for i in range(0, len(items), size):
        yield items[i : i + size]


def described(args: argparse.Namespace) -> dict[str, Any]:
    """What a result says about how it was measured."""
    options = {k: v for k, v in vars(args).items() if not isinstance(v, Path) and k != "render"}
    return {
        "date": datetime.date.today().isoformat(),
        "options": {**options, "model": args.model.name},
        "geometry": sizes(args.model),
    }


def log_of(args: argparse.Namespace, variant: str) -> Path:
    return Path(args.out) / f"{args.name}-{variant}.log"


def start(module: str, given: Path, out: Path, log: Path) -> "subprocess.Popen[bytes]":
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(given), str(out)],
            env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of the weights in bfloat16 and of one token's KV, from the model's config."""
    found = read_geometry(folder)
    return {"weights": found.weight_bytes, "kv_per_token": found.kv_per_token}


def predicted(result: dict[str, Any], variant: str) -> float | None:
    """Decoded tokens per second by the byte model; for drafting, with the measured tokens per round and size. None
    where it knows no answer: some requests draft and others do not, or a prefix is loaded for several."""
    if variant == "auto" or result["options"].get("common") is not None:
        return None
    options, shape = result["options"], result["geometry"]
    budget, tail = options["kv_gib"] * 2**30, shape["kv_per_token"] * options["tokens"] / 2
    context = shape["kv_per_token"] * options["prompt_tokens"]
    machine = Machine(shape["weights"] + budget, options["hbm_tb_s"] * 1e12, options["link_gb_s"] * 1e9)
    full = context + tail
    if variant not in DRAFTING:
        load = Load(shape["weights"], full, options["ratio"] * context + tail)
        serve, room = (short, room_short) if variant == "short" else (plain, room_plain)
        return serve(machine, load, min(options["requests"], room(machine, load))).tokens_per_s
    run = result["engines"][variant]["runs"][0]
    saved = options["ratio"] * context if variant == "residual" else 0.0
    load = Load(shape["weights"], full, full * run["compressed_fraction"] + tail, saved)
    gained = run["tokens_per_round"]  # where the link is the limit, rounds draft longer than they aim at
    rounds = Rounds(max(options["draft_length"], math.ceil(gained) - 1), gained)
    rows = int(min(options["requests"], budget * options["arena_fraction"] // load.kept))
    if variant == "lockstep":
        rows = int(min(rows, budget * (1 - options["arena_fraction"]) // full))
        return lockstep(machine, load, rounds, rows).tokens_per_s
    return staggered(machine, load, rounds, rows).tokens_per_s


def render(result: dict[str, Any], out: Path) -> None:
    """The tables and the plot of a result."""
    options, engines = result["options"], result["engines"]
    rates = {v: sorted(r["decode_tokens_per_s"] for r in e["runs"]) for v, e in engines.items()}
    base = median(rates["plain"]) if "plain" in rates else None
    rows, steps = [], []
    for variant, engine in engines.items():
        runs = engine["runs"]
        middle = sorted(runs, key=lambda r: r["decode_tokens_per_s"])[len(runs) // 2]
        rate = rates[variant]
        rows.append([
            variant, f"{rate[0]:.0f} / {median(rate):.0f} / {rate[-1]:.0f}",
            "-" if (expected := predicted(result, variant)) is None else f"{expected:.0f}",
            f"{median(rate) / base:.2f}" if base else "-", f"{middle['tokens_per_s']:.0f}",
            max((s["most_rows"] for s in middle["steps"].values() if "most_rows" in s), default="-"),
            middle.get("tokens_per_round", "-"), middle.get("compressed_fraction", "-"),
            middle.get("steady_link") or "-",
            middle.get("ring_pages", "-") if "link_busy" in middle else "-", *moves(middle), *loaded(middle),
        ])  # fmt: skip
        for kind, step in sorted(middle["steps"].items()):
            steps.append([variant, kind, step["steps"], step["rows"], step["wall_ms"], step["graph_ms"] or "-",
                          step["wall_total_s"]])  # fmt: skip
    shape = result["geometry"]
    full = shape["kv_per_token"] * options["prompt_tokens"]
    chance = options["acceptance"]
    lines = [
        f"# Throughput: {options['model']}", "",
        f"{result['gpu']}, {result['date']}; {options['requests']} requests of {options['prompt_tokens']} tokens"
        + (f" (the first {options['common']:.0%} common)" if options.get("common") else "")
        + f", {options['tokens']} output tokens each, bfloat16, {options['backend']}, full graphs; "
        f"{options['kv_gib']} GiB for KV (M / H = "
        f"{shape['weights'] / (shape['weights'] + options['kv_gib'] * 2**30):.2f}, room for "
        f"{options['kv_gib'] * 2**30 / full:.1f} full contexts); {options['compressor']}, {options['counts']}, ratio "
        f"{options['ratio']}, x = {options['draft_length']}; {options['repeats']} runs each. "
        + ("Acceptance as the model decides." if chance is None else
           f"**Synthetic acceptance**: each draft is accepted with chance {chance}, weights are random."), "",
        *table(["engine", "decoded tokens/s, min / median / max", "predicted", "ratio", "tokens/s with prefill",
                "rows at once", "tokens per round", "c", "link busy", "pages in ring, peak", *MOVES, *LOADED], rows),
        "",
        "## Steps", "",
        *table(["engine", "step", "number", "rows", "wall ms", "GPU ms (graph)", "s in all"], steps, left=2), "",
        "`python -m benchmarks.throughput`. Decoded: output without each request's first token, over the time beyond a "
        "run that makes only that one. Wall and GPU times are medians; a step without a graph time ran eagerly.",
    ]  # fmt: skip
    save(out, options["name"], result, "\n".join(lines))
    with figure(out / f"{options['name']}.png", 8, 0.6 * len(rates) + 1.2) as (_, axes):
        places = range(len(rates))
        axes.barh([p - 0.2 for p in places], [median(r) for r in rates.values()], 0.38, label="measured")
        model = [(p + 0.2, value) for p, v in zip(places, rates, strict=True) if (value := predicted(result, v))]
        axes.barh([p for p, _ in model], [value for _, value in model], 0.38, label="byte model")
        axes.set_yticks(list(places), list(rates))
        axes.invert_yaxis()
        axes.set_xlabel(f"decoded tokens per second, {options['model']}, {result['gpu']}")
        axes.legend()


MOVES = ("drafting at the end", "demoted", "came back", "preempted")
LOADED = ("MB loaded per accepted token", "loads saved by sharing")


def moves(run: dict[str, Any]) -> list[Any]:
    """Requests drafting at their end; how often requests were demoted, came back and were preempted."""
    counts = run.get("counts")
    if counts is None:  # measured before they were counted
        return [run.get("drafting", "-"), "-", "-", "-"]
    if "drafting" not in run:
        return ["-", "-", "-", counts["preemptions"]]
    return [run["drafting"], counts["demotions"], counts["promotions"].get("room", 0), counts["preemptions"]]


def loaded(run: dict[str, Any]) -> list[str]:
    """Megabytes loaded per accepted token, and the share of reloads that others had brought already."""
    if not run.get("accepted_tokens"):
        return ["-", "-"]
    moved, found = run["load_bytes"], run["counts"]["shared_bytes"]
    return [f"{moved / run['accepted_tokens'] / 1e6:.2f}", f"{found / (moved + found):.0%}" if moved else "-"]


def main() -> None:
    args = arguments(options(__doc__))
    if args.render is not None:
        render(json.loads(args.render.read_text()), args.out)
        return
    render(measure(args), args.out)


if __name__ == "__main__":
    main()
