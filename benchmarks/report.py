"""What all benchmarks share: the machine's description, Markdown tables, saved figures."""

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vericache.figure import figure

__all__ = ["RESULTS", "command", "figure", "machine", "machine_of", "save", "table"]

RESULTS = Path(__file__).parent.parent / "docs" / "results"


def machine() -> str:
    """Which machine measured: a time means nothing without it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores, {platform.python_implementation()} {platform.python_version()}"


def machine_of(device: str) -> str:
    """``machine``, and the GPU where ``device`` is one."""
    if not device.startswith("cuda"):
        return machine()
    import torch

    return f"{torch.cuda.get_device_name(device)}, {machine()}"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], left: int = 1) -> list[str]:
    """Lines of a Markdown table; the first ``left`` columns are text."""
    align = [":--"] * left + ["--:"] * (len(header) - left)
    return ["| " + " | ".join(map(str, r)) + " |" for r in (header, align, *rows)]


def save(out: Path, name: str, result: Any, text: str) -> None:
    """``NAME.json`` and ``NAME.md`` of a finished run."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / f"{name}.md").write_text(text.rstrip("\n") + "\n")


def command(
    doc: str | None,
    measure: Callable[[argparse.Namespace], Any],
    render: Callable[[Any, Path], None],
    options: Mapping[str, Mapping[str, Any]],
) -> None:
    """The command line of a benchmark that is measured on one machine and may be rendered on another: ``--out``,
    ``--render FILE`` and its own ``options`` (flag -> arguments of ``add_argument``)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, arguments in options.items():
        parser.add_argument(flag, **arguments)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--render", type=Path, metavar="FILE", help="only make the results of this JSON")
    args = parser.parse_args()
    render(measure(args) if args.render is None else json.loads(args.render.read_text()), args.out)
