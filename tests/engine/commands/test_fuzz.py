"""Whatever a client sends, the server answers or refuses: no 5xx, no stream that breaks, alive afterwards."""

import json
from collections import Counter
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from openai import OpenAI
from schemathesis import GenerationMode

from benchmarks.server import LiveServer
from tests.engine.commands.conftest import KEY

HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
MESSAGES = [{"role": "user", "content": "Say it."}]
# A small request that is answered, per path: what is generated replaces some of its fields.
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Say it.", "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/chat/completions/batch": {"messages": [MESSAGES, MESSAGES], "max_tokens": 2},
    "/v1/responses": {"input": "Say it.", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/generative_scoring": {"query": "Is it?", "items": ["a", "b"], "label_token_ids": [1, 2]},
    "/tokenize": {"prompt": "Say it."},
    "/detokenize": {"tokens": [1, 2]},
}
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n")
# JSON that many a reader trips over, as text: Python cannot spell all of it.
NASTY = ["-1", "0.5", "1e400", "NaN", "9223372036854775808", "true", '""', "[]", "{}", "[[1e400]]", '"\\ud800"']


def send(server: LiveServer, path: str, body: str) -> int:
    answer = requests.post(server.url + path, data=body.encode(), headers=HEADERS, timeout=60)
    assert answer.status_code < 500, (path, body, answer.text)
    assert answer.status_code != 200 or '"error":{' not in answer.text, (path, body, answer.text)  # within a stream
    return answer.status_code


def bounded(path: str, body: dict[str, Any]) -> str:
    """As JSON. Long answers cost time and show nothing new; values of a wrong type stay."""
    body = {"model": "demo", **body}
    limits = {
        k: min(body[k], 2) if type(body.get(k)) is int else body.get(k) for k in LIMITS if k in {*body, *GOOD[path]}
    }
    return json.dumps(body | {k: 2 if v is None else v for k, v in limits.items()})


@pytest.mark.parametrize("path", GOOD)
def test_generated_requests(server: LiveServer, path: str) -> None:
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json", headers=HEADERS)
    codes: Counter[int] = Counter()
    for mode in GenerationMode:
        cases = schema[path]["POST"].as_strategy(generation_mode=mode)

        @settings(
            max_examples=6, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=cases, data=st.data())
        def run(case: Any, data: st.DataObject) -> None:
            made = case.body if isinstance(case.body, dict) else {}
            names = sorted(set(made) - {"model"})
            chosen = data.draw(st.lists(st.sampled_from(names), max_size=2, unique=True)) if names else []
            some = {name: made[name] for name in chosen}
            codes[send(server, path, bounded(path, GOOD[path] | some))] += 1
            codes[send(server, path, bounded(path, made))] += 1

        run()
    assert set(codes) <= {200, 400, 404, 422}
    assert codes[200] >= 6


def test_the_other_routes(server: LiveServer) -> None:
    """Without a body, and with parameters of every kind: an answer, a refusal, or an honest 501."""
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json", headers=HEADERS)
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path in GOOD:
            continue

        @settings(
            max_examples=5, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(case=operation.as_strategy())
        def run(case: Any) -> None:
            assert case.call(headers=HEADERS, timeout=60).status_code in {200, 400, 404, 405, 422, 501}

        run()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_every_field_with_every_nasty_value(server: LiveServer, path: str) -> None:
    schema = json.loads(server.get("/openapi.json")[1])
    body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = schema["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"]
    assert len(fields) > 40
    for i, field in enumerate(fields):
        others = {k: v for k, v in {"model": "demo", **GOOD[path]}.items() if k != field}
        for value in NASTY[i % 3 :: 3] if field not in LIMITS else NASTY[:4]:
            send(server, path, json.dumps(others)[:-1] + f', "{field}": {value}}}')


def test_the_server_is_alive_after_all_that(server: LiveServer, client: OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt="Say it.", max_tokens=5, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert server.process.poll() is None
