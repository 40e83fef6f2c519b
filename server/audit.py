"""The audit: a share of the finished drafted requests is replayed on full KV and compared, token for token.

A replay is the same request with drafting off, one at a time, when the server is idle (or has not been for a while). A
difference outside a near tie counts as a mismatch, is logged with both tokens, and leaves a reproducer file.
"""

import asyncio
import hashlib
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from prometheus_client import Counter
from vllm.sampling_params import RequestOutputKind, SamplingParams

from vericache.config import VeriCacheConfig

logger = logging.getLogger("vllm.vericache.audit")  # under vLLM's handler
WAITING = 16  # finished requests kept for a replay; further ones are skipped
PATIENCE = 10.0  # seconds to wait for an idle server
LOWEST = 1_000_000  # for --scheduling-policy priority: after everybody else
# A first divergence within this difference of log probabilities is a near tie: what the dtype's rounding moves.
TIES = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}

CHECKS = Counter("vericache_audit_checks", "Finished requests replayed on full KV.", ["model_name"])
MISMATCHES = Counter("vericache_audit_mismatches", "Replays that differ outside a near tie.", ["model_name"])
SKIPPED = Counter("vericache_audit_skipped", "Requests drawn but not replayed.", ["model_name", "reason"])


@dataclass
class Case:
    """One finished request: what was asked and what was answered."""

    request_id: str
    params: SamplingParams
    reasoning: dict[str, Any]  # arguments of ``generate`` that a grammar depends on
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    mode: str | None = None

    def add(self, output: Any) -> None:
        """Cumulative, delta and final outputs (``RequestOutputKind``)."""
        (sequence,) = output.outputs
        ids = list(sequence.token_ids)
        self.tokens = self.tokens + ids if self.params.output_kind is RequestOutputKind.DELTA else ids
        self.mode = (output.kv_transfer_params or {}).get("vericache", {}).get("mode", self.mode)


@dataclass(frozen=True)
class Verdict:
    """Where a replay first differs; None as ``position`` when it does not."""

    position: int | None = None
    answered: int | None = None
    replayed: int | None = None
    gap: float | None = None  # difference of log probability; None when the answer was not among the best
    near_tie: bool = False


def compare(answered: list[int], replayed: list[int], logprobs: list[Mapping[int, Any]], tie: float) -> Verdict:
    """``logprobs``: of the replay, by position and token."""
    if answered == replayed:
        return Verdict()
    pairs = zip(answered, replayed, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(answered), len(replayed)))
    if at >= len(answered) or at >= len(replayed):  # one ended early: no two tokens to compare
        ends = [ids[at] if at < len(ids) else None for ids in (answered, replayed)]
        return Verdict(at, ends[0], ends[1])
    ours, theirs = logprobs[at].get(answered[at]), logprobs[at].get(replayed[at])
    gap = None if ours is None or theirs is None else abs(theirs.logprob - ours.logprob)
    return Verdict(at, answered[at], replayed[at], gap, gap is not None and gap <= tie)


class Auditor:
    """Watches ``engine_client.generate``; replays go past the watch."""

    def __init__(self, engine_client: Any, config: VeriCacheConfig, model: str, dtype: str) -> None:
        self._generate, self._engine = engine_client.generate, engine_client
        self._config, self._tie, self._model = config, TIES[dtype], model
        CHECKS.labels(model)  # visible from the start
        MISMATCHES.labels(model)
        for reason in ("no_seed", "queue_full", "failed"):
            SKIPPED.labels(model, reason)
        self._random = random.Random(0)
        self._cases: asyncio.Queue[Case] = asyncio.Queue(WAITING)
        self._task: asyncio.Task[None] | None = None

    def watch(self) -> None:
        generate = self._generate

        @wraps(generate)
        async def watched(prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> AsyncIterator[Any]:
            case = self._drawn(sampling_params, request_id, kwargs)
            async for output in generate(prompt, sampling_params, request_id, **kwargs):
                if case is not None:
                    case.prompt = list(output.prompt_token_ids or case.prompt)
                    case.add(output)
                    if output.finished:
                        self._finished(case)
                yield output

        self._engine.generate = watched

    def _drawn(self, params: Any, request_id: str, kwargs: Mapping[str, Any]) -> Case | None:
        """Only what a replay can repeat: one sequence, and greedy or seeded."""
        if not isinstance(params, SamplingParams) or params.n != 1 or kwargs.get("lora_request") is not None:
            return None
        if self._random.random() >= self._config.audit_share:
            return None
        if params.temperature > 0 and params.seed is None:
            SKIPPED.labels(self._model, "no_seed").inc()
            return None
        reasoning = {k: kwargs[k] for k in ("reasoning_ended", "reasoning_parser_kwargs") if k in kwargs}
        return Case(request_id, params, reasoning)

    def _finished(self, case: Case) -> None:
        if case.mode != "draft":
            return
        try:
            self._cases.put_nowait(case)
        except asyncio.QueueFull:
            SKIPPED.labels(self._model, "queue_full").inc()
            return
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._replay_all())

    async def _replay_all(self) -> None:
        while not self._cases.empty():
            case = self._cases.get_nowait()
            deadline = time.monotonic() + PATIENCE
            while self._engine.output_processor.has_unfinished_requests() and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
            try:
                verdict = await self._replay(case)
            except Exception:  # a failing replay is no failing server, and no mismatch
                logger.exception("the audit could not replay request %s", case.request_id)
                SKIPPED.labels(self._model, "failed").inc()
                continue
            CHECKS.labels(self._model).inc()
            if verdict.position is not None and not verdict.near_tie:
                MISMATCHES.labels(self._model).inc()
                self._report(case, verdict)

    async def _replay(self, case: Case) -> Verdict:
        params = case.params.clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        params.logprobs = max(params.logprobs or 0, 5)
        params.extra_args = {**(params.extra_args or {}), "vericache_mode": "off"}
        prompt = {"prompt_token_ids": case.prompt}
        stream = self._generate(prompt, params, f"audit-{case.request_id}", priority=LOWEST, **case.reasoning)
        outputs = [o async for o in stream]
        (sequence,) = outputs[-1].outputs
        return compare(case.tokens, list(sequence.token_ids), sequence.logprobs, self._tie)

    def _report(self, case: Case, verdict: Verdict) -> None:
        logger.error(
            "audit mismatch in request %s: token %s was answered at output position %s, full KV gives %s (log "
            "probabilities differ by %s); please report it with the reproducer file",
            case.request_id, verdict.answered, verdict.position, verdict.replayed, verdict.gap,
        )  # fmt: skip
        if self._config.audit_folder is None:
            return
        prompt = json.dumps(case.prompt).encode()
        content = {
            "request_id": case.request_id,
            "prompt_sha256": hashlib.sha256(prompt).hexdigest(),  # of the JSON list of token ids
            "prompt_tokens": len(case.prompt),
            "sampling_params": repr(case.params),
            "settings": self._config.model_dump(mode="json"),
            "position": verdict.position,
            "answered": verdict.answered,
            "replayed": verdict.replayed,
            "gap": verdict.gap,
        }
        if self._config.audit_keep == "tokens":
            content |= {"prompt_token_ids": case.prompt, "output_token_ids": case.tokens}
        folder = Path(self._config.audit_folder)
        folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(case.request_id.encode()).hexdigest()[:16]  # clients choose request ids
        (folder / f"mismatch-{name}.json").write_text(json.dumps(content, indent=1) + "\n")
