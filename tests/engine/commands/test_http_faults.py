"""Faults people reported of servers that speculate or offload, each as a kind, over HTTP and against plain rows."""

import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from benchmarks.server import LiveServer
from tests.engine.commands.asking import OFF, PERFECT, SCHEMA, chat, comparable, completion
from tests.engine.harness import ENGINE


def test_echo_logprobs_and_no_tokens(client: OpenAI, texts: dict[str, list[int]]) -> None:
    """Public fault 33: the whole grid is answered, alike with and without drafting; a stream says the same."""
    prompt = texts["continue_code"]
    for echo, logprobs, max_tokens in itertools.product([False, True], [None, 0, 1, 5], [0, 1, 9]):
        # With token ids asked for, vLLM leaves the prompt's text out of the echo.
        asked: dict[str, Any] = {"echo": echo, "max_tokens": max_tokens, "return_token_ids": False}
        asked |= {} if logprobs is None else {"logprobs": logprobs}
        if max_tokens == 0 and not echo:
            with pytest.raises(BadRequestError, match="max_tokens"):
                completion(client, prompt, asked, PERFECT)
            continue
        drafted, plain = (completion(client, prompt, asked, options) for options in (PERFECT, OFF))
        assert comparable(drafted) == comparable(plain), asked
        (choice,) = drafted.choices
        assert (choice.logprobs is None) == (logprobs is None)
        chunks = [c.choices[0] for c in completion(client, prompt, {**asked, "stream": True}, PERFECT)]
        assert "".join(c.text for c in chunks) == choice.text, asked
        assert [c.finish_reason for c in chunks if c.finish_reason] == [choice.finish_reason]
        if logprobs is not None:
            streamed = [t for c in chunks if c.logprobs for t in c.logprobs.tokens]
            assert streamed == choice.logprobs.tokens, asked


def test_text_split_over_tokens_and_blocks(client: OpenAI, texts: dict[str, list[int]]) -> None:
    """Characters of several tokens fall on every place of a block; a stream never shows half of one."""
    wanted = "🐈‍⬛ naïve 東京 ✓ Zoë 🇪🇺 ﷽ end"
    for length in (1, 2, 3, 5, 8):
        asked: dict[str, Any] = {"max_tokens": 100, "structured_outputs": {"choice": [wanted]}}
        options = {**PERFECT, "vericache_draft_length": length}
        answer = completion(client, texts["summarise"], asked, options)
        assert answer.choices[0].text == wanted
        assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 0
        chunks = completion(client, texts["summarise"], {**asked, "stream": True}, options)
        parts = [c.choices[0].text for c in chunks]
        assert "".join(parts) == wanted
        assert not any("\ufffd" in part for part in parts)


