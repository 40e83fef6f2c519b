"""What ``vericache plan`` and ``vericache simulate`` ask on the command line alike: weights and machine."""

import argparse
import dataclasses
from pathlib import Path

from scheduler.acceptance import USUAL
from scheduler.byte_model import Machine
from vericache.errors import ConfigError
from vericache.plan.geometry import Geometry
from vericache.plan.gpus import GPUS

SHARE, SHARE_DRAFTS, SHARE_RATIO = USUAL.share, USUAL.drafts, USUAL.ratio


def add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", type=Path, metavar="FOLDER", help="a model folder, of which config.json is read")
    group.add_argument("--weights-gb", type=amount, help="GB of the weights (default: the model's, in bfloat16)")


def add_machine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--gpu", choices=GPUS, help="a known GPU: its data sheet times what was reached on an H200")
    group.add_argument("--hbm-gb", type=amount, help="GB of device memory for weights and KV")
    group.add_argument("--hbm-gbps", type=amount, help="GB per second of device memory")
    group.add_argument("--link-gbps", type=amount, help="GB per second from host to device")


def weights_of(args: argparse.Namespace, model: Geometry | None) -> float:
    """Bytes. What is given replaces the model's."""
    return args.weights_gb * 1e9 if args.weights_gb is not None or model is None else float(model.weight_bytes)


def machine_of(args: argparse.Namespace, gpus: int = 1) -> Machine:
    """A GPU by name; what is given beside it replaces its figures. ``gpus``: of them, each with a link of its own."""
    given = {"memory": args.hbm_gb, "bandwidth": args.hbm_gbps, "link": args.link_gbps}
    values = {name: value * 1e9 for name, value in given.items() if value is not None}
    if args.gpu is not None:
        values = dataclasses.asdict(GPUS[args.gpu].machine) | values
    if len(values) < len(given):
        raise ConfigError("expected --gpu, or all of --hbm-gb, --hbm-gbps and --link-gbps")
    return Machine(**{name: gpus * value for name, value in values.items()})


def amount(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not positive and finite")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value
