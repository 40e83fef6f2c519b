"""``vericache serve``: the engine in processes of its own, behind vLLM's HTTP server."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import OUTPUT_TOKENS, stock_output
from tests.engine.harness import ENGINE
from vericache.demo.worker import ENVIRONMENT

FLAGS = {
    "--dtype": "float32",
    "--max-model-len": ENGINE["max_model_len"],
    "--block-size": ENGINE["block_size"],
    "--kv-cache-memory-bytes": ENGINE["kv_cache_memory_bytes"],
    "--vericache-min-prompt-tokens": 150,
    "--vericache-compressor": "snapkv",
    "--vericache-draft-length": 8,
    "--vericache-host-memory-gib": 1,
}


def command(*arguments: Any) -> list[str]:
    return [sys.executable, "-m", "vericache.cli", "serve", *map(str, arguments)]


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def wait_until_healthy(self, seconds: float, log: Path) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server ended: {log.read_text()[-3000:]}"
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(1)
        raise AssertionError(f"not healthy after {seconds:.0f} s: {log.read_text()[-3000:]}")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def server(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    flags = [part for pair in FLAGS.items() for part in pair]
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(small_folder, *flags, "--enforce-eager", "--port", port, "--served-model-name", "demo"),
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        running = Server(f"http://127.0.0.1:{port}", process)
        running.wait_until_healthy(300, log)
        yield running
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_concurrent_completions_are_stock_vllms(
    server: Server, small_folder: Path, texts: dict[str, list[int]]
) -> None:
    some = dict(list(texts.items())[:3])
    body = {
        "model": "demo",
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    with ThreadPoolExecutor() as pool:
        answers = pool.map(lambda ids: server.post("/v1/completions", {**body, "prompt": ids}), some.values())
        answers = dict(zip(some, answers, strict=True))
    stock = stock_output(small_folder, some)
    for name, answer in answers.items():
        assert answer["choices"][0]["token_ids"] == stock[name]
        assert answer["kv_transfer_params"]["vericache"]["mode"] == "draft"


def test_client_that_leaves_is_forgotten(server: Server, texts: dict[str, list[int]]) -> None:
    """Its request is aborted; the next one is answered."""
    prompt = next(iter(texts.values()))
    body = {"model": "demo", "prompt": prompt, "max_tokens": 600, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as stream:
        assert stream.readline().startswith(b"data: ")
    answer = server.post("/v1/completions", {**body, "stream": False, "max_tokens": 20})
    assert answer["usage"]["completion_tokens"] == 20


def test_sigterm_ends_every_process(server: Server) -> None:
    """Last test of the module: the server is gone afterwards."""
    os.kill(server.process.pid, signal.SIGTERM)
    server.process.wait(timeout=60)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.killpg(server.process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.2)
    raise AssertionError("a process of the server outlived it")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vericache-ratio", "1.5"], "ratio"),
        (["--vericache-compresor", "kvzip"], "--vericache-compressor"),
        (["--pipeline-parallel-size", "2"], "pipeline"),
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