def test_usage_comes_when_asked_for(client: OpenAI, texts: dict[str, list[int]]) -> None:
    def usages(**asked: Any) -> list[Any]:
        chunks = completion(client, texts["summarise"], {"stream": True, "max_tokens": 20, **asked}, PERFECT)
        return [chunk.usage for chunk in chunks]

    assert not any(usages())
    *others, last = usages(stream_options={"include_usage": True})
    assert not any(others)
    assert last.completion_tokens <= 20
    found = usages(stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [u.completion_tokens for u in found]
    assert counts == sorted(counts)
    assert counts[-1] == last.completion_tokens
    assert all(u.completion_tokens_details is not None for u in found)


@pytest.mark.parametrize("options", [PERFECT, {}])
def test_context_limit_inside_a_block(client: OpenAI, texts: dict[str, list[int]], options: dict[str, Any]) -> None:
    """Public fault 14: a prompt that nearly fills the context, and drafts that would run past its end."""
    longest = ENGINE["max_model_len"]
    for room in (1, 3, 13, 30):
        prompt = (texts["summarise"] * 5)[: longest - room]
        for limit in (room, room + 50):
            asked = {"max_tokens": limit, "ignore_eos": True}
            drafted, plain = (completion(client, prompt, asked, o) for o in (options, OFF))
            assert comparable(drafted) == comparable(plain)
            assert drafted.choices[0].finish_reason == "length"
            assert drafted.usage.completion_tokens == room


def test_delivered_tokens_are_the_tokens_of_usage(client: OpenAI, texts: dict[str, list[int]]) -> None:
    """Public fault 3: whatever limit falls into a block."""
    for limit in (1, 2, 7, 8, 9, 10, 17):
        answer = completion(client, texts["continue_code"], {"max_tokens": limit, "ignore_eos": True}, PERFECT)
        assert len(answer.choices[0].token_ids) == answer.usage.completion_tokens == limit
        details = answer.usage.completion_tokens_details
        assert details.accepted_prediction_tokens < limit


def test_many_at_once_with_one_schema(client: OpenAI, texts: dict[str, list[int]], prose: str) -> None:
    """Public faults 10 to 12: a shared prefix and schema, twice as many requests as seats; all answers are valid, and
    the same as one by one. Fences around JSON, which models love, are not part of any."""
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    asked = {"response_format": wanted, "max_tokens": 60}
    texts_asked = [f"{prose[: 900 + i]} Answer in a ```json fence." for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        drafted = list(pool.map(lambda text: chat(client, text, asked, PERFECT), texts_asked))
        plain = list(pool.map(lambda text: chat(client, text, asked, OFF), texts_asked))
    assert [comparable(a) for a in drafted] == [comparable(a) for a in plain]
    for answer in drafted:
        if answer.choices[0].finish_reason == "stop":
            assert set(json.loads(answer.choices[0].message.content)) >= {"n", "s"}
        assert "```" not in answer.choices[0].message.content[:4]


def test_the_same_request_again_is_the_same(client: OpenAI, texts: dict[str, list[int]]) -> None:
    """vLLM #40896 and public fault 21: a prefix that is cached by then changes no output, and acceptance stays."""
    asked = {"max_tokens": 40, "ignore_eos": True}
    answers = [completion(client, texts["find_needle"], asked, {}) for _ in range(3)]
    assert answers[0].choices == answers[1].choices == answers[2].choices
    accepted = [a.usage.completion_tokens_details.accepted_prediction_tokens for a in answers]
    assert min(accepted) > max(accepted) / 2  # rounds may start elsewhere


def test_seeds_do_not_touch_their_neighbours(client: OpenAI, texts: dict[str, list[int]]) -> None:
    """Public fault 8: one request with a seed beside others without."""
    seeded: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": 24}
    alone = completion(client, texts["summarise"], seeded, PERFECT)
    free = {"temperature": 0.9, "max_tokens": 24}
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(lambda asked: completion(client, texts["summarise"], asked, PERFECT), [seeded, free, free, seeded])
        )
    assert answers[0].choices[0].token_ids == answers[3].choices[0].token_ids == alone.choices[0].token_ids
    assert answers[1].choices[0].token_ids != answers[2].choices[0].token_ids


def test_two_hundred_clients_that_leave(server: LiveServer, client: OpenAI, texts: dict[str, list[int]]) -> None:
    """Public fault 15: in whatever state they were, everything of theirs comes back."""

    def leave(i: int) -> None:
        asked = {"stream": True, "ignore_eos": True, "max_tokens": 200}
        stream = completion(client, texts["summarise"][: 160 + i % 60], asked, {} if i % 2 else PERFECT)
        if i % 3:
            next(iter(stream))
        time.sleep(i % 7 * 0.02)
        stream.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(200)))
    deadline = time.monotonic() + 240  # replays of the audit run on
    held = ("vericache_requests", "vericache_host_store_bytes", "vericache_arena_bytes", "vllm:num_requests_running")
    while any((values := server.series())[name] for name in held) and time.monotonic() < deadline:
        # One step takes note of those that left; it needs a request to run.
        completion(client, texts["summarise"], {"max_tokens": 2}, OFF)
        time.sleep(0.3)
    assert {name: values[name] for name in held} == dict.fromkeys(held, 0)
    answer = completion(client, texts["summarise"], {"max_tokens": 20, "ignore_eos": True}, PERFECT)
    assert answer.usage.completion_tokens == 20


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"best_of": 3}, "best_of"),
        ({"vericache_mode": "off"}, "vericache_mode"),
        ({"structured_outputs": "json"}, "structured_outputs"),
        ({"stop": ["\ud800"]}, "stop"),
    ],
)
def test_nothing_is_silently_ignored(server: LiveServer, body: dict[str, Any], field: str) -> None:
    """Fields that vLLM would drop or stumble over."""
    status, answer = server.post("/v1/completions", {"model": "demo", "prompt": "a", "max_tokens": 1, **body})
    assert status == 400
    assert json.loads(answer)["error"]["param"] == field


def test_no_adapter_means_no_adapter(server: LiveServer) -> None:
    """Public fault 24: adapters are not loaded, and a name that is none is an error rather than the base model."""
    status, answer = server.post("/v1/completions", {"model": "an-adapter", "prompt": "a", "max_tokens": 1})
    assert (status, json.loads(answer)["error"]["code"]) == (404, 404)
