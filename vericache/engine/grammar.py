"""Structured outputs of drafting requests.

Drafts are sampled under the request's own grammar: its matcher runs ahead with the known drafts, and is rewound before
the verify row, whose mask vLLM computes as for any speculative row. Unconstrained drafts would be as exact, but nearly
all of them would be rejected. Relies on ``StructuredOutputManager.grammar_bitmask`` (serial path) and on
``StructuredOutputGrammar.accept_tokens`` / ``rollback``.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from vericache.engine.detached import Detached


class Grammars:
    """``rows``: the most logits rows a step can have."""

    def __init__(self, manager: StructuredOutputManager, rows: int) -> None:
        self._manager, self._rows = manager, rows

    def advance(self, record: Detached, token: int) -> bool:
        """One more draft is known. True when nothing may follow it."""
        grammar = self._grammar(record.request)
        if grammar is None:
            return False
        if grammar.is_terminated() or not grammar.accept_tokens(record.request_id, [token]):
            return True
        record.grammar_ahead += 1
        return grammar.is_terminated()

    def rewind(self, record: Detached) -> None:
        """Back to the confirmed tokens. (Not every backend's ``rollback`` takes 0.)"""
        if record.grammar_ahead:
            grammar = self._grammar(record.request)
            assert grammar is not None
            grammar.rollback(record.grammar_ahead)
            record.grammar_ahead = 0

    def _grammar(self, request: Request) -> StructuredOutputGrammar | None:
        """None when no token of the request is constrained (yet: a reasoning parser waits for the end of thinking)."""
        structured = request.structured_output_request
        if structured is None or self._manager._get_constraint_bounds(request, ()).constraint_start > 0:
            return None
        assert isinstance(structured.grammar, StructuredOutputGrammar)
        return structured.grammar

    @contextmanager
    def drafting(self, requests: dict[str, Request], drafts: Mapping[str, Request]) -> Iterator[None]:
        """While vLLM computes the masks of a step: ``requests``, its table, also holds the draft rows' requests under
        the rows' ids; the buffer holds every logits row (vLLM sizes it by num_speculative_tokens, 0 here), and
        the parallel path, which knows no drafts, is off."""
        manager = self._manager
        if manager._grammar_bitmask is None and manager.backend is not None:
            manager._grammar_bitmask = manager.backend.allocate_token_bitmask(self._rows)
        threshold = manager.fill_bitmask_parallel_threshold
        manager.fill_bitmask_parallel_threshold = sys.maxsize
        requests.update(drafts)
        try:
            yield
        finally:
            manager.fill_bitmask_parallel_threshold = threshold
            for row_id in drafts:
                del requests[row_id]
