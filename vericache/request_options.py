"""What a client may ask of VeriCache for one request: ``vericache_*`` names in ``vllm_xargs`` (HTTP) or in
``SamplingParams.extra_args``. Nothing here can steer positions, blocks or ownership: those never come from a client."""

import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vericache.config import VeriCacheConfig
from vericache.errors import RequestError

PREFIX = "vericache_"


class RequestOptions(BaseModel):
    """``None`` means: as the server is configured."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    mode: Literal["auto", "draft", "off"] = Field(
        "auto",
        description="auto: the server decides; draft: draft at once, even below min_prompt_tokens; off: full KV only",
    )
    draft_length: int | None = Field(None, ge=1, description="drafts a round aims at")
    compressor: str | None = Field(None, description="scoring method")
    counts: str | None = Field(None, description="how kept tokens are spread")
    selector: str | None = Field(None, description="how a head's tokens are chosen")
    ratio: float | None = Field(None, gt=0, le=1, description="kept fraction of the context")


class RequestSettings:
    """The server's settings as they hold for one request.

    Raises:
        RequestError: an unknown name, one the server does not allow, or a wrong value; ``field`` names it.
    """

    def __init__(
        self, server: VeriCacheConfig, extra_args: Mapping[str, Any] | None = None, trusted: bool = False
    ) -> None:
        """``trusted``: what the server allows clients was checked at the door already."""
        options = parse(extra_args or {}, tuple(RequestOptions.model_fields) if trusted else server.request_options)
        changes = options.model_dump(exclude={"mode"}, exclude_none=True)
        if changes.get("compressor", server.compressor) != server.compressor:
            changes["compressor_options"] = {}  # the server's belong to its own method
        self.config = _changed(server, changes)
        self.off = options.mode == "off"
        self.always = options.mode == "draft" or server.mode == "draft"  # drafts whether or not the KV pool has room
        self.draft_policy = server.draft_policy if options.draft_length is None else "fixed"
        self.min_prompt_tokens = server.min_prompt_tokens
        if options.mode == "draft":  # the shortest prompt that leaves room for sinks and recent tokens
            self.min_prompt_tokens = math.ceil(self.config.method.least / self.config.ratio)


def parse(extra_args: Mapping[str, Any], allowed: tuple[str, ...]) -> RequestOptions:
    asked = {name.removeprefix(PREFIX): value for name, value in extra_args.items() if name.startswith(PREFIX)}
    for name in asked:
        if name not in RequestOptions.model_fields:
            near = get_close_matches(name, RequestOptions.model_fields, n=1) or list(RequestOptions.model_fields)
            raise RequestError(PREFIX + name, "is not an option; there is " + ", ".join(PREFIX + n for n in near))
        if name not in allowed:
            names = ", ".join(PREFIX + n for n in allowed) or "none"
            raise RequestError(PREFIX + name, f"is not allowed by this server (request_options allows: {names})")
    try:
        return RequestOptions(**asked)
    except ValidationError as error:
        first = error.errors()[0]
        raise RequestError(f"{PREFIX}{first['loc'][0]}", f"{first['msg']}, got {first['input']!r}") from None


def _changed(server: VeriCacheConfig, changes: Mapping[str, Any]) -> VeriCacheConfig:
    """``server`` with the changes, validated as a whole."""
    if not changes:
        return server
    try:
        return VeriCacheConfig(**{**server.model_dump(), **changes})
    except ValidationError as error:
        names = ", ".join(PREFIX + name for name in changes if name != "compressor_options")
        problems = "; ".join(e["msg"].removeprefix("Value error, ") for e in error.errors())
        raise RequestError(names, problems) from None
