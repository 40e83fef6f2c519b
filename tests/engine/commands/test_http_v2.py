"""The server on vLLM's V2 model runner: a few requests, drafting on and off. Through Triton's interpreter, or, where
there is a GPU, on it, with full graphs and batch-invariant kernels."""

import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from transformers import AutoTokenizer

from benchmarks.server import LiveServer
from tests import tiny_model
from tests.engine.commands.asking import OFF, SCHEMA, comparable, completion

GPU = torch.cuda.is_available()
STUB = Path(__file__).parents[2] / "interpreted" / "stub"
FLAGS = {
    "--dtype": "bfloat16" if GPU else "float32",
    "--vericache-bitwise": "on" if GPU else "off",
    "--max-model-len": 512,
    "--max-num-seqs": 4,
    "--max-num-batched-tokens": 256,
    "--kv-cache-memory-bytes": 64 << 20,
    "--served-model-name": "demo",
    "--vericache-mode": "draft",
    "--vericache-draft-policy": "fixed",
    "--vericache-min-prompt-tokens": 40,
    "--vericache-compressor": "streaming_llm",
    "--vericache-counts": "uniform",
    "--vericache-ratio": 1.0,
    "--vericache-sinks": 2,
    "--vericache-recent": 8,
    "--vericache-draft-length": 4,
    "--vericache-window": 8,
    "--vericache-verify-tokens": 20,
    "--vericache-page-tokens": 16,
    "--vericache-host-memory-gib": 0.1,
    "--vericache-arena-fraction": 0.5,  # also on a GPU, whose bandwidths say nothing of so small a model
}
REQUESTS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "sampled": {"temperature": 0.8, "seed": 3},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    "json": {"structured_outputs": {"json": SCHEMA}},
    "stop id": {"stop_token_ids": list(range(260, 330)), "min_tokens": 3},
}


@pytest.fixture(scope="module")
def v2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save(tmp_path_factory.mktemp("tiny"), 64 if GPU else 32)


@pytest.fixture(scope="module")
def v2_client(v2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    environment = {"VLLM_LOGGING_LEVEL": "INFO"}
    if not GPU:
        environment |= {
            "TRITON_INTERPRET": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            "PYTHONPATH": os.pathsep.join([str(STUB), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
    log = tmp_path_factory.mktemp("server") / "log"
    running = LiveServer(v2_folder, [part for pair in FLAGS.items() for part in pair], log, None, environment, not GPU)
    try:
        running.wait_until_healthy()
        assert "Using V2 Model Runner" in log.read_text()
        yield OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0, timeout=300)
    finally:
        running.close()


@pytest.fixture(scope="module")
def prompt(v2_folder: Path) -> list[int]:
    prose = files("vericache.demo").joinpath("prompts/sotu_1791.txt").read_text()
    return list(AutoTokenizer.from_pretrained(v2_folder).encode(prose)[:64])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if GPU or name == "json" else pytest.mark.slow) for name in REQUESTS]
)
def test_answers_are_the_same_without_drafting(v2_client: OpenAI, prompt: list[int], name: str) -> None:
    asked = {"max_tokens": 10, **REQUESTS[name]}
    drafted, plain = (completion(v2_client, prompt, asked, options) for options in ({}, OFF))
    assert comparable(drafted) == comparable(plain)
    assert drafted.usage.completion_tokens_details.vericache_mode == "draft"
    assert drafted.usage.completion_tokens_details.accepted_prediction_tokens > 0


def test_a_stream_adds_up(v2_client: OpenAI, prompt: list[int]) -> None:
    plain = completion(v2_client, prompt, {"max_tokens": 12}, OFF)
    chunks = list(completion(v2_client, prompt, {"max_tokens": 12, "stream": True}, {}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == plain.choices[0].text
