"""Injected faults: the request is recomputed, waits, or stays resident; never a wrong token, never a dead engine."""

from contextlib import nullcontext
from typing import Any

import pytest
from vllm import SamplingParams

from benchmarks.engine import summaries, tokens
from compressors.kvzip import KVzip
from tests.engine.conftest import OUTPUT_TOKENS
from tests.engine.harness import Harness
from tests.faults import BrokenError, failing_copies
from vericache.store.transfer import Direction

GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
NAMES = ["continue_code", "summarise"]


def check(engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]) -> list[dict[str, Any]]:
    outputs = engine.generate([texts[n] for n in NAMES], GREEDY)
    assert tokens(outputs) == [stock[n] for n in NAMES]
    return summaries(outputs)


@pytest.mark.parametrize("span", ["one iteration", "several iterations"])
@pytest.mark.parametrize("ahead", [False, True])
def test_failing_reload(
    engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]], span: str, ahead: bool
) -> None:
    """Public fault 17: the second reload fails, in the verify's own step or before it. The verify row's output is
    dropped, the request is prefilled again, the failure is counted."""
    bandwidth = 1e10 if span == "one iteration" else 2e7
    engine.configure(iteration_seconds=0.05, link_bytes_per_second=bandwidth)
    before = engine.coordinator.stats.failures["Load"]
    failing = failing_copies(engine, Direction.TO_DEVICE, lambda n: n == 2)
    with failing, engine.run_ahead() if ahead else nullcontext():
        reports = check(engine, texts, stock)
    assert engine.coordinator.stats.failures["Load"] == before + 1
    assert sorted(r["recoveries"] for r in reports) == [0, 1]
    assert all(r["mode"] == "draft" for r in reports)


def test_every_reload_fails(engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]) -> None:
    engine.configure(max_recoveries=1)
    with failing_copies(engine, Direction.TO_DEVICE, lambda n: True):
        reports = check(engine, texts, stock)
    assert [r["mode"] for r in reports] == ["resident", "resident"]
    assert all("failed 2 times" in r["reason"] for r in reports)


def test_failing_write_back(engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]) -> None:
    """Public fault 19: the verify's tokens stand (they came from full KV), the stale host copy is given up."""
    engine.configure()
    with failing_copies(engine, Direction.TO_HOST, lambda n: n == 4) as count:
        reports = check(engine, texts, stock)
    assert count[0] > 4
    assert sorted(r["recoveries"] for r in reports) == [0, 1]


def test_failing_offload(engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]) -> None:
    """The KV is still on the device: the request goes on as a plain row and is demoted again."""
    engine.configure()
    with failing_copies(engine, Direction.TO_HOST, lambda n: n == 1):
        reports = check(engine, texts, stock)
    assert sorted(r["recoveries"] for r in reports) == [0, 1]


@pytest.mark.parametrize("method", ["observe", "scores"])
def test_failing_compressor(
    engine: Harness,
    texts: dict[str, list[int]],
    stock: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    def broken(*args: Any) -> None:
        raise BrokenError("this compressor always fails")

    monkeypatch.setattr(KVzip, method, broken)
    engine.configure(compressor="kvzip", max_recoveries=1)
    reports = check(engine, texts, stock)
    assert [r["mode"] for r in reports] == ["resident", "resident"]
    monkeypatch.undo()
    assert [r["mode"] for r in check(engine, texts, stock)] == ["draft", "draft"]


def test_full_host_store(engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]) -> None:
    """No host page is free at admission: requests stay resident. It fills up later: the request is recomputed."""
    host = engine.coordinator.reserved.host
    engine.configure()
    hostage = host.take(host.free) or []
    reports = check(engine, texts, stock)
    assert [r["mode"] for r in reports] == ["resident", "resident"]
    assert all("full" in r["reason"] for r in reports)
    host.release(hostage)
    engine.configure(window=16)
    for name in NAMES:
        engine.add(name, texts[name], GREEDY)
    engine.run_until(lambda: set(engine.states().values()) == {"DRAFTING"} and len(engine.states()) == 2)
    hostage = host.take(host.free) or []
    done = engine.drain()
    host.release(hostage)
    assert [list(done[n].outputs[0].token_ids) for n in NAMES] == [stock[n] for n in NAMES]


