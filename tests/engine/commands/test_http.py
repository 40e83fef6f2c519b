"""Requests over HTTP with drafting on and off give the same answer, plain and streamed."""

import json
import shutil
import subprocess
import time
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from benchmarks.server import LiveServer
from tests.engine.commands.asking import OFF, PERFECT, SCHEMA, TOOL, chat, comparable, completion

COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "max_tokens": {"max_tokens": 9},
    "logprobs": {"logprobs": 3, "max_tokens": 24},
    "prompt_logprobs": {"prompt_logprobs": 1, "max_tokens": 4},
    "echo": {"echo": True, "logprobs": 1, "max_tokens": 4},
    "echo only": {"echo": True, "max_tokens": 0},
    "seed": {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    "top_k and min_p": {"temperature": 1.0, "seed": 4, "top_k": 30, "min_p": 0.02},
    "n": {"temperature": 0.9, "seed": 5, "n": 3, "max_tokens": 16},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "logit_bias": {"logit_bias": {"28": 4.0, "29": -100}},
    "bad_words": {"bad_words": [" the", "("]},
    "allowed_token_ids": {"allowed_token_ids": list(range(17, 2000))},
    "min_tokens": {"min_tokens": 12, "stop": ["e"]},
    "stop id": {"stop_token_ids": list(range(260, 330)), "min_tokens": 5},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 70},
    "regex": {"structured_outputs": {"regex": r"(\d{2}-){4}\d{2}"}},
    "choice": {"structured_outputs": {"choice": ["the one of them", "the other one"]}},
    "json": {"structured_outputs": {"json": SCHEMA}},
}
CHATS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "logprobs": {"logprobs": True, "top_logprobs": 2, "max_tokens": 16},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "named tool": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look_up"}}},
    "required tool": {"tools": [TOOL], "tool_choice": "required"},
    "auto tool": {"tools": [TOOL], "tool_choice": "auto", "max_tokens": 16},
}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completion_is_the_same_without_drafting(client: OpenAI, texts: dict[str, list[int]], name: str) -> None:
    drafted = completion(client, texts["continue_code"], COMPLETIONS[name], PERFECT)
    plain = completion(client, texts["continue_code"], COMPLETIONS[name], OFF)
    assert comparable(drafted) == comparable(plain)
    details = drafted.usage.completion_tokens_details
    drafts = COMPLETIONS[name].get("max_tokens", 40) >= 3
    assert details.vericache_mode == ("draft" if drafts else "resident")
    assert plain.usage.completion_tokens_details.vericache_mode == "resident"
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
    if drafts:
        assert details.accepted_prediction_tokens > details.rejected_prediction_tokens


@pytest.mark.parametrize("name", CHATS)
def test_chat_is_the_same_without_drafting(client: OpenAI, texts: dict[str, list[int]], name: str, prose: str) -> None:
    drafted, plain = (chat(client, prose, CHATS[name], options) for options in (PERFECT, OFF))
    assert comparable(drafted) == comparable(plain)
    assert drafted.usage.completion_tokens_details.vericache_mode == "draft"


@pytest.mark.parametrize("name", ["greedy", "max_tokens", "logprobs", "seed", "n", "json", "min_tokens"])
def test_stream_adds_up_to_the_plain_answer(client: OpenAI, texts: dict[str, list[int]], name: str) -> None:
    """Text, finish reasons and usage, whatever the size of the accepted blocks (public faults 1 to 3)."""
    asked, prompt = COMPLETIONS[name], texts["continue_code"]
    plain = completion(client, prompt, asked, OFF)
    streaming = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    text: dict[int, str] = {}
    reason: dict[int, str] = {}
    usage = None
    for chunk in completion(client, prompt, streaming, PERFECT):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text[choice.index] = text.get(choice.index, "") + choice.text
            reason[choice.index] = choice.finish_reason or reason.get(choice.index, "")
    assert text == {c.index: c.text for c in plain.choices}
    assert reason == {c.index: c.finish_reason for c in plain.choices}
    assert usage is not None
    assert usage.completion_tokens == plain.usage.completion_tokens
    assert usage.completion_tokens_details.accepted_prediction_tokens > 0
    assert usage.completion_tokens_details.vericache_mode == "draft"


