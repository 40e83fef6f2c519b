"""After SIGTERM: what runs is finished, what is new is sent elsewhere, what takes too long is ended.

vLLM's engine rejects requests that arrive while it drains (``_reject_add_in_shutdown``): the client sees an aborted
answer, and ``/health`` stays 200. A load balancer needs a 503 on both. Of a request that outlasts the shutdown timeout
nothing is heard any more: ``AsyncLLM.shutdown`` ends the engine and cancels the task that would tell, the client waits
until it tires, and the server for the client.
"""

import asyncio
from functools import wraps
from typing import Any

from starlette.datastructures import State
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from server.access import path_of


def watch_shutdown(engine_client: Any, state: State) -> None:
    """Call from the server's event loop. vLLM's launcher calls ``engine_client.shutdown``, in a thread, first thing
    after the signal; it returns when the engine is gone."""
    shutdown, loop = engine_client.shutdown, asyncio.get_running_loop()
    state.draining = False

    def end_what_is_left() -> None:
        """As aborted, with the tokens there are (``finish_reason`` is "abort")."""
        processor = engine_client.output_processor
        processor.abort_requests(list(processor.request_states), internal=True)

    @wraps(shutdown)
    def noting(*args: Any, **kwargs: Any) -> Any:
        state.draining = True
        try:
            return shutdown(*args, **kwargs)
        finally:
            loop.call_soon_threadsafe(end_what_is_left)

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
