"""Shared verifies on the V2 runner: requests with a common prefix give the tokens of plain rows and reload it once."""

import pytest

from tests.interpreted.engine.v2_engine import SLOW, V2Engine, params

PREFIX = 192  # tokens, six blocks


@pytest.mark.parametrize("sharers", [pytest.param(3, marks=SLOW)])
def test_fewer_bytes_and_the_same_tokens(engine: V2Engine, sharers: int) -> None:
    prompts = [engine.prompt(PREFIX, 30) + engine.prompt(20 + 9 * i, 31 + i) for i in range(sharers)]
    cost: dict[str, float] = {}
    for shared in ("on", "off"):
        before = engine.coordinator.stats.moved["Load"]
        found = engine.same(prompts, params(sharers, 24, temperature=0.7), ratio=0.5, shared_verifies=shared)
        assert all(s["mode"] == "draft" for s in found)
        rounds = sum(s["rounds"] for s in found)
        cost[shared] = (engine.coordinator.stats.moved["Load"] - before) / rounds
    assert cost["on"] < cost["off"]
