"""Certified decode over HTTP: asked for, reported, refused."""

import json
from typing import Any

import pytest
from openai import OpenAI

from benchmarks.server import LiveServer
from tests.engine.commands.asking import CERTIFIED, OFF, completion
from tests.engine.conftest import SMALL_LAYERS

TOKENS = 6


def test_next_to_no_error_is_full_kv_and_what_it_took_is_reported(
    server: LiveServer, client: OpenAI, texts: dict[str, list[int]]
) -> None:
    asked = {"max_tokens": TOKENS, "ignore_eos": True}
    before = server.series()
    exact = completion(client, texts["summarise"], asked, {**CERTIFIED, "vericache_epsilon": 1e-9})
    plain = completion(client, texts["summarise"], asked, OFF)
    assert exact.choices[0].token_ids == plain.choices[0].token_ids
    details = exact.usage.completion_tokens_details
    assert details.vericache_mode == "certified"
    found = details.vericache_certified
    assert (found["epsilon"], found["delta"]) == (1e-9, 0.1)
    assert found["tokens"] == TOKENS - 1  # the first one is the prompt's
    assert found["decisions"] == found["fetching_decisions"] == (TOKENS - 1) * SMALL_LAYERS * 3
    assert found["fetched_bytes"] > 0
    assert found["largest_measured_error"] < 1e-5
    after = server.series()
    assert after["vericache_certified_tokens_total"] - before["vericache_certified_tokens_total"] == TOKENS - 1
    assert after["vericache_certified_fetched_bytes_total"] > before["vericache_certified_fetched_bytes_total"]


def test_a_stream_reports_it_too(client: OpenAI, texts: dict[str, list[int]]) -> None:
    asked = {"max_tokens": TOKENS, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    options = {**CERTIFIED, "vericache_epsilon": 0.5, "vericache_bound": "output"}
    *_, last = completion(client, texts["summarise"], asked, options)
    found = last.usage.completion_tokens_details.vericache_certified
    assert found["bound"] == "output"
    assert found["tokens"] == TOKENS - 1
    assert found["largest_certificate"] <= 0.5


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"vericache_epsilon": 0}, "vericache_epsilon"),
        ({"vericache_epsilon": -0.1}, "vericache_epsilon"),
        ({"vericache_bound": "ouput"}, "vericache_bound"),
        ({"vericache_delta": 1.0}, "vericache_delta"),
        ({"vericache_delta": 0.0}, "vericache_delta"),
        ({"vericache_mode": "draft", "vericache_epsilon": 0.1}, "vericache_epsilon"),
        ({"vericache_compressor": "streaming_llm"}, "vericache_compressor"),
    ],
)
def test_what_cannot_be_promised_is_refused(server: LiveServer, options: dict[str, Any], field: str) -> None:
    body = {"model": "demo", "prompt": "a", "max_tokens": 1, "vllm_xargs": {**CERTIFIED, **options}}
    status, answer = server.post("/v1/completions", body)
    assert status == 400
    error = json.loads(answer)["error"]
    assert error["param"] == field
    assert field != "vericache_bound" or "did you mean 'output'?" in error["message"]
