"""A plan for people: tables on the terminal, and a picture of the speedup."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from scheduler.advice import modes
from vericache.figure import figure
from vericache.plan.report import Question

CELLS = 24  # of the picture, each way
LONGEST = 100  # drafts in the picture


def show(found: dict[str, Any], console: Console) -> None:
    lines = [
        f"machine     {found['hbm_gb']:.0f} GB at {found['hbm_gbps']:.0f} GB/s, link {found['link_gbps']:.0f} GB/s, "
        f"rho {found['rho']:.0f}",
        f"load        weights {found['weights_gb']:.1f} GB, {found['kv_gb']:.2f} GB of KV per request",
        f"drafting    c {found['c']:.3f}, x {found['draft_length']}, {found['acceptance']:.2f} of the drafts accepted"
        f"{' (assumed: measure yours)' if found['acceptance_assumed'] else ''}, "
        f"{found['tokens_per_cycle']:.1f} tokens per verify",
    ]
    if found["batch"] is not None:
        lines += [
            f"iteration   T_gpu {found['t_gpu_ms']:.1f} ms, T_xfer {found['t_xfer_ms']:.1f} ms with {found['batch']} "
            f"requests: {found['limit']}-bound; c* {found['c_star']:.2f}, memory-bound from x "
            f"{found['least_draft_length']}",
            f"break even  {_share(found['break_even_acceptance'])}; where the link is the limit "
            f"{found['link_limit_tokens_per_cycle']:.1f} tokens per verify",
        ]
    console.print(*lines, sep="\n", highlight=False, soft_wrap=True)
    console.print(_modes(found["modes"]))
    auto = found["auto"]
    if auto["arena_fraction"]:
        console.print(
            f"mode auto    {auto['speedup']:.2f} of plain vLLM under load with arena_fraction "
            f"{auto['arena_fraction']:g}, plain vLLM until memory is short",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    else:
        console.print("mode auto    plain vLLM: it gains by no arena, or not at every load", highlight=False)
    console.print(_advice(found["recommended"]), highlight=False, soft_wrap=True)
    if "remote" in found:
        console.print(_remote(found["remote"]), highlight=False, soft_wrap=True)


def _share(acceptance: float) -> str:
    if acceptance > 1:
        return "never at this ratio and draft length"
    return f"{max(0.0, acceptance):.2f} of the drafts accepted"


def _modes(found: dict[str, Any]) -> Table:
    numbers = ("requests", "ms", "tokens/s", "speedup", "link", "host GiB")
    table = Table(
        "mode", *(Column(n, justify="right") for n in numbers), caption="short: the lossy cache alone, not exact"
    )
    for name, mode in found.items():
        table.add_row(
            name, str(mode["rows"]), f"{mode['iteration_ms']:.1f}", f"{mode['tokens_per_s']:.0f}",
            f"{mode['speedup']:.2f}", f"{mode['link_busy']:.0%}", str(mode["host_memory_gib"]),
        )  # fmt: skip
    return table


def _advice(best: dict[str, Any]) -> str:
    flags = " ".join(
        f"--vericache-{name.replace('_', '-')} {_value(value)}" for name, value in best["settings"].items()
    )
    if best["mode"] == "plain":
        return f"recommended  plain vLLM ({flags}): no ratio and draft length makes drafting clearly faster"
    return (
        f"recommended  {best['mode']}, ratio {best['ratio']:g} (c {best['c']:.3f}), x {best['draft_length']}: "
        f"{best['rows']} requests, {best['tokens_per_s']:.0f} tokens/s, {best['speedup']:.2f} of plain vLLM, "
        f"{best['host_memory_gib']} GiB of host memory\n             {flags or 'the default settings'}"
    )


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _remote(found: dict[str, Any]) -> str:
    draft, full = found["drafting"], found["full_kv"]
    return (
        f"remote       {draft['rows']} requests draft on a remote GPU, {draft['request_s']:.2f} s each: "
        f"{found['start_s']:.2f} s until it drafts, then cycles of {found['cycle_ms']:.0f} ms; "
        f"{found['remote_gpus_per_local']:.2f} remote GPUs per verifying one keep both busy\n"
        f"             {draft['requests_per_s_per_gpu']:.3f} requests per s and GPU, verifying ones counted; with full "
        f"KV over the slow link {full['requests_per_s_per_gpu']:.3f} ({full['rows']} requests, "
        f"{full['request_s']:.2f} s)"
    )


def heat_map(question: Question, file: Path) -> None:
    """The speedup of staggered drafting over ratio and draft length. Raises ConfigError without matplotlib."""
    ratios = [(i + 1) / CELLS for i in range(CELLS)]
    lengths = [1 + round(i * (LONGEST - 1) / (CELLS - 1)) for i in range(CELLS)]
    speedups = [[_speedup(question, ratio, x) for ratio in ratios] for x in lengths]
    sizes = [question.work.load(ratio).c for ratio in ratios]
    with figure(file, 7, 5) as (fig, axes):
        mesh = axes.pcolormesh(sizes, lengths, speedups, shading="nearest", cmap="viridis")
        lines = axes.contour(sizes, lengths, speedups, levels=[0.5, 1, 1.5, 2, 3, 4], colors="white")
        axes.clabel(lines, fmt="%g")
        axes.set_xlabel("c: kept bytes over full KV")
        axes.set_ylabel("x: drafts per verify")
        fig.colorbar(mesh, label="predicted tokens per second over plain vLLM's")


def _speedup(question: Question, ratio: float, drafts: int) -> float:
    """0 where memory has no room to draft."""
    found = modes(question.machine, question.work, ratio, drafts)
    return found["staggered"].tokens_per_s / found["plain"].tokens_per_s if "staggered" in found else 0.0
