"""``vericache serve`` in processes of its own, on a free port: what tests and benchmarks talk to."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vericache.demo.worker import ENVIRONMENT


def command(*arguments: Any) -> list[str]:
    return [sys.executable, "-m", "vericache.cli", "serve", *map(str, arguments)]


class LiveServer:
    """Starts at once; ``wait_until_healthy`` before use, ``close`` afterwards. ``log`` gets what the server prints."""

    def __init__(
        self,
        folder: Path,
        flags: Sequence[Any],
        log: Path,
        key: str | None = None,
        environment: Mapping[str, str] | None = None,
        eager: bool = True,
    ) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.url, self.log, self.key = f"http://127.0.0.1:{port}", log, key
        access = [] if key is None else ["--api-key", key]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command(folder, *flags, *access, *["--enforce-eager"] * eager, "--port", port),
                # One compute thread unless asked: the API process and the engine's loop want the other core.
                env={
                    "OMP_NUM_THREADS": "1",
                    **os.environ,
                    **ENVIRONMENT,
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                    **(environment or {}),
                },
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_healthy(self, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if self.get("/health")[0] == 200:
                    return
            except OSError:
                time.sleep(1)
        raise RuntimeError(f"no healthy server (exit status {self.process.poll()}): {self.log.read_text()[-3000:]}")

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def engine_pids(self) -> list[int]:
        """Processes of the engines; vLLM names them."""
        found = subprocess.run(["pgrep", "-g", str(self.process.pid), "-f", "EngineCore"], capture_output=True)
        return [int(pid) for pid in found.stdout.split()]

    def get(self, path: str, key: str | None = None, method: str = "GET") -> tuple[int, str]:
        """Status and body, with the server's own key unless another is given ("" for none)."""
        return self._ask(urllib.request.Request(self.url + path, method=method), key)

    def post(self, path: str, body: Any) -> tuple[int, str]:
        """Status and body of the answer to ``body`` as JSON, with the server's own key."""
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        return self._ask(urllib.request.Request(self.url + path, data, headers))

    def _ask(self, request: urllib.request.Request, key: str | None = None) -> tuple[int, str]:
        if key := self.key if key is None else key:
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def series(self) -> dict[str, float]:
        """All metrics: sums over labels, by series name."""
        found: dict[str, float] = {}
        for line in self.get("/metrics")[1].splitlines():
            if match := re.match(r"([a-zA-Z_:]+)(?:\{.*\})? (\S+)$", line):
                found[match[1]] = found.get(match[1], 0) + float(match[2])
        return found
