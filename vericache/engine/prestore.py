"""Copies of prompts' KV to the host while the prompts are still being computed.

A request that will draft needs its whole KV in host memory. Copied at once when the prompt is done, a long context
would hold up the next step; copied block by block as they fill, it is there already. A full block never changes again.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm.v1.request import Request

from vericache.engine.ops import Offload
from vericache.engine.reservations import Reservations


@dataclass
class Stored:
    """Host pages of one request, and how many of its leading blocks they hold (once the copies are done)."""

    pages: list[int]
    blocks: int = 0


class Prestore:
    """Owns the host pages of requests that are still plain rows."""

    def __init__(self, reserved: Reservations) -> None:
        self._reserved = reserved
        self._stored: dict[str, Stored] = {}

    def step(
        self, running: Iterable[Request], wanted: Callable[[Request], bool], window: int, spare: int, most: int
    ) -> list[Offload]:
        """Copies of this step, at most ``most`` blocks. A request is taken up while its prompt is computed, if it is
        ``wanted`` and the host has pages for its prompt and ``window`` tokens more, and ``spare`` pages beside."""
        present = {request.request_id: request for request in running}
        for request_id in [i for i in self._stored if i not in present]:
            self.forget(request_id)
        found = []
        for request_id, request in present.items():
            held = self._stored.get(request_id)
            if held is None and request.num_computed_tokens < request.num_prompt_tokens and wanted(request):
                held = self._take_up(request, window, spare)
            if held is None:
                continue
            # Scheduled tokens count: operations run after the steps before this one.
            full = min(request.num_computed_tokens // self._reserved.plan.block_tokens, len(held.pages))
            if full < held.blocks:  # it was preempted in between, and starts anew: full blocks stay as they were copied
                self._reserved.host.mix(held.pages[: held.blocks])
                held.blocks = full
            missing = self._missing(request, held, full, most)
            if missing:
                blocks = self._reserved.blocks.of_request(request)
                found.append(
                    Offload(request_id, tuple(blocks[i] for i in missing), tuple(held.pages[i] for i in missing))
                )
                most -= len(missing)
        return found

    def _missing(self, request: Request, held: Stored, full: int, most: int) -> list[int]:
        """The next blocks to copy; others are in the host already."""
        found: list[int] = []
        while held.blocks < full and len(found) < most:
            if self._reserved.missing(request, held.pages, held.blocks):
                found.append(held.blocks)
            held.blocks += 1
        return found

    def _take_up(self, request: Request, window: int, spare: int) -> Stored | None:
        want = self._reserved.pages_beside(request, window)
        if want + spare > self._reserved.host.free:
            return None
        pages = self._reserved.host.take(want)
        assert pages is not None
        held = self._stored[request.request_id] = Stored([*self._reserved.hold_prompt(request), *pages])
        return held

    def pages(self, request_id: str) -> list[int]:
        """Pages held for a request."""
        held = self._stored.get(request_id)
        return held.pages if held is not None else []

    def hand_over(self, request_id: str) -> int:
        """The request owns its pages itself from now on. Returns how many of its blocks they hold."""
        held = self._stored.pop(request_id, None)
        return held.blocks if held is not None else 0

    def held(self) -> dict[str, list[int]]:
        """Pages by request."""
        return {request_id: held.pages for request_id, held in self._stored.items()}

    def forget(self, request_id: str) -> None:
        """Give the pages back, when no step in flight writes to them any more."""
        held = self._stored.pop(request_id, None)
        if held is not None:
            self._reserved.give_pages(held.pages)

    def forget_all(self) -> bool:
        """False when there was nothing to give back."""
        ids = list(self._stored)
        for request_id in ids:
            self.forget(request_id)
        return bool(ids)

    def forget_cached(self) -> None:
        """vLLM has emptied its prefix cache, while no block was in use: new requests find nothing of old ones here,
        either."""
        self.forget_all()
        self._reserved.host.withdraw_all()
