"""Details are added to every usage object, and nothing else changes."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from server.usage import Rewriter, Tally

SPEC = SimpleNamespace(histogram=[1, 0, 2, 1], num_draft_tokens=12)  # 2 + 2 + 3 accepted in four rounds


def output(mode: str | None = "draft", metrics: Any = SPEC) -> Any:
    summary = None if mode is None else {"vericache": {"mode": mode}}
    return SimpleNamespace(outputs=[SimpleNamespace(spec_decode_metrics=metrics)], kv_transfer_params=summary)


def tally() -> Tally:
    found = Tally()
    found.add(output())
    return found


DETAILS = {"accepted_prediction_tokens": 7, "rejected_prediction_tokens": 5, "vericache_mode": "draft"}


def rewritten(kind: bytes, *bodies: bytes) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        send_through = Rewriter(send, tally())
        length = str(sum(map(len, bodies))).encode()
        headers = [(b"content-type", kind), (b"content-length", length), (b"x-request-id", b"7")]
        await send_through({"type": "http.response.start", "status": 200, "headers": headers})
        for i, body in enumerate(bodies):
            await send_through({"type": "http.response.body", "body": body, "more_body": i < len(bodies) - 1})

    asyncio.run(run())
    return sent


def test_several_sequences_add_up() -> None:
    found = tally()
    found.add(output("resident"))
    found.add(output(None, None))
    assert (found.accepted, found.rejected, found.mode) == (14, 10, "draft")


def test_json_in_pieces() -> None:
    body = json.dumps(
        {"usage": {"completion_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 1}}}
    ).encode()
    start, whole = rewritten(b"application/json", body[:10], body[10:])
    usage = json.loads(whole["body"])["usage"]
    assert usage == {"completion_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 1, **DETAILS}}
    assert dict(start["headers"])[b"content-length"] == str(len(whole["body"])).encode()
    assert dict(start["headers"])[b"x-request-id"] == b"7"


def test_events_pass_one_by_one() -> None:
    first = b'data: {"choices":[{"text":"a \\"usage\\" of words"}]}\n\n'
    last = b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\ndata: [DONE]\n\n'
    _, one, two = rewritten(b"text/event-stream; charset=utf-8", first, last)
    assert json.loads(one["body"].removeprefix(b"data: ")) == json.loads(first.removeprefix(b"data: "))
    event, done, rest = two["body"].split(b"\n\n")
    assert json.loads(event.removeprefix(b"data: "))["usage"]["completion_tokens_details"] == DETAILS
    assert (done, rest) == (b"data: [DONE]", b"")


def test_what_has_no_usage_is_left_alone() -> None:
    for body in (b'{"error":{"message":"usage"}}', b"[1]", b'{"usage":null}', b"not json"):
        assert rewritten(b"application/json", body)[1]["body"] == body
