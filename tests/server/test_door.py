"""The key and the request checks, in front of an app that answers everything."""

import asyncio
import base64
import json
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.testclient import TestClient

from server.access import KeyOnEveryRoute
from server.checks import RequestChecks
from server.draining import Draining, watch_shutdown
from vericache.config import VeriCacheConfig

BAD = {"vllm_xargs": {"vericache_mode": "sometimes"}}


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def echo(path: str, request: Request) -> Any:
        return {"body": (await request.body()).decode()}

    app.add_middleware(RequestChecks, config=VeriCacheConfig())
    app.add_middleware(Draining)
    app.add_middleware(KeyOnEveryRoute, tokens=["one", "two"])
    return TestClient(app)


def test_open_routes_need_no_key(client: TestClient) -> None:
    for path in ("/health", "/live", "/metrics", "/metrics/"):
        assert client.get(path).status_code == 200


@pytest.mark.parametrize(
    "path", ["/", "/v1/models", "/vericache/", "/healthy", "/health/x", "/tokenize", "//health/.."]
)
def test_every_other_route_needs_one(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 401
    for value in ("Bearer three", "Bearer", "one", "Basic !", "Basic " + base64.b64encode(b"\xff:\xff").decode()):
        answer = client.get(path, headers={"Authorization": value})
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == 401
    password = base64.b64encode(b"anyone:two").decode()
    for value in ("Bearer one", "bearer two", f"Basic {password}"):
        assert client.get(path, headers={"Authorization": value}).status_code == 200


def test_the_key_comes_before_the_body(client: TestClient) -> None:
    assert client.post("/v1/completions", json=BAD).status_code == 401


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (BAD, "vericache_mode"),
        ({"sampling_params": {"extra_args": {"vericache_ratio": 0.5}}}, "vericache_ratio"),
        ({"kv_transfer_params": {"x": 1}}, "kv_transfer_params"),
        ({"vericache_mode": "off"}, "vericache_mode"),
        ({"best_of": 2}, "best_of"),
        ({"structured_outputs": [1e300]}, "structured_outputs"),
        ({"model": "m", "stop": ["\ud83d"]}, "stop"),
        ({"tools": [{"function": {"name": "\udc08"}}]}, "tools"),
        ({"\ud800": 1}, "\\ud800"),
        ({"input": ["a", {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]}, "input"),
        ({"input": [{"role": "assistant", "type": "message", "content": []}]}, "input"),
        ({"input": [{"role": "assistant", "content": ["text"]}]}, "input"),
        ({"input": [{"type": "custom_tool_call", "call_id": 3, "name": "f"}]}, "input"),
    ],
)
def test_a_bad_option_is_refused_wherever_it_stands(client: TestClient, body: Any, param: str) -> None:
    answer = client.post("/anything", content=json.dumps(body), headers={"Authorization": "Bearer one"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"], error["type"]) == (param, 400, "BadRequestError")
    assert param in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        '{"vllm_xargs": {"vericache_mode": "off", "mine": 1}}',
        "[1]",
        "{",
        "",
        '{"vllm_xargs": 3}',
        '{"stop": "\\ud83d\\udc08"}',
        '{"stop": "🐈"}',
        '{"structured_outputs": null, "n": 2, "best_of": 2}',
        '{"input": [1, {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}, {"content": []}]}',
        '{"input": [{"role": "assistant", "content": "a"}, {"type": "custom_tool_call", "call_id": "1", "name": "f"}]}',
    ],
)
def test_other_bodies_arrive_as_they_were(client: TestClient, body: str) -> None:
    answer = client.post("/v1/completions", content=body, headers={"Authorization": "Bearer one"})
    assert answer.status_code == 200
    assert answer.json() == {"body": body}


def test_new_work_is_refused_while_the_server_drains(client: TestClient) -> None:
    class Processor:
        def __init__(self) -> None:
            self.request_states = {"a": None, "b": None}

        def abort_requests(self, ids: list[str], internal: bool) -> None:
            assert internal
            for each in ids:
                del self.request_states[each]

    class Engine:
        def __init__(self) -> None:
            self.output_processor = Processor()

        def shutdown(self, timeout: float) -> float:
            return timeout

    engine, app = Engine(), client.app
    key = {"Authorization": "Bearer one"}

    async def shut_down() -> float:
        watch_shutdown(engine, app.state)  # type: ignore[attr-defined]
        assert client.post("/v1/completions", json={}, headers=key).status_code == 200
        return await asyncio.to_thread(engine.shutdown, timeout=3)

    assert asyncio.run(shut_down()) == 3
    assert not engine.output_processor.request_states, "what outlasts the timeout is ended, not forgotten"
    refused = client.post("/v1/completions", json={}, headers=key)
    assert (refused.status_code, refused.json()["error"]["code"], refused.headers["retry-after"]) == (503, 503, "1")
    assert client.get("/health").status_code == 503
    assert client.post("/v1/completions", json={}).status_code == 401
    for path in ("/live", "/metrics", "/v1/models"):
        assert client.get(path, headers=key).status_code == 200
