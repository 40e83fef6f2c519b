"""The endpoint plugin: routes and middleware on vLLM's own app. ``vericache serve`` allows it by name."""

from argparse import Namespace
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import State
from vllm import envs

from server.access import KeyOnEveryRoute
from server.audit import Auditor
from server.checks import RequestChecks
from server.deltas import stream_token_by_token
from server.draining import Draining, watch_shutdown
from server.status import router
from server.usage import UsageDetails, count_outputs
from vericache.config import VeriCacheConfig
from vericache.engine.support import certified_refused


class VeriCacheEndpoints:
    """Implements ``vllm.plugins.endpoint_plugins.interface.EndpointPlugin``."""

    name = "vericache"
    required_tasks: tuple[Any, ...] = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """The middleware added last is the outermost: no key, no look at the body."""
        app.include_router(router)
        app.add_middleware(UsageDetails)
        app.add_middleware(RequestChecks, config=VeriCacheConfig.of(app.state.args.additional_config))
        app.add_middleware(Draining)
        if tokens := [key for key in (app.state.args.api_key or [envs.VLLM_API_KEY]) if key]:
            app.add_middleware(KeyOnEveryRoute, tokens=tokens)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        if engine_client is not None:
            watch_shutdown(engine_client, state)
            state.certified_refused = certified_refused(engine_client.vllm_config)
            count_outputs(engine_client)
            config = VeriCacheConfig.of(args.additional_config)
            if config.audit_share > 0:
                model = engine_client.model_config
                dtype = str(model.dtype).removeprefix("torch.")
                Auditor(engine_client, config, served_name(model.served_model_name), dtype).watch()
            if args.tool_call_parser or args.structured_outputs_config.reasoning_parser:
                stream_token_by_token(engine_client)


def served_name(names: str | list[str]) -> str:
    """As in vLLM's own metrics: the first of the names."""
    return names if isinstance(names, str) else names[0]
