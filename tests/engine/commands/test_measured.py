"""A tool that measures a server runs unchanged against it: vLLM's own serving benchmark."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server import LiveServer
from vericache.demo.worker import ENVIRONMENT

# The `vllm` command does not start from the CPU wheel; this is its `bench serve`.
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
REQUESTS, INPUT, OUTPUT = 6, 200, 12


def run(*arguments: object, key: str | None = None) -> None:
    environment = {**os.environ, **ENVIRONMENT, **({"OPENAI_API_KEY": key} if key else {})}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.5)


def text_slices(folder: Path, tmp_path: Path) -> list[object]:
    """vLLM's own way to cut prompts out of a text."""
    text = files("vericache.demo").joinpath("prompts", "loomings.txt")
    run(
        "-m", "vllm.benchmarks.datasets.create_txt_slices_dataset",
        "--input", text, "--output", tmp_path / "slices.jsonl", "--tokenizer", folder,
        "--num-prompts", REQUESTS, "--input-len", INPUT, "--output-len", OUTPUT,
    )  # fmt: skip
    slices = ["--dataset-name", "custom", "--dataset-path", tmp_path / "slices.jsonl"]
    return [*slices, "--custom-output-len", -1, "--skip-chat-template"]  # -1: the lengths in the file


def random_tokens(folder: Path, tmp_path: Path) -> list[object]:
    return ["--dataset-name", "random", "--random-input-len", INPUT, "--random-output-len", OUTPUT]


@pytest.mark.parametrize("data", [random_tokens, pytest.param(text_slices, marks=pytest.mark.slow)])
def test_vllms_benchmark_counts_what_the_server_counts(
    server: LiveServer, small_folder: Path, tmp_path: Path, data: Any
) -> None:
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vericache_audit_checks_total",
             "vericache_rounds_total")  # fmt: skip
    wait_until(lambda: not server.series()["vllm:num_requests_running"], "other tests' requests and replays are done")
    before = server.series()
    source: Sequence[object] = data(small_folder, tmp_path)
    run(
        "-c", BENCH_SERVE, "--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions",
        "--model", "demo", "--tokenizer", small_folder, *source, "--num-prompts", REQUESTS, "--max-concurrency", 3,
        "--ignore-eos", "--save-result", "--result-dir", tmp_path, "--result-filename", "result.json",
        "--disable-tqdm", "--ready-check-timeout-sec", 0, key=server.key,
    )  # fmt: skip
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["total_output_tokens"] == REQUESTS * OUTPUT

    def counted() -> list[float]:
        after = server.series()
        return [after.get(name, 0) - before.get(name, 0) for name in names]

    def agrees() -> bool:
        """The audit replays some of the requests, which all have the same lengths."""
        prompt_tokens, output_tokens, replays, _ = counted()
        share = 1 + replays / REQUESTS
        wanted = (result["total_input_tokens"] * share, result["total_output_tokens"] * share)
        return (prompt_tokens, output_tokens) == pytest.approx(wanted)

    wait_until(agrees, f"{counted()} agree with {result['total_input_tokens']}, {result['total_output_tokens']}")
    assert counted()[-1] > 0
