"""The API key guards every route, not only vLLM's list of prefixes (public fault 32: another route to a handler)."""

import base64
import binascii

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

OPEN = ("/health", "/live", "/metrics")


class KeyOnEveryRoute(AuthenticationMiddleware):
    """Bearer tokens as in vLLM; a browser may send the key as the password of HTTP Basic authentication."""

    def __init__(self, app: ASGIApp, tokens: list[str]) -> None:
        super().__init__(app, tokens)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS" or is_open(scope):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if self.verify_token(as_bearer(headers)):
            await self.app(scope, receive, send)
            return
        error = {"message": "Unauthorized: no valid API key", "type": "Unauthorized", "param": None, "code": 401}
        response = JSONResponse({"error": error}, 401, {"WWW-Authenticate": 'Basic realm="vericache"'})
        await response(scope, receive, send)


def path_of(scope: Scope) -> str:
    """The path as routes name it, whatever ``--root-path`` is."""
    return scope.get("path", "").removeprefix(scope.get("root_path", ""))


def is_open(scope: Scope) -> bool:
    return path_of(scope).rstrip("/") in OPEN


def as_bearer(headers: Headers) -> Headers:
    """``Basic base64(user:key)`` as ``Bearer key``; anything else unchanged."""
    scheme, _, value = headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return headers
    try:
        key = base64.b64decode(value, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return headers
    return Headers({"Authorization": f"Bearer {key}"})
