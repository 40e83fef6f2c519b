"""What became of a request's drafts, or of its certified decode, in ``usage.completion_tokens_details``."""

import json
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.access import path_of

PATHS = ("/v1/completions", "/v1/chat/completions")


@dataclass
class Tally:
    """Drafts of all sequences of one HTTP request."""

    accepted: int = 0
    rejected: int = 0
    mode: str | None = None
    certified: dict[str, Any] | None = None  # of the sequence that finished last

    def add(self, output: Any) -> None:
        """A ``RequestOutput``; its finished sequences carry ``spec_decode_metrics``."""
        for sequence in output.outputs:
            if metrics := sequence.spec_decode_metrics:
                accepted = sum(j * n for j, n in enumerate(metrics.histogram))
                self.accepted += accepted
                self.rejected += metrics.num_draft_tokens - accepted
        if summary := (output.kv_transfer_params or {}).get("vericache"):
            # Several sequences: the mode of any that was not resident.
            self.mode = summary["mode"] if self.mode in (None, "resident") else self.mode
            self.certified = summary.get("certified", self.certified)

    def details(self, given: dict[str, Any] | None) -> dict[str, Any]:
        ours = {"accepted_prediction_tokens": self.accepted, "rejected_prediction_tokens": self.rejected}
        certified = {} if self.certified is None else {"vericache_certified": self.certified}
        return {**(given or {}), **ours, "vericache_mode": self.mode, **certified}


_tally: ContextVar[Tally | None] = ContextVar("tally", default=None)


def count_outputs(engine_client: Any) -> None:
    """Every output the engine yields is counted for the HTTP request that asked for it."""
    generate = engine_client.generate

    @wraps(generate)
    async def counting(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        tally = _tally.get()
        async for output in generate(*args, **kwargs):
            if tally is not None:
                tally.add(output)
            yield output

    engine_client.generate = counting


class UsageDetails:
    """Adds the details to every ``usage`` object of a completion, plain or streamed."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or path_of(scope) not in PATHS:
            await self.app(scope, receive, send)
            return
        tally = Tally()
        _tally.set(tally)
        await self.app(scope, receive, Rewriter(send, tally))


class Rewriter:
    """An ASGI ``send``: JSON is held until it is complete, events pass one by one."""

    def __init__(self, send: Send, tally: Tally) -> None:
        self._send, self._tally = send, tally
        self._held: Message | None = None  # the start of a JSON response
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            if kind.startswith(b"application/json"):
                self._held = message
                return
        elif message["type"] == "http.response.body":
            if self._held is not None:
                self._body += message.get("body", b"")
                if message.get("more_body", False):
                    return
                start, self._held = self._held, None
                message = {**message, "body": self._with_details(self._body)}
                length = str(len(message["body"])).encode()
                headers = [(k, length if k == b"content-length" else v) for k, v in start["headers"]]
                await self._send({**start, "headers": headers})
            elif b'"usage"' in message.get("body", b""):
                lines = message["body"].split(b"\n")
                message = {**message, "body": b"\n".join(map(self._event, lines))}
        await self._send(message)

    def _event(self, line: bytes) -> bytes:
        start, data, rest = line.partition(b"data: ")
        return line if start or not data else data + self._with_details(rest)

    def _with_details(self, body: bytes) -> bytes:
        try:
            answer = json.loads(body)
        except ValueError:
            return body
        usage = answer.get("usage") if isinstance(answer, dict) else None
        if not isinstance(usage, dict):
            return body
        usage["completion_tokens_details"] = self._tally.details(usage.get("completion_tokens_details"))
        return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()
