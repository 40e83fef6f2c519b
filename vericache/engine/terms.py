"""How each request is served: the settings as they hold for it, and what follows from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm.v1.request import Request

from compressors import METHODS, MethodError, MethodSpec
from vericache.config import VeriCacheConfig
from vericache.engine import certified
from vericache.engine.detached import Detached
from vericache.engine.eligibility import NO_ARENA, Reason, resident_reason
from vericache.engine.plan import Bounds
from vericache.engine.prestore import Prestore
from vericache.engine.reservations import Reservations, Want
from vericache.errors import RequestError
from vericache.request_options import RequestSettings


@dataclass(frozen=True)
class Terms:
    """``texts``: by compressor that clients may choose, see ``Demotion``; ``scoring_room``: tokens of a scoring row at
    most; ``past``: records of requests that became plain rows again."""

    settings: VeriCacheConfig
    bounds: Bounds
    texts: Mapping[str, Mapping[str, Sequence[int]]]
    scoring_room: int
    reserved: Reservations
    prestore: Prestore
    past: Mapping[str, Detached]
    _asked: dict[str, RequestSettings] = field(default_factory=dict)

    def asked(self, request: Request) -> RequestSettings:
        """The settings as they hold for this request. Raises RequestError."""
        found = self._asked.get(request.request_id)
        if found is None:
            params = request.sampling_params
            extra = params.extra_args if params is not None else None
            found = RequestSettings(self.settings, extra, True, certified.refused(self.bounds.own_rows))
            self._asked[request.request_id] = found
        return found

    def forget(self, request_id: str) -> None:
        self._asked.pop(request_id, None)

    @property
    def none_known(self) -> bool:
        return not self._asked

    def always(self, request: Request) -> bool:
        """The request drafts whether or not blocks run short."""
        try:
            return self.asked(request).always
        except RequestError:
            return False

    def leaves(self, request: Request) -> bool:
        """As soon as it can."""
        return self.always(request) and self.resident_reason(request) is None

    def resident_reason(self, request: Request) -> Reason | None:
        """Why a request stays a plain vLLM row; None when it may draft, resources permitting."""
        try:
            asked = self.asked(request)
        except RequestError as error:  # the front door checks it; an engine must not fail over one request
            return Reason("bad_option", str(error))
        if self.settings.mode == "off" or asked.off:
            return Reason("off", "mode is off")
        if not self.reserved.plan.drafts:
            return NO_ARENA
        past = self.past.get(request.request_id)
        if past is not None and past.recoveries > self.settings.max_recoveries:
            return Reason("failures", f"demotion or reload failed {past.recoveries} times")
        if reason := resident_reason(request, asked.min_prompt_tokens):
            return reason
        try:
            self.method(request)
        except MethodError as error:
            return Reason("method", str(error))
        return None

    def method(self, request: Request) -> MethodSpec:
        """The request's method with scoring rows that fit in a step and behind the context. Raises MethodError."""
        config = self.asked(request).config
        if config.compressor not in self.texts:  # the front door refuses it
            raise MethodError(f"this server lets no client choose compressor {config.compressor!r}")
        room = min(self.scoring_room, self.bounds.max_model_len - request.num_tokens - 1)
        return METHODS[config.compressor].fit(config.method, room)

    def want(self, request: Request) -> Want:
        """What the request must be given to draft."""
        return self.reserved.want(request, *self._of(request))

    def open(self, request: Request) -> Detached | None:
        """Give it that; None, and nothing taken, when any of it is missing."""
        return self.reserved.open(request, *self._of(request))

    def _of(self, request: Request) -> tuple[MethodSpec, int, int, list[int]]:
        """Method, tail and window with which the request drafts, and the host pages it has already."""
        window = self.settings.window
        tail = min(self.settings.tail_tokens, request.max_tokens) + window
        return self.method(request), tail, window, self.prestore.pages(request.request_id)
