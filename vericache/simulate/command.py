"""``vericache simulate``: what each way of serving makes of a load, by the scheduler's own code in simulated time."""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from scheduler.acceptance import chance_of
from scheduler.draft_length import POLICIES
from scheduler.simulated import PAGE, Setup
from scheduler.workload import Shape, trace
from vericache.errors import ConfigError
from vericache.plan.arguments import SHARE, SHARE_DRAFTS, add_machine, add_model, machine_of, weights_of
from vericache.plan.geometry import read_geometry
from vericache.simulate.show import draw_loads, draw_schedule, show, write_csv
from vericache.simulate.study import Load, Study, arrivals, variants, with_arena


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status. Raises ConfigError."""
    args = _parser().parse_args(list(arguments))
    try:
        setup, shape = _setup(args), _shape(args)
        loads = _loads(args, shape)
    except ValueError as error:  # the simulator's own checks
        raise ConfigError(str(error)) from None
    console = Console(stderr=args.json)
    runs, pictures = _run(args, setup, shape, loads, console)
    if args.csv is not None:
        write_csv(runs, args.csv)
    if args.png is not None:
        draw_loads(runs, full_rows(setup, shape), args.png)
    if args.gantt is not None:
        draw_schedule(pictures[args.gantt_mode], args.gantt)
    if args.json:
        Console().print_json(data={"runs": runs, "machine": vars(setup.machine), "rho": setup.machine.rho})
    else:
        show(runs, console)
    return 0


def full_rows(setup: Setup, shape: Shape) -> int:
    """Requests that plain vLLM holds at a time."""
    room = setup.machine.memory - setup.weights
    return max(1, int(room / (setup.token * (shape.prompt + shape.output / 2 + PAGE))))


def _run(
    args: argparse.Namespace, setup: Setup, shape: Shape, loads: Sequence[Load], console: Console
) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, str]]]]:
    runs, pictures = [], {}
    chosen = dict(variants(setup, args.ablations))
    if args.arena_fraction is None:
        chosen = {name: with_arena(one, shape) for name, one in chosen.items()}
    if args.modes:
        chosen = {name: s for name, s in chosen.items() if name in ("plain", *args.modes) or "," in name}
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(loads) * len(chosen))
        for load in loads:
            base = 0.0
            for name, one in chosen.items():
                done = progress.tasks[0].completed
                progress.update(task, description=name)
                study = Study(one, shape, args.seconds, args.engines, args.seed)
                outcome = study.run(load, lambda share, done=done: progress.update(task, completed=done + share))  # type: ignore[misc]
                progress.update(task, completed=done + 1)
                base = base or outcome.rate
                requests = load.requests if load.requests is not None else len(load.jobs)
                runs.append(
                    {"mode": name, "requests": requests, "speedup": round(outcome.rate / base, 4), **outcome.figures()}
                )
                pictures[name] = outcome.trace
    return runs, pictures


def _setup(args: argparse.Namespace) -> Setup:
    model = read_geometry(args.model) if args.model is not None else None
    if model is None and (args.weights_gb is None or args.kv_kb_per_token is None):
        raise ConfigError("expected --model, or --weights-gb and --kv-kb-per-token")
    weights = weights_of(args, model)
    token = args.kv_kb_per_token * 1e3 if args.kv_kb_per_token is not None or model is None else model.kv_per_token
    machine = machine_of(args)
    if machine.memory <= weights:
        raise ConfigError(f"the weights, {weights / 1e9:.1f} GB, leave nothing of {machine.memory / 1e9:.1f} GB")
    if args.arena_fraction is not None and not 0 <= args.arena_fraction < 1:
        raise ConfigError(f"--arena-fraction is {args.arena_fraction:g}, expected a share below 1")
    return Setup(
        machine, "auto", weights, float(token), args.ratio, args.packed, args.arena_fraction or 0.0,
        args.draft_length, args.draft_policy, args.window, args.verify_tokens,
    )  # fmt: skip


def _shape(args: argparse.Namespace) -> Shape:
    chance = chance_of(args.acceptance, SHARE_DRAFTS)
    return Shape(args.context, args.output_tokens, chance, args.spread, args.common_tokens, args.sharers)


def _loads(args: argparse.Namespace, shape: Shape) -> list[Load]:
    if args.trace is not None:
        with _opened(args.trace) as file:
            return [Load(None, trace((row for row in csv.reader(file) if row), shape.chance))]
    if args.arrivals_per_s is not None:
        return [Load(None, arrivals(shape, args.arrivals_per_s, args.seconds, args.seed))]
    return [Load(number) for number in args.requests]


def _opened(path: Path) -> Any:
    try:
        return path.open(newline="", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vericache simulate", description=__doc__)
    load = parser.add_argument_group("model and load")
    add_model(load)
    load.add_argument("--kv-kb-per-token", type=float, help="kB of one token's KV (default: the model's)")
    load.add_argument("--context", type=int, default=32768, help="tokens of a prompt (default 32768)")
    load.add_argument("--output-tokens", type=int, default=512, help="tokens of an output (default 512)")
    load.add_argument("--spread", type=float, default=0.25, help="of both, and of wrong drafts (default 0.25)")
    load.add_argument("--common-tokens", type=int, default=0, help="that prompts about one document begin with")
    load.add_argument("--sharers", type=int, default=1, help="requests about one document, one after the other")
    load.add_argument(
        "--requests", type=int, nargs="+", default=[8, 32, 128], help="at a time, each replaced when it ends"
    )
    load.add_argument("--arrivals-per-s", type=float, help="instead: requests arrive at random")
    load.add_argument(
        "--trace", type=Path, metavar="CSV", help="instead: arrival (s), prompt, output [, chance] per row"
    )
    load.add_argument("--seconds", type=float, default=30.0, help="of simulated time that count (default 30)")
    load.add_argument("--engines", type=int, default=1, help="that requests are dealt out to (default 1)")
    load.add_argument("--seed", type=int, default=0)
    machine = parser.add_argument_group("machine")
    add_machine(machine)
    draft = parser.add_argument_group("drafting")
    draft.add_argument(
        "--modes", nargs="+", choices=("lockstep", "staggered", "auto"), help="beside plain (default: all)"
    )
    draft.add_argument("--ratio", type=float, default=0.25)
    draft.add_argument("--packed", type=float, default=1.0, help="bytes of a kept token over those of a full one")
    draft.add_argument(
        "--arena-fraction", type=float, help="of every mode (default: for each what the byte model finds best)"
    )
    draft.add_argument("--draft-length", type=int, default=25)
    draft.add_argument("--draft-policy", choices=POLICIES, default="ema")
    draft.add_argument("--window", type=int, default=64)
    draft.add_argument("--verify-tokens", type=int, default=300)
    draft.add_argument(
        "--acceptance", type=float, default=SHARE, help=f"share of {SHARE_DRAFTS} drafts accepted (default {SHARE})"
    )
    draft.add_argument(
        "--ablations",
        action="store_true",
        help="also with a fixed draft length, by bandit, each on a reload of its own, and without what is kept in it",
    )
    out = parser.add_argument_group("results")
    out.add_argument("--json", action="store_true", help="print the figures as JSON")
    out.add_argument("--csv", type=Path, metavar="FILE")
    out.add_argument("--png", type=Path, metavar="FILE", help="draw speed over load")
    out.add_argument("--gantt", type=Path, metavar="FILE", help="draw the last iterations of the last load")
    out.add_argument("--gantt-mode", default="auto", choices=("plain", "lockstep", "staggered", "auto"))
    return parser
