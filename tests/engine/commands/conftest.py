"""One ``vericache serve`` for all tests of this group, and the official client to talk to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from transformers import AutoTokenizer

from benchmarks.server import LiveServer
from tests.engine.harness import ENGINE

KEY = "a key of our own"
FLAGS = {
    "--dtype": "float32",
    "--max-model-len": ENGINE["max_model_len"],
    "--block-size": ENGINE["block_size"],
    "--kv-cache-memory-bytes": ENGINE["kv_cache_memory_bytes"],
    "--served-model-name": "demo",
    "--shutdown-timeout": 30,
    "--tool-call-parser": "xlam",  # one that loses arguments in deltas of many tokens
    "--vericache-mode": "draft",
    "--vericache-draft-policy": "fixed",
    "--vericache-min-prompt-tokens": 150,
    "--vericache-compressor": "snapkv",
    "--vericache-draft-length": 8,
    "--vericache-host-memory-gib": 1,
    "--vericache-audit-share": 0.3,
    "--vericache-request-options": "[mode, draft_length, compressor, counts, ratio, bound, epsilon, delta]",
    "--vericache-measured-share": 0.5,
}


@pytest.fixture(scope="session")
def server(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    flags = [part for pair in FLAGS.items() for part in pair]
    running = LiveServer(
        small_folder, [*flags, "--enable-auto-tool-choice"], tmp_path_factory.mktemp("server") / "log", KEY
    )
    try:
        running.wait_until_healthy()
        yield running
    finally:
        running.close()


@pytest.fixture(scope="session")
def client(server: LiveServer) -> OpenAI:
    return OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=180)


@pytest.fixture(scope="session")
def prose(small_folder: Path, texts: dict[str, list[int]]) -> str:
    """A prompt long enough to draft, as text for chats."""
    return AutoTokenizer.from_pretrained(small_folder).decode(texts["summarise"])
