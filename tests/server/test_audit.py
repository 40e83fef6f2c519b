"""The audit against an engine that answers what it is told."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams

from server import audit
from server.audit import Auditor, compare
from vericache.config import VeriCacheConfig

PROMPT = [1, 2, 3]


def logprobs(*positions: dict[int, float]) -> list[dict[int, Any]]:
    return [{token: SimpleNamespace(logprob=value) for token, value in p.items()} for p in positions]


@pytest.mark.parametrize(
    ("answered", "replayed", "gap", "tie", "expected"),
    [
        ([5, 6], [5, 6], 0.0, 0.1, (None, False)),
        ([5, 6], [5, 7], 0.05, 0.1, (1, True)),
        ([5, 6], [5, 7], 0.5, 0.1, (1, False)),
        ([5], [5, 7], 0.0, 0.1, (1, False)),
        ([5, 6, 7], [5, 6], 0.0, 0.1, (2, False)),
    ],
)
def test_compare(
    answered: list[int], replayed: list[int], gap: float, tie: float, expected: tuple[int | None, bool]
) -> None:
    best = logprobs({5: -0.1}, {7: -0.2, 6: -0.2 - gap}, {7: -0.1})
    verdict = compare(answered, replayed, best, tie)
    assert (verdict.position, verdict.near_tie) == expected


def test_an_answer_that_is_not_among_the_best_is_no_near_tie() -> None:
    verdict = compare([9], [7], logprobs({7: -0.2, 6: -0.3}), 100.0)
    assert verdict.gap is None
    assert not verdict.near_tie


class Engine:
    """Drafted requests get ``answer``, replays ``truth``."""

    def __init__(self, answer: list[int], truth: list[int], mode: str = "draft") -> None:
        self.answer, self.truth, self.mode = answer, truth, mode
        self.replays: list[SamplingParams] = []
        self.output_processor = SimpleNamespace(has_unfinished_requests=lambda: False)

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> AsyncIterator[Any]:
        replay = (sampling_params.extra_args or {}).get("vericache_mode") == "off"
        ids = self.truth if replay else self.answer
        if replay:
            self.replays.append(sampling_params)
            assert prompt == {"prompt_token_ids": PROMPT}
            assert kwargs["priority"] == audit.LOWEST
        pieces = [ids[:1], ids[1:]] if sampling_params.output_kind is RequestOutputKind.DELTA else [ids]
        for i, piece in enumerate(pieces):
            last = i == len(pieces) - 1
            best = logprobs(*({t: -0.1} for t in ids))
            yield SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=piece, logprobs=best)],
                prompt_token_ids=PROMPT,
                finished=last,
                kv_transfer_params={"vericache": {"mode": self.mode}} if last else None,
            )


def served(engine: Engine, params: SamplingParams, count: int = 1, **config: Any) -> dict[str, float]:
    """Serve, wait for the audit, return how far its counters moved."""

    def values() -> dict[str, float]:
        skipped = sum(m.value for m in audit.SKIPPED.collect()[0].samples if m.name.endswith("_total"))
        return {
            "checks": audit.CHECKS.labels("demo")._value.get(),
            "mismatches": audit.MISMATCHES.labels("demo")._value.get(),
            "skipped": skipped,
        }

    async def run() -> None:
        auditor = Auditor(engine, VeriCacheConfig(**{"audit_share": 1.0, **config}), "demo", "float32")
        auditor.watch()
        for i in range(count):
            async for _ in engine.generate({"prompt": "x"}, params, f"request-{i}"):
                pass
        if auditor._task is not None:
            await auditor._task

    before = values()
    asyncio.run(run())
    return {name: value - before[name] for name, value in values().items()}


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_equal_replays_are_checks(kind: RequestOutputKind) -> None:
    engine = Engine([4, 5, 6], [4, 5, 6])
    assert served(engine, SamplingParams(temperature=0, output_kind=kind)) == {
        "checks": 1,
        "mismatches": 0,
        "skipped": 0,
    }
    assert engine.replays[0].output_kind is RequestOutputKind.FINAL_ONLY


@pytest.mark.parametrize("keep", ["hash", "tokens"])
def test_a_mismatch_is_counted_logged_and_kept(keep: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine([4, 5, 6], [4, 9, 6])
    moved = served(engine, SamplingParams(temperature=0), audit_folder=str(tmp_path), audit_keep=keep)
    assert moved == {"checks": 1, "mismatches": 1, "skipped": 0}
    assert "token 5 was answered at output position 1, full KV gives 9" in caplog.text
    (file,) = tmp_path.iterdir()
    kept = json.loads(file.read_text())
    assert (kept["position"], kept["answered"], kept["replayed"]) == (1, 5, 9)
    assert ("prompt_token_ids" in kept) == (keep == "tokens")
    assert len(kept["prompt_sha256"]) == 64


def test_what_no_replay_can_repeat_is_skipped_and_counted() -> None:
    assert served(Engine([4], [5]), SamplingParams(temperature=1.0))["skipped"] == 1
    assert served(Engine([4], [4]), SamplingParams(temperature=1.0, seed=1))["checks"] == 1


def test_plain_requests_and_a_share_of_nothing_are_not_replayed() -> None:
    nothing = {"checks": 0, "mismatches": 0, "skipped": 0}
    assert served(Engine([4], [5], mode="resident"), SamplingParams(temperature=0)) == nothing
    assert served(Engine([4], [5]), SamplingParams(temperature=0), audit_share=0.0) == nothing


def test_a_share_is_a_share() -> None:
    checks = served(Engine([4], [4]), SamplingParams(temperature=0), count=40, audit_share=0.5)
    assert 8 <= checks["checks"] + checks["skipped"] <= 32
