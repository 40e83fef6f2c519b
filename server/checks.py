"""Requests are refused at the door: a wrong or reserved option is a 400 that names its field, before any work."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vericache.certified.certificate import Bound
from vericache.config import VeriCacheConfig
from vericache.errors import RequestError
from vericache.request_options import NONE, RequestSettings

SURROGATES = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")  # escaped, or in bytes; in pairs they are fine


class RequestChecks:
    """``config`` says what clients may ask for."""

    def __init__(self, app: ASGIApp, config: VeriCacheConfig) -> None:
        self.app, self.config = app, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        messages = [message async for message in _body(receive)]
        try:
            refused = getattr(scope["app"].state, "certified_refused", NONE) if "app" in scope else NONE
            check(b"".join(m.get("body", b"") for m in messages), self.config, refused)
        except RequestError as error:
            content = {"message": str(error), "type": "BadRequestError", "param": error.field, "code": 400}
            await JSONResponse({"error": content}, 400)(scope, receive, send)
            return
        await self.app(scope, _replay(messages, receive), send)


def check(body: bytes, config: VeriCacheConfig, certified_refused: Mapping[Bound, str] = NONE) -> None:
    """Raises RequestError. Bodies that are no JSON object are vLLM's to refuse."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return
    if not isinstance(request, dict):
        return
    if SURROGATES.search(body):
        _check_unicode(request)
    _check_fields(request)
    for options in _options(request):
        RequestSettings(config, options, certified_refused=certified_refused)


def _check_fields(request: Mapping[str, Any]) -> None:
    """Fields that vLLM would stumble over or silently drop."""
    for field in request:
        if field.startswith("vericache_"):
            raise RequestError(field, "belongs into vllm_xargs")
    grammar, best_of = request.get("structured_outputs"), request.get("best_of")
    if grammar is not None and not isinstance(grammar, dict):  # vLLM's validators look into it first: a 500
        raise RequestError("structured_outputs", f"expected an object, got {json.dumps(grammar)[:100]}")
    if best_of is not None and best_of != request.get("n", 1):
        raise RequestError(
            "best_of", f"got {json.dumps(best_of)[:100]}, but vLLM ranks no sequences; use n and leave it out"
        )
    if request.get("kv_transfer_params") is not None:
        raise RequestError("kv_transfer_params", "this server moves KV itself and hands none over; leave it out")
    if isinstance(items := request.get("input"), list):
        for number, item in enumerate(items):
            _check_item(number, item)


def _check_item(number: int, item: object) -> None:
    """One of ``/v1/responses``. vLLM's ``_construct_message_from_response_item`` reads the text of an assistant's first
    part, and ``call_id`` and ``name`` of a custom tool call, without a look at what is there: a 500."""
    if not isinstance(item, dict):
        return
    content = item.get("content")
    if item.get("role") == "assistant" and isinstance(content, list):
        first = content[0] if content else None
        if not isinstance(first, dict) or not isinstance(first.get("text"), str):
            found = json.dumps(first)[:100]
            raise RequestError(
                "input", f"item {number}: expected an assistant's content to begin with text, got {found}"
            )
    if item.get("type") == "custom_tool_call":
        missing = [field for field in ("call_id", "name") if not isinstance(item.get(field), str)]
        if missing:
            raise RequestError("input", f"item {number}: a custom tool call without {' and '.join(missing)}")


def _check_unicode(request: Mapping[str, Any]) -> None:
    """Text that has no UTF-8 form cannot travel to the engine; JSON's escapes allow it."""
    for field, value in request.items():
        try:
            json.dumps({field: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            name = field.encode(errors="backslashreplace").decode()
            found = error.object[error.start : error.end].encode(errors="backslashreplace").decode()
            raise RequestError(name, f"holds {found}, half of a surrogate pair; expected Unicode text") from None


def _options(request: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Wherever a body can carry extra arguments of the sampler."""
    parameters = request.get("sampling_params")
    places = [request.get("vllm_xargs"), parameters.get("extra_args") if isinstance(parameters, dict) else None]
    yield from (place for place in places if isinstance(place, dict))


async def _body(receive: Receive) -> Any:
    while True:
        message = await receive()
        yield message
        if message["type"] != "http.request" or not message.get("more_body", False):
            return


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """The messages read already, then the rest (a disconnect)."""
    pending = iter(messages)

    async def replay() -> Message:
        found = next(pending, None)
        return await receive() if found is None else found

    return replay
