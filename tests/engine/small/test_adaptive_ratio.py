"""A request whose drafts stay wrong is compressed anew at a larger ratio."""

from contextlib import nullcontext
from typing import Any

import pytest
from vllm import SamplingParams

from benchmarks.engine import summaries, tokens
from tests.engine.harness import Harness

NAMES = ["continue_code", "continue_prose", "summarise"]
# Outputs of the small model loop where they are greedy, and any draft cache is right then.
PARAMS = [SamplingParams(temperature=1.0, seed=i, max_tokens=60, ignore_eos=True) for i in range(len(NAMES))]
LITTLE: dict[str, Any] = {"compressor": "random", "counts": "uniform", "ratio": 0.1, "recent": 4, "draft_length": 10}


@pytest.fixture
def prompts(texts: dict[str, list[int]]) -> list[list[int]]:
    return [texts[n] for n in NAMES]


def test_the_ratio_grows_while_drafts_are_wrong(engine: Harness, prompts: list[list[int]]) -> None:
    """One step in flight, and two, where the next round could begin before the result of the last."""
    engine.configure(**LITTLE, ratio_limit=1.0)
    plain = engine.plain(prompts, PARAMS)
    for ahead in (False, True):
        with engine.recorded_kept() as kept, engine.run_ahead() if ahead else nullcontext():
            outputs = engine.generate(prompts, PARAMS)
        assert tokens(outputs) == plain
        grown = [s["ratio"] for s in summaries(outputs) if s["ratio"] > 0.1]
        assert grown, "random tokens are no good draft cache"
        assert set(grown) <= {0.2, 0.4, 0.8, 1.0}
        sizes = [[int(k.counts[0, 0]) for k in selections] for selections in kept.values()]
        assert all(counts == sorted(counts) for counts in sizes)


def test_nothing_grows_without_a_limit(engine: Harness, prompts: list[list[int]]) -> None:
    engine.configure(**LITTLE)
    assert {s["ratio"] for s in summaries(engine.generate(prompts, PARAMS))} == {0.1}


def test_no_room_to_grow(engine: Harness, prompts: list[list[int]]) -> None:
    """The arena is full: requests go on as they are."""
    engine.configure(**LITTLE, ratio_limit=1.0)
    plain = engine.plain(prompts, PARAMS)
    reserved, settings = engine.coordinator.reserved, engine.coordinator.settings
    one = reserved.units(settings.method, max(map(len, prompts)) + 1, 60 + settings.window)
    hostage = reserved.arena.free - len(NAMES) * one
    assert reserved.arena.take(hostage)
    outputs = engine.generate(prompts, PARAMS)
    reserved.arena.release(hostage)
    assert tokens(outputs) == plain
    assert all(s["mode"] == "draft" for s in summaries(outputs))
