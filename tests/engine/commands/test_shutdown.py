"""SIGTERM. The last tests of this group: the server is gone afterwards."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

from benchmarks.server import LiveServer


def test_sigterm_drains_and_ends_every_process(server: LiveServer, client: OpenAI, texts: dict[str, list[int]]) -> None:
    """A stream under way is finished, new requests are refused meanwhile; one that is not done by --shutdown-timeout is
    told so, with the tokens there are; no process of the server outlives it."""

    def stream(max_tokens: int) -> tuple[str, int]:
        chunks = client.completions.create(
            model="demo",
            prompt=texts["summarise"],
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        reason, count = "", 0
        for chunk in chunks:
            reason = chunk.choices[0].finish_reason or reason if chunk.choices else reason
            count = chunk.usage.completion_tokens if chunk.usage else count
        return reason, count

    with ThreadPoolExecutor() as pool:
        short, long = pool.submit(stream, 16), pool.submit(stream, 700)
        time.sleep(1.5)
        os.kill(server.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while server.get("/health")[0] == 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.get("/health")[0] == 503
        assert server.post("/v1/completions", {"model": "demo", "prompt": "a", "max_tokens": 1})[0] == 503
        assert server.get("/live")[0] == 200
        assert short.result(timeout=60) == ("length", 16)
        for pid in server.engine_pids():
            os.kill(pid, signal.SIGSTOP)  # so slow that no timeout is long enough
        reason, count = long.result(timeout=60)
        assert reason == "abort"
        assert 0 < count < 700
    server.process.wait(timeout=60)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.killpg(server.process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.2)
    raise AssertionError("a process of the server outlived it")
