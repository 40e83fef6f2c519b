"""Plain vLLM, mode auto and always drafting over the number of requests at once, at one memory budget, on a GPU.

``python -m benchmarks.loads_gpu --model FOLDER --loads 1 4 16`` on a machine with a GPU and vLLM; the options are those
of ``benchmarks.throughput``. Each variant has one engine, all with the same bytes for KV, the arena included; at every
load its requests are submitted at once, with prompts that have nothing in common, and one engine runs after the other.
Tokens per second are all output over the time from the first request to the last, prompts included. "plain" is stock
vLLM; "auto" and "always" (mode draft) leave the scheduler's settings at their defaults, "auto" also the arena's share.
"""

import argparse
import json
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

from benchmarks.report import figure, save, table
from benchmarks.throughput import ADAPTIVE, MOVES, arguments, described, job, log_of, moves, options, prompts, start

if TYPE_CHECKING:
    from benchmarks.loads_gpu_run import Sweep

Running: TypeAlias = tuple[str, Path, "subprocess.Popen[bytes]"]  # variant, its results, its process
RUN = "benchmarks.loads_gpu_run"
VERIFY_TOKENS = 300  # default cap, beside which a step has a row per request
COLUMNS = (
    "requests", "engine", "tokens/s, min / median / max", "over plain, min / median / max", "decoded tokens/s",
    "rows at once", "tokens per round", "link busy", *MOVES, "step of plain rows: ms",
    "GPU ms",
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    found = options(__doc__)
    found.add_argument("--loads", type=int, nargs="+", default=[1, 2, 4, 8, 16, 30], help="numbers of requests")
    found.add_argument("--enough-s", type=float, default=30.0, help="no further repeat of a load after so many seconds")
    found.add_argument("--after", type=Path, metavar="FILE", help="engines start, but run only once this file exists")
    found.set_defaults(name="loads-gpu", variants=["plain", "auto", "always"])
    return found


def sweep(args: argparse.Namespace, variant: str, texts: list[list[int]], folder: Path) -> "Sweep":
    from benchmarks.loads_gpu_run import Sweep

    usual = job(args, variant, texts, str(folder / "lock"))
    usual.engine["compilation_config"]["cudagraph_capture_sizes"] = graph_sizes(args.requests)
    others = [v for v in args.variants if v != variant]
    ready = [str(folder / f"{v}.ready") for v in (variant, *others)]
    if args.after is not None:
        ready.append(str(args.after))
    return Sweep(**asdict(usual), loads=args.loads, enough_s=args.enough_s, ready=ready)


def graph_sizes(requests: int) -> list[int]:
    """Fine ones for few rows, since a step is padded to the next; up to a row each and all verify tokens."""
    most = requests + 1 + VERIFY_TOKENS
    return sorted({1, 2, 4, *range(8, 64, 8), *range(64, most, 16), most})


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All engines start at once. What the first loads gave is there even when time runs out, or an engine fails."""
    texts = prompts(args)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        running: list[Running] = []
        for variant in args.variants:
            given, out = folder / f"{variant}.in", folder / f"{variant}.out"
            given.write_text(json.dumps(asdict(sweep(args, variant, texts, folder))))
            running.append((variant, out, start(RUN, given, out, log_of(args, variant))))
        return follow(args, folder, running)


def follow(args: argparse.Namespace, folder: Path, running: list[Running]) -> dict[str, Any]:
    """Save what there is again and again until all have ended."""
    while True:
        alive = [process for _, _, process in running if process.poll() is None]
        for variant, _, process in running:
            if process.returncode:
                (folder / f"{variant}.ready").touch()  # it failed: the others need not wait for it
        engines = {v: found for v, out, _ in running if (found := read(out)) is not None}
        result = {**described(args), "gpu": gpu(engines), "engines": engines}
        if engines:
            save(args.out, args.name, result, "")
        if not alive:
            break
        with suppress(subprocess.TimeoutExpired):
            alive[0].wait(3)
    for variant, _, process in running:
        if process.returncode:
            print(f"the engine of {variant!r} failed, see {log_of(args, variant)}", flush=True)
    return result


def read(out: Path) -> dict[str, Any] | None:
    """What an engine has measured so far."""
    if not out.exists():
        return None
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def gpu(engines: dict[str, Any]) -> str:
    return next((e["gpu"] for e in engines.values()), "no engine started")


def rates(engine: dict[str, Any]) -> dict[int, list[float]]:
    """Tokens per second by load, sorted."""
    return {int(load): sorted(r["tokens_per_s"] for r in at["runs"]) for load, at in engine["loads"].items()}


def spread(values: list[float], digits: int) -> str:
    ordered = sorted(values)
    return " / ".join(f"{v:.{digits}f}" for v in (ordered[0], median(ordered), ordered[-1]))


def rows_of(engines: dict[str, Any]) -> list[list[Any]]:
    plain = rates(engines["plain"]) if "plain" in engines else {}
    found = []
    for load in sorted({load for engine in engines.values() for load in rates(engine)}):
        for variant, engine in engines.items():
            if (own := rates(engine).get(load)) is None:
                continue
            runs = sorted(engine["loads"][str(load)]["runs"], key=lambda r: r["tokens_per_s"])
            middle = runs[len(runs) // 2]
            base = plain.get(load)
            alone = middle["steps"].get("plain", {})
            rows = [s["most_rows"] for s in middle["steps"].values() if "most_rows" in s]
            found.append([
                load, variant, spread(own, 0), spread([r / median(base) for r in own], 2) if base else "-",
                f"{middle['decode_tokens_per_s']:.0f}", max(rows, default="-"), middle.get("tokens_per_round", "-"),
                middle.get("link_busy", "-"), *moves(middle), alone.get("wall_ms", "-"), alone.get("graph_ms") or "-",
            ])  # fmt: skip
    return found


def render(result: dict[str, Any], out: Path) -> None:
    options, engines = result["options"], result["engines"]
    full = (
        options["kv_gib"]
        * 2**30
        / (result["geometry"]["kv_per_token"] * (options["prompt_tokens"] + options["tokens"]))
    )
    plain = rates(engines["plain"]) if "plain" in engines else {}
    lows = [
        f"{median(own) / median(plain[load]):.2f}x at {load}"
        for load, own in rates(engines.get("auto", {"loads": {}})).items() if load in plain
    ]  # fmt: skip
    left = [
        f"{v} at {load}: {at['left_over']}"
        for v, e in engines.items() for load, at in e["loads"].items() if at["left_over"]
    ]  # fmt: skip
    chance = options["acceptance"]
    asked = options.get("auto_arena_fraction") or options["arena_fraction"]
    chosen = engines.get("auto", {}).get("arena")
    share = f"{asked:g}" if not isinstance(asked, str) else f"{chosen['fraction']:.3f}" if chosen else asked
    lines = [
        f"# Speed over load: {options['model']}", "", str(__doc__).strip(), "",
        f"{result['gpu']}, {result['date']}; prompts of {options['prompt_tokens']} tokens, {options['tokens']} output "
        f"tokens each, bfloat16, {options['backend']}, full graphs; {options['kv_gib']} GiB for KV, room for "
        f"{full:.1f} full contexts; {options['compressor']}, {options['counts']}, ratio {options['ratio']}; arena "
        f"{options['arena_fraction']:g} of the memory for KV (auto: {share}, pages {options['auto_page_format']}). "
        + ("Acceptance as the model decides." if chance is None else
           f"**Synthetic acceptance**: each draft is accepted with chance {chance}, weights are random."), "",
        *([f"The arena of mode auto: {chosen['why']}.", ""] if chosen else []),
        f"Mode auto over plain vLLM, medians: {', '.join(lows) or 'not measured'}.", "",
        f"![Speed over load]({options['name']}.png)", "",
        *table(COLUMNS, rows_of(engines), 2), "",
        "Decoded: without each request's first token, over the time beyond the prompts', of which some were timed "
        "alone. Demoted and came back: how often, not how many. A step of plain rows: median of those without drafts, "
        "verifies and prompts; what an engine that drafts adds to them slows down everyone.",
        *(["", "Left over after a load: " + "; ".join(left)] if left else []),
    ]  # fmt: skip
    save(out, options["name"], result, "\n".join(lines))
    draw(result, full, out / f"{options['name']}.png")


def draw(result: dict[str, Any], full: float, file: Path) -> None:
    with figure(file, 7, 4) as (_, axes):
        for variant, engine in result["engines"].items():
            by_load = sorted(rates(engine).items())
            loads, middles = [load for load, _ in by_load], [median(own) for _, own in by_load]
            below = [m - own[0] for m, (_, own) in zip(middles, by_load, strict=True)]
            above = [own[-1] - m for m, (_, own) in zip(middles, by_load, strict=True)]
            label = "always draft" if variant == "always" else variant
            axes.errorbar(loads, middles, yerr=[below, above], marker="o", capsize=3, label=label)
        axes.axvline(full, color="gray", linestyle=":", label="plain vLLM is full")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("requests at once")
        axes.set_ylabel("tokens per second, prompts included")
        axes.set_title(f"{result['options']['model']}, {result['gpu']}", fontsize=9)
        axes.legend()


def main() -> None:
    args = arguments(parser())
    if args.render is not None:
        render(json.loads(args.render.read_text()), args.out)
        return
    args.loads = sorted(set(args.loads))
    args.requests = args.loads[-1]
    if unknown := set(args.variants) - {"plain", *ADAPTIVE}:
        raise SystemExit(
            f"--variants: {', '.join(sorted(unknown))} not in a sweep, choose plain, {', '.join(ADAPTIVE)}"
        )
    render(measure(args), args.out)


if __name__ == "__main__":
    main()
