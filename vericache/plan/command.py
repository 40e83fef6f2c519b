"""``vericache plan``: what drafting is worth for a model, a machine and a load, before anything is started."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from scheduler.acceptance import Acceptance
from scheduler.advice import Workload
from scheduler.remote_model import Remote
from vericache.errors import ConfigError
from vericache.plan.arguments import (
    SHARE,
    SHARE_DRAFTS,
    SHARE_RATIO,
    add_machine,
    add_model,
    amount,
    count,
    machine_of,
    weights_of,
)  # fmt: skip
from vericache.plan.geometry import WIDTH, Geometry, read_geometry
from vericache.plan.report import Question, report
from vericache.plan.show import heat_map, show


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status. Raises ConfigError."""
    args = _parser().parse_args(list(arguments))
    try:
        question = _question(args)
        found = report(question)
    except ValueError as error:  # the model's own checks; ConfigError among them
        raise ConfigError(str(error)) from None
    if args.png is not None:
        heat_map(question, args.png)
    if args.json:
        Console().print_json(data=found)
    else:
        show(found, Console())
    return 0


def _question(args: argparse.Namespace) -> Question:
    if args.ratio > 1:
        raise ConfigError(f"--ratio is {args.ratio:g}, expected the kept fraction of the context, at most 1")
    model = read_geometry(args.model) if args.model is not None else None
    weights, full, tail = _sizes(args, model)
    if args.acceptance is None:
        acceptance = Acceptance(SHARE, SHARE_DRAFTS, SHARE_RATIO)
    else:
        acceptance = Acceptance(args.acceptance, args.draft_length, args.ratio)
    packed = _packed(args.page_format, args.page_tokens, model.head_dim if model else args.head_size)
    work = Workload(weights, full, acceptance, packed, tail, args.batch)
    remote = None
    if args.remote_gbps is not None:
        remote = Remote(args.remote_gbps * 1e9, args.output_tokens, args.trip_ms / 1e3, args.local_share)
    largest = full + tail  # the KV when the last token is made: ``full`` is the mean over the output
    return Question(
        machine_of(args, args.gpus), work, args.ratio, args.draft_length, largest, args.acceptance is None, remote
    )


def _sizes(args: argparse.Namespace, model: Geometry | None) -> tuple[float, float, float]:
    """Bytes of weights, of one request's KV on average, and of that part of it that follows the context."""
    if model is None and (args.weights_gb is None or args.kv_gb is None):
        raise ConfigError("expected --model and --context, or --weights-gb and --kv-gb")
    weights = weights_of(args, model)
    if args.kv_gb is not None:
        if args.context is not None:
            raise ConfigError("--kv-gb is the KV of a whole context: give it or --context, not both")
        return weights, args.kv_gb * 1e9, 0.0
    assert model is not None
    if args.context is None:
        raise ConfigError("expected --context, the tokens of a request's prompt, beside --model")
    tail = model.kv_per_token * args.output_tokens / 2
    return weights, model.kv_per_token * args.context + tail, tail


def _packed(name: str, page_tokens: int, head_dim: int) -> float:
    """Bytes of a page over those of a plain one. A simulated format saves nothing: it lies in plain pages."""
    if name == "plain":
        return 1.0
    import torch

    from vericache.draft.formats import FORMATS, page_format

    if name not in FORMATS:
        raise ConfigError(f"unknown --page-format {name!r}, expected one of {', '.join(FORMATS)}")
    return page_format(name, page_tokens, head_dim, torch.bfloat16).page_bytes / (2 * WIDTH * page_tokens * head_dim)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vericache plan", description=__doc__)
    load = parser.add_argument_group("model and load")
    add_model(load)
    load.add_argument("--kv-gb", type=amount, help="GB of one request's full KV, instead of --context")
    load.add_argument("--context", type=count, help="tokens of a request's prompt")
    load.add_argument("--output-tokens", type=count, default=512, help="tokens of its output (default 512)")
    load.add_argument("--batch", type=count, help="requests at a time (default: as many as fit and help)")
    machine = parser.add_argument_group("machine")
    add_machine(machine)
    machine.add_argument("--gpus", type=count, default=1, help="of them, each with a link of its own (default 1)")
    draft = parser.add_argument_group("drafting")
    draft.add_argument("--ratio", type=amount, default=0.25, help="kept fraction of the context (default 0.25)")
    draft.add_argument("--draft-length", type=count, default=25, help="drafts per verify, x (default 25)")
    draft.add_argument(
        "--acceptance", type=float, help="share of a round's drafts that is accepted at this ratio and draft length "
        "(default: 0.64 at 0.25 and 25, KVzip on the bundled model)",
    )  # fmt: skip
    draft.add_argument("--page-format", default="plain", help="of what is kept: plain, turboquant4, ...")
    draft.add_argument("--page-tokens", type=count, default=32, help="tokens of a page (default 32)")
    draft.add_argument("--head-size", type=count, default=128, help="without --model: of a KV head (default 128)")
    remote = parser.add_argument_group("remote prefix caching")
    remote.add_argument("--remote-gbps", type=amount, help="GB per second into a remote GPU that drafts")
    remote.add_argument("--trip-ms", type=float, default=1.0, help="of drafts and verdict, per round (default 1)")
    remote.add_argument("--local-share", type=float, default=1.0, help="of the verifying GPUs' time (default 1)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the speedup over ratio and draft length")
    return parser
