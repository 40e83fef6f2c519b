"""``vericache serve``: bad flags, and the engine in processes of its own against stock vLLM."""

import json
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import OpenAI

from benchmarks.server import LiveServer, command
from tests.engine.commands.conftest import FLAGS
from tests.engine.conftest import OUTPUT_TOKENS
from tests.engine.harness import ENGINE, SETTINGS
from vericache.demo.worker import ENVIRONMENT, Job, run_in_process


@pytest.fixture(scope="module")
def some(texts: dict[str, list[int]]) -> dict[str, list[int]]:
    return dict(list(texts.items())[:3])


def test_concurrent_completions_are_stock_vllms(
    client: OpenAI, some: dict[str, list[int]], stock: dict[str, list[int]]
) -> None:
    extra = {"ignore_eos": True, "return_token_ids": True}
    with ThreadPoolExecutor() as pool:
        answers = pool.map(
            lambda ids: client.completions.create(
                model="demo", prompt=ids, max_tokens=OUTPUT_TOKENS, temperature=0, extra_body=extra
            ),
            some.values(),
        )
        found = dict(zip(some, answers, strict=True))
    for name, answer in found.items():
        assert answer.choices[0].token_ids == stock[name]
        assert answer.kv_transfer_params["vericache"]["mode"] == "draft"


@pytest.mark.slow
def test_one_seat(small_folder: Path, some: dict[str, list[int]], stock: dict[str, list[int]]) -> None:
    """``--max-num-seqs 1`` (vLLM #5302): drafts and verifies share the one row there is."""
    job = Job(str(small_folder), some, OUTPUT_TOKENS, {**ENGINE, "max_num_seqs": 1}, SETTINGS, ignore_eos=True)
    result = run_in_process(job)
    assert result.tokens == {name: stock[name] for name in some}
    assert {summary["mode"] for summary in result.summaries.values()} == {"draft"}


def healthy(server: LiveServer) -> bool:
    try:
        return server.process.poll() is None and server.get("/health")[0] == 200
    except OSError:
        return False


def test_a_dead_engine_is_not_healthy(small_folder: Path, some: dict[str, list[int]], tmp_path: Path) -> None:
    """vLLM #36960, and nobody waits for ever: the request under way fails, the server says so or ends."""
    flags = [part for pair in FLAGS.items() for part in pair]
    server = LiveServer(small_folder, flags, tmp_path / "log")
    try:
        server.wait_until_healthy()
        body = {"model": "demo", "prompt": some["summarise"], "max_tokens": 700, "ignore_eos": True}
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(server.post, "/v1/completions", body)
            time.sleep(2)
            assert json.loads(server.get("/vericache/status")[1])["engines"]["0"]["requests"]
            for pid in server.engine_pids():
                os.kill(pid, signal.SIGKILL)
            try:
                status = answer.result(timeout=60)[0]
            except OSError:  # the connection ends
                status = 500
            assert status >= 500
        deadline = time.monotonic() + 60
        while healthy(server) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert not healthy(server)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--vericache-ratio", "1.5"], "ratio", marks=pytest.mark.slow),
        (["--vericache-compresor", "kvzip"], "--vericache-compressor"),
        pytest.param(["--pipeline-parallel-size", "2"], "pipeline", marks=pytest.mark.slow),
    ],
)
def test_bad_flags_are_one_clear_line(small_folder: Path, arguments: list[str], message: str) -> None:
    result = subprocess.run(
        command(small_folder, *arguments),
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("vericache serve: ")
    assert message in last
