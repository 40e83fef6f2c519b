"""After SIGTERM: what runs is finished, what is new is sent elsewhere.

vLLM's engine rejects requests that arrive while it drains (``_reject_add_in_shutdown``): the client sees an aborted
answer, and ``/health`` stays 200. A load balancer needs a 503 on both.
"""

from functools import wraps
from typing import Any

from starlette.datastructures import State
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from server.access import path_of


def watch_shutdown(engine_client: Any, state: State) -> None:
    """vLLM's launcher calls ``engine_client.shutdown`` first thing after the signal."""
    shutdown = engine_client.shutdown
    state.draining = False

    @wraps(shutdown)
    def noting(*args: Any, **kwargs: Any) -> Any:
        state.draining = True
        return shutdown(*args, **kwargs)

    engine_client.shutdown = noting


class Draining:
    """503 for new work and for ``/health`` while the server drains."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        draining = scope["type"] == "http" and getattr(scope["app"].state, "draining", False)
        if draining and (scope["method"] == "POST" or path_of(scope) == "/health"):
            content = {"message": "the server is shutting down", "type": "ServiceUnavailableError", "code": 503}
            await JSONResponse({"error": content}, 503, {"Retry-After": "1"})(scope, receive, send)
            return
        await self.app(scope, receive, send)