def test_streamed_tool_calls_are_whole(client: OpenAI, prose: str) -> None:
    """Public fault 13, with a parser of vLLM that breaks on blocks; the grammar makes the small model call the tool."""
    call = r'\[\{"name": "look_up", "arguments": \{"s": "[a-z ]{60}"\}\}\]'
    asked = {**CHATS["auto tool"], "max_tokens": 120, "structured_outputs": {"regex": call}}
    (whole,) = chat(client, prose, asked, OFF).choices[0].message.tool_calls
    streams, usages = [], []
    for options in (PERFECT, OFF):
        chunks = list(
            chat(client, prose, {**asked, "stream": True, "stream_options": {"include_usage": True}}, options)
        )
        usages.append(chunks[-1].usage)
        parts = [part for c in chunks for choice in c.choices for part in choice.delta.tool_calls or ()]
        streams.append([(part.function.name, part.function.arguments) for part in parts])
    assert streams[0] == streams[1]
    assert "".join(arguments or "" for _, arguments in streams[0]) == whole.function.arguments
    assert usages[0].completion_tokens_details.accepted_prediction_tokens > usages[0].completion_tokens / 2


def test_stop_strings_anywhere_in_a_block(client: OpenAI, texts: dict[str, list[int]]) -> None:
    """Public faults 1 and 2: text, token ids and logprobs end at the same token."""
    prompt = texts["continue_code"]
    text = completion(client, prompt, {}, OFF).choices[0].text
    for start in range(0, len(text) - 4, 7):
        asked = {"stop": [text[start : start + 4]], "logprobs": 0, "include_stop_str_in_output": start % 2 == 0}
        drafted, plain = (completion(client, prompt, asked, options) for options in (PERFECT, OFF))
        assert comparable(drafted) == comparable(plain)
        (choice,) = drafted.choices
        assert choice.finish_reason == "stop"
        assert len(choice.token_ids) == len(choice.logprobs.tokens) == drafted.usage.completion_tokens


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"vericache_mode": "sometimes"}, "vericache_mode", "'auto', 'draft', 'off' or 'certified'"),
        ({"vericache_draft_length": 0}, "vericache_draft_length", "greater than or equal to 1"),
        ({"vericache_draft_length": 1000}, "vericache_draft_length", "window"),
        ({"vericache_ratio": 2.0}, "vericache_ratio", "less than or equal to 1"),
        ({"vericache_compressor": "zip"}, "vericache_compressor", "zip"),
        ({"vericache_slot": 1}, "vericache_slot", "is not an option"),
    ],
)
def test_a_wrong_option_is_a_400_that_names_it(
    client: OpenAI, texts: dict[str, list[int]], options: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(BadRequestError) as error:
        completion(client, texts["summarise"], {}, options)
    assert error.value.param == field
    assert message in str(error.value)


def test_kv_transfer_params_are_refused(client: OpenAI, texts: dict[str, list[int]]) -> None:
    with pytest.raises(BadRequestError) as error:
        completion(client, texts["summarise"], {"kv_transfer_params": {"do_remote_prefill": True}}, {})
    assert error.value.param == "kv_transfer_params"


def test_client_that_leaves_is_forgotten(server: LiveServer, client: OpenAI, texts: dict[str, list[int]]) -> None:
    stream = completion(client, texts["summarise"], {"max_tokens": 600, "stream": True, "ignore_eos": True}, {})
    next(iter(stream))
    stream.close()
    answer = completion(client, texts["summarise"], {"max_tokens": 20, "ignore_eos": True}, {})
    assert answer.usage.completion_tokens == 20


def test_the_key_guards_every_route(server: LiveServer) -> None:
    """Public fault 32: every path of the app, known to its schema or not."""
    status, schema = server.get("/openapi.json")
    assert status == 200
    paths = {path: list(methods) for path, methods in json.loads(schema)["paths"].items()}
    assert {"/v1/completions", "/v1/chat/completions", "/vericache/status", "/live", "/tokenize"} <= set(paths)
    for path, methods in {**paths, "/vericache/": ["get"], "/docs": ["get"], "/nowhere": ["get"]}.items():
        wanted = 200 if path in ("/health", "/live", "/metrics") else 401
        for method in methods:
            assert server.get(path, "", method.upper())[0] == wanted, (method, path)
            if wanted == 401:
                assert server.get(path, "wrong", method.upper())[0] == 401


def test_status_and_page(server: LiveServer, client: OpenAI, texts: dict[str, list[int]]) -> None:
    completion(client, texts["summarise"], {}, PERFECT)
    deadline = time.monotonic() + 20
    while True:  # the last step's snapshot follows the answer
        status = json.loads(server.get("/vericache/status")[1])
        engine = status["engines"]["0"]
        if engine["gauges"]["vericache_host_store_bytes"][""] == 0 or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert status["model"] == "demo"
    assert len(engine["link_ring"]) == len(engine["page_ring"]) == engine["settings"]["window"]
    assert engine["requests"] == []
    assert any("V" in row for row in engine["timeline"].values())
    assert engine["gauges"]["vericache_host_store_bytes"][""] == 0
    code, page = server.get("/vericache/")
    assert code == 200
    assert "https://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_metrics(server: LiveServer, client: OpenAI, texts: dict[str, list[int]]) -> None:
    """All of them are there, with vLLM's labels; they count, and are at rest afterwards."""
    from vericache.engine.metrics import METRICS

    for options in (PERFECT, OFF):
        completion(client, texts["summarise"], {}, options)
    deadline = time.monotonic() + 20
    while (values := server.series())["vericache_host_store_bytes"] and time.monotonic() < deadline:
        time.sleep(0.5)  # the last step's numbers follow the answer
    ours = [line for line in server.get("/metrics", "")[1].splitlines() if line.startswith("vericache_")]
    assert all('model_name="demo"' in line for line in ours)
    suffix = {"counter": "_total", "histogram": "_count", "gauge": ""}
    silent = {"vericache_promotions", "vericache_recompressions"}
    assert {n + suffix[m.kind] for n, m in METRICS.items() if n not in silent} <= set(values)
    assert values["vericache_rounds_total"] > 0
    assert values["vericache_rounds_total"] == values["vericache_draft_length_count"]
    assert values["vericache_link_bytes_total"] > 0
    for rest in (
        "vericache_requests",
        "vericache_host_store_bytes",
        "vericache_arena_bytes",
        "vericache_link_ring_ratio",
    ):
        assert values[rest] == 0, rest


def test_the_audit_found_nothing(server: LiveServer) -> None:
    """A third of this file's requests were drawn; tests/server shows what a mismatch does."""
    deadline = time.monotonic() + 60
    while server.series()["vericache_audit_checks_total"] == 0 and time.monotonic() < deadline:
        time.sleep(1)
    values = server.series()
    assert values["vericache_audit_checks_total"] > 0
    assert values["vericache_audit_mismatches_total"] == 0


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Prometheus' promtool")
def test_promtool_finds_nothing_to_say_about_our_metrics(server: LiveServer) -> None:
    lines = server.get("/metrics", "")[1].splitlines()
    ours = "\n".join(line for line in lines if "vericache_" in line) + "\n"
    checked = subprocess.run(["promtool", "check", "metrics"], input=ours, capture_output=True, text=True, timeout=60)
    assert checked.stderr == ""
    assert checked.returncode == 0
