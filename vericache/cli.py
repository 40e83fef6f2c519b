"""The ``vericache`` command: serve, demo, methods, settings, plan, simulate, surrogate."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from rich.console import Console
from rich.table import Table

from vericache.config import VeriCacheConfig, check_names, load
from vericache.errors import ConfigError, VeriCacheError

_FLAG = "vericache_"
_FILE = _FLAG + "config"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status. A VeriCacheError is one line on stderr, not a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {
        "serve": serve, "demo": demo, "methods": methods, "settings": settings, "plan": plan,
        "simulate": simulate, "surrogate": surrogate,
    }  # fmt: skip
    parser = argparse.ArgumentParser(prog="vericache", description=__doc__)
    parser.add_argument(
        "command",
        choices=commands,
        help="serve MODEL: an OpenAI-compatible server (vllm serve's "
        "flags and --vericache-*); demo: plain vLLM against VeriCache on a bundled model; "
        "methods: compressors; settings: all settings with their defaults; plan: what drafting is worth on a "
        "machine; simulate: the same by the scheduler's own code in simulated time; surrogate train|eval: the "
        "surrogates that some compressors need",
    )
    command = parser.parse_args(arguments[:1]).command
    try:
        _check_names(arguments[1:])
        return commands[command](arguments[1:])
    except VeriCacheError as error:
        print(f"vericache {command}: {error}", file=sys.stderr)
        return 2


def serve(arguments: Sequence[str]) -> int:
    """vLLM's API server with VeriCache switched on: every flag of ``vllm serve``, and ``--vericache-*``.

    Calls ``ServeSubcommand.cmd`` itself, because the ``vllm`` command looks up the distribution "vllm", which the
    CPU wheel is not called.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vericache.engine.support import check_supported
    from vericache.plugin import engine_arguments

    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(prog="vericache serve", description=serve.__doc__))
    add_flags(parser)
    args = parser.parse_args(list(arguments))
    config = from_flags(args)
    for name, value in engine_arguments(config, vars(args)).items():
        setattr(args, name, value)
    allow_endpoints()
    command = ServeSubcommand()
    command.validate(args)
    if args.model_tag is not None:
        args.model = args.model_tag
    check_supported(AsyncEngineArgs.from_cli_args(args).create_engine_config())
    command.cmd(args)
    return 0


def allow_endpoints() -> None:
    """vLLM loads endpoint plugins only when VLLM_PLUGINS names them, which then has to name every other plugin too."""
    named = os.environ.get("VLLM_PLUGINS")
    groups = [g for g in entry_points().groups if g.startswith("vllm.")]
    others = named.split(",") if named is not None else [e.name for g in groups for e in entry_points(group=g)]
    os.environ["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*filter(None, others), "vericache"]))


def demo(arguments: Sequence[str]) -> int:
    from vericache.demo import prompts

    parser = argparse.ArgumentParser(prog="vericache demo", description="Plain vLLM against VeriCache.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write the picture of the schedule")
    parser.add_argument("--prompts", nargs="+", choices=prompts.PROMPTS, default=prompts.DEMO)
    parser.add_argument("--tokens", type=int, default=128, help="output tokens per request")
    parser.add_argument("--kv-blocks", type=int, default=120, help="device KV blocks for VeriCache")
    parser.add_argument("--model", type=Path, help="a model folder instead of the bundled model")
    add_flags(parser)
    args = parser.parse_args(list(arguments))
    given = _given(args)
    load(given)  # a wrong setting is an error before anything is imported or run
    from vericache.demo.run import DemoOptions
    from vericache.demo.run import main as run

    options = DemoOptions(args.prompts, args.tokens, args.kv_blocks, given, args.model)
    return run(options, args.json, args.png)


def methods(arguments: Sequence[str]) -> int:
    from compressors import MethodError, describe

    argparse.ArgumentParser(prog="vericache methods", description="List the compressors.").parse_args(list(arguments))
    table = Table("compressor", "counts", "what it keeps")
    try:
        rows = describe()
    except MethodError as error:  # an installed distribution registers a method that is broken
        raise ConfigError(str(error)) from None
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    return 0


def settings(arguments: Sequence[str]) -> int:
    """All settings with default and meaning; or, with flags, the merged configuration as YAML."""
    parser = argparse.ArgumentParser(prog="vericache settings", description=settings.__doc__)
    add_flags(parser)
    args = parser.parse_args(list(arguments))
    if arguments:
        print(yaml.safe_dump(from_flags(args).model_dump(mode="json"), sort_keys=False), end="")
        return 0
    table = Table("setting (--vericache-..., VERICACHE_...)", "default", "meaning")
    for name, info in VeriCacheConfig.model_fields.items():
        table.add_row(name, str(info.default), info.description or "")
    Console().print(table)
    return 0


def plan(arguments: Sequence[str]) -> int:
    """What drafting is worth for a model, a machine and a load."""
    from vericache.plan.command import main as run

    return run(arguments)


def simulate(arguments: Sequence[str]) -> int:
    """What each way of serving makes of a load, in simulated time."""
    from vericache.simulate.command import main as run

    return run(arguments)


def surrogate(arguments: Sequence[str]) -> int:
    """Train a surrogate for a model, or measure one."""
    from vericache.surrogate.command import main as run

    return run(arguments)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One ``--vericache-*`` flag per setting, and ``--vericache-config FILE``."""
    group = parser.add_argument_group("VeriCache")
    group.add_argument("--vericache-config", type=Path, metavar="FILE", help="YAML file with VeriCache settings")
    for name, info in VeriCacheConfig.model_fields.items():
        flag = "--" + (_FLAG + name).replace("_", "-")
        options: dict[str, Any] = {"default": None, "help": f"{info.description} (default: {info.default})"}
        if get_origin(info.annotation) is not None and all(isinstance(a, str) for a in get_args(info.annotation)):
            options["choices"] = get_args(info.annotation)
        else:
            options |= {"type": yaml.safe_load, "metavar": name.upper()}
        group.add_argument(flag, **options)


def _check_names(arguments: Sequence[str]) -> None:
    """argparse only says "unrecognized"; a misspelt setting deserves its nearest name."""
    prefix = "--" + _FLAG.replace("_", "-")
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith(prefix) and name.removeprefix(prefix) != "config":
            check_names([name.removeprefix(prefix).replace("-", "_")], "flags", lambda n: prefix + n.replace("_", "-"))


def from_flags(args: argparse.Namespace) -> VeriCacheConfig:
    return load(_given(args), file=getattr(args, _FILE))


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The VeriCache flags that were given, by setting name."""
    flags = {name: getattr(args, _FLAG + name) for name in VeriCacheConfig.model_fields}
    return {name: value for name, value in flags.items() if value is not None}


if __name__ == "__main__":
    sys.exit(main())
