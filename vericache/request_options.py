"""What a client may ask of VeriCache for one request: ``vericache_*`` names in ``vllm_xargs`` (HTTP) or in
``SamplingParams.extra_args``. Nothing here can steer positions, blocks or ownership: those never come from a client."""

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vericache.certified.attention import Policy
from vericache.certified.certificate import Bound, Target
from vericache.config import VeriCacheConfig
from vericache.errors import RequestError

PREFIX = "vericache_"
NONE: Mapping[Bound, str] = MappingProxyType({})


class RequestOptions(BaseModel):
    """``None`` means: as the server is configured."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    mode: Literal["auto", "draft", "off", "certified"] = Field(
        "auto",
        description="auto: the server decides; draft: draft at once, even below min_prompt_tokens; off: full KV only; "
        "certified: attention within epsilon, without drafts",
    )
    draft_length: int | None = Field(None, ge=1, description="drafts a round aims at")
    compressor: str | None = Field(None, description="scoring method")
    counts: str | None = Field(None, description="how kept tokens are spread")
    selector: str | None = Field(None, description="how a head's tokens are chosen")
    ratio: float | None = Field(None, gt=0, le=1, description="kept fraction of the context")
    bound: Bound | None = Field(None, description="certified: what epsilon is about, denominator or output")
    epsilon: float | None = Field(None, gt=0, lt=1, description="certified: relative error of what bound names")
    delta: float | None = Field(None, gt=0, lt=1, description="certified: probability to exceed it, of each query")


class RequestSettings:
    """The server's settings as they hold for one request. ``certified``: how its decode is certified, if it is.

    Raises:
        RequestError: an unknown name, one the server does not allow, or a wrong value; ``field`` names it.
    """

    def __init__(
        self,
        server: VeriCacheConfig,
        extra_args: Mapping[str, Any] | None = None,
        trusted: bool = False,
        certified_refused: Mapping[Bound, str] = NONE,
    ) -> None:
        """``trusted``: what the server allows clients was checked at the door already. ``certified_refused``: the
        bounds that this engine cannot certify, and why (``engine.support.certified_refused``)."""
        allowed = tuple(RequestOptions.model_fields) if trusted else server.request_options
        options = parse(extra_args or {}, allowed)
        asked = options.model_dump(exclude={"mode"}, exclude_none=True)
        changes: dict[str, Any] = dict(asked)
        if options.mode == "certified":
            check_certified(server, options, allowed, certified_refused.get(options.bound or server.bound))
            # The bound is of independent draws, and a head that keeps next to nothing would fetch next to everything.
            changes = {"counts": "uniform", **changes, "selector": "poisson"}
        elif given := [name for name in ("bound", "epsilon", "delta") if name in changes]:
            raise RequestError(PREFIX + given[0], f"holds for vericache_mode certified, got mode {options.mode}")
        if changes.get("compressor", server.compressor) != server.compressor:
            changes["compressor_options"] = {}  # the server's belong to its own method
        self.config = _changed(server, changes, list(asked))
        self.off = options.mode == "off"
        # Drafts, or decodes certified rows, whether or not the KV pool has room.
        self.always = options.mode in ("draft", "certified") or server.mode == "draft"
        self.draft_policy = server.draft_policy if options.draft_length is None else "fixed"
        self.certified: Policy | None = None
        if options.mode == "certified":
            target = Target(self.config.epsilon, self.config.delta, self.config.bound)
            self.certified = Policy(target, self.config.sketch_radius)
        self.min_prompt_tokens = server.min_prompt_tokens
        if options.mode in ("draft", "certified"):  # the shortest prompt that leaves room for sinks and recent tokens
            self.min_prompt_tokens = math.ceil(self.config.method.least / self.config.ratio)


def check_certified(
    server: VeriCacheConfig, options: RequestOptions, allowed: tuple[str, ...], refused: str | None
) -> None:
    """``refused``: why the engine cannot certify what the request is about. Raises RequestError where this server
    cannot, or may not, decode this request by certified attention."""
    mode = PREFIX + "mode"
    if "epsilon" not in allowed:
        raise RequestError(
            mode, "certified is not exact and not allowed by this server (request_options does not name epsilon)"
        )
    if refused is not None:
        raise RequestError(mode, f"certified is not served here: {refused}")
    if server.mode == "off":
        raise RequestError(mode, "certified needs a server whose mode is draft, this one's is off")
    if server.page_format != "plain":
        raise RequestError(
            mode, f"certified reads exact keys and values, this server's page_format is {server.page_format}"
        )
    if options.selector not in (None, "poisson"):
        raise RequestError(PREFIX + "selector", f"is {options.selector}, expected poisson with mode certified")


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
        name, given = str(first["loc"][0]), first["input"]
        near = get_close_matches(given, _choices(name), n=1) if isinstance(given, str) else []
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise RequestError(PREFIX + name, f"{first['msg']}, got {given!r}{meant}") from None


def _choices(name: str) -> list[str]:
    """The names that an option can be, if it is one of several."""
    kinds = (RequestOptions.model_fields[name].annotation, *get_args(RequestOptions.model_fields[name].annotation))
    return [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]


def _changed(server: VeriCacheConfig, changes: Mapping[str, Any], asked: Sequence[str]) -> VeriCacheConfig:
    """``server`` with the changes, validated as a whole; ``asked`` are those that the client named."""
    if not changes:
        return server
    try:
        return VeriCacheConfig(**{**server.model_dump(), **changes})
    except ValidationError as error:
        names = ", ".join(PREFIX + name for name in asked or ("mode",))
        problems = "; ".join(e["msg"].removeprefix("Value error, ") for e in error.errors())
        raise RequestError(names, problems) from None