def test_full_arena(engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]) -> None:
    """Room for one request: the second is resident until the first has finished, or to its end."""
    arena = engine.coordinator.reserved.arena
    engine.configure()
    settings = engine.coordinator.settings
    longest = max(len(texts[n]) for n in NAMES) + 1
    one_request = engine.coordinator.reserved.units(settings.method, longest, OUTPUT_TOKENS + settings.window)
    hostage = arena.free - one_request - one_request // 2
    assert arena.take(hostage)
    reports = check(engine, texts, stock)
    arena.release(hostage)
    assert sorted(r["mode"] for r in reports) == ["draft", "resident"]


@pytest.mark.parametrize("policy", ["staggered", "lockstep"])
def test_tight_pool(engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]], policy: str) -> None:
    """Public fault 22: the pool holds barely more than one full KV (and cached blocks of finished requests): rounds
    take turns, everybody finishes."""
    engine.configure(compressor="snapkv", counts="uniform", policy=policy)
    blocks = engine.coordinator.blocks
    names = list(texts)[:4]
    hostage = blocks.take(blocks.free - 14) or []
    try:
        outputs = engine.generate([texts[n] for n in names], GREEDY)
    finally:
        blocks.give(hostage)
    assert tokens(outputs) == [stock[n] for n in names]


@pytest.mark.parametrize("compressor", ["streaming_llm", "kvzip"])
def test_tight_pool_and_full_arena(
    engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]], compressor: str
) -> None:
    """Two requests fill the arena, and the pool holds fewer than two full KV. Were the next one to begin as a plain
    row, it would keep the blocks that the two need for their verify rows until its end."""
    options = {"chunk": 128} if compressor == "kvzip" else {}  # scoring rows need blocks behind the context
    engine.configure(compressor=compressor, counts="uniform", compressor_options=options)
    settings, plan = engine.coordinator.settings, engine.coordinator.plan
    names = list(texts)[:4] * 2
    longest = max(len(texts[n]) for n in names) + 1
    one = engine.coordinator.reserved.units(settings.method, longest, OUTPUT_TOKENS + settings.window)
    arena, blocks = engine.coordinator.reserved.arena, engine.coordinator.blocks
    taken = arena.free - 2 * one - one // 4
    assert arena.take(taken)
    hostage = blocks.take(blocks.free - plan.blocks_for(9 * longest // 5)) or []
    try:
        outputs = engine.generate([texts[n] for n in names], GREEDY)
    finally:
        blocks.give(hostage)
        arena.release(taken)
    assert tokens(outputs) == [stock[n] for n in names]
    assert [s["mode"] for s in summaries(outputs)] == ["draft"] * len(names)


def test_more_users_than_seats(engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]) -> None:
    """Twelve requests, eight rows: four wait, nobody crashes the engine."""
    engine.configure(compressor="snapkv", counts="uniform")
    names = list(texts)[:4] * 3
    outputs = engine.generate([texts[n] for n in names], GREEDY)
    assert tokens(outputs) == [stock[n] for n in names]


def test_short_requests_do_not_keep_a_long_one_from_verifying(
    engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]
) -> None:
    """The pool holds one full KV and little more. Short requests, which stay plain rows, keep coming; were they let in,
    their blocks would be missing whenever a reload is due."""
    engine.configure(compressor="streaming_llm", counts="uniform", window=16)
    blocks, plan = engine.coordinator.blocks, engine.coordinator.plan
    long = max(NAMES, key=lambda n: len(texts[n]))
    hostage = blocks.take(blocks.free - plan.blocks_for(len(texts[long]) + OUTPUT_TOKENS + 1) - 1) or []
    try:
        engine.add("long", texts[long], GREEDY)
        engine.run_until(lambda: "long" in engine.states())
        for i in range(12):
            engine.add(f"short{i}", texts[long][i : 60 + i], SamplingParams(temperature=0.0, max_tokens=24))
        order = []
        while engine.llm.llm_engine.has_unfinished_requests():
            order += [o for o in engine.step() if o.finished]
    finally:
        blocks.give(hostage)
    names = [o.request_id.rpartition("-")[0] or o.request_id for o in order]
    done = dict(zip(names, order, strict=True))
    assert list(done["long"].outputs[0].token_ids) == stock[long]
    assert summaries([done["long"]])[0]["mode"] == "draft"
    assert names.index("long") < len(names) - 1, names
