"""Mode auto: plain vLLM while blocks last, demotions instead of preemptions when they do not, and back again."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams

from benchmarks.engine import summaries, tokens
from tests.engine.conftest import OUTPUT_TOKENS
from tests.engine.harness import Harness

GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
AUTO: dict[str, Any] = {"mode": "auto", "compressor": "snapkv", "counts": "uniform", "window": 10, "tail_tokens": 16}


@contextmanager
def watched(engine: Harness) -> Iterator[dict[str, Any]]:
    """Rows of every step by the user's request id, and how often vLLM preempted."""
    scheduler, seen = engine.scheduler, {"rows": [], "preempted": 0}
    schedule, preempt = scheduler.schedule, scheduler._preempt_request

    def counting_schedule(*args: Any) -> Any:
        output = schedule(*args)
        if output.num_scheduled_tokens:
            seen["rows"].append({r.rpartition("-")[0]: n for r, n in output.num_scheduled_tokens.items()})
        return output

    def counting_preempt(*args: Any, **kwargs: Any) -> None:
        seen["preempted"] += 1
        preempt(*args, **kwargs)

    scheduler.schedule, scheduler._preempt_request = counting_schedule, counting_preempt
    try:
        yield seen
    finally:
        del scheduler.schedule, scheduler._preempt_request


def run(engine: Harness, texts: dict[str, list[int]], names: list[str]) -> dict[str, Any]:
    for name in names:
        engine.add(name, texts[name], GREEDY)
    return engine.drain()


def test_with_room_it_is_plain_vllm(engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]) -> None:
    """The same rows in the same steps, and not one byte on the link."""
    names, found = list(texts)[:4], []
    for mode in ("off", "auto"):
        engine.configure(**{**AUTO, "mode": mode})
        assert engine.scheduler.reset_prefix_cache()
        moved = dict(engine.coordinator.stats.moved)
        with watched(engine) as seen:
            done = run(engine, texts, names)
        found.append(seen["rows"])
        assert {n: list(done[n].outputs[0].token_ids) for n in names} == {n: stock[n] for n in names}
        assert dict(engine.coordinator.stats.moved) == moved
    assert found[0] == found[1]
    assert {s["reason"] for s in summaries(list(done.values()))} == {"the KV pool had room for it"}


@pytest.mark.parametrize("residual", ["off", "on"])
def test_short_of_blocks_it_demotes_instead_of_preempting(
    engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]], residual: str
) -> None:
    engine.configure(**AUTO, draft_policy="ema", residual_reload=residual)
    assert engine.scheduler.reset_prefix_cache()
    with watched(engine) as seen:
        done = run(engine, texts, list(texts))
    assert {n: list(o.outputs[0].token_ids) for n, o in done.items()} == stock
    reports = {n: summaries([o])[0] for n, o in done.items()}
    assert seen["preempted"] == 0
    assert any(r.get("rounds") for r in reports.values()), reports
    assert any(not r.get("rounds") for r in reports.values()), "some stayed plain rows all their lives"


@pytest.mark.parametrize("residual", ["off", "on"])
def test_a_lone_drafting_request_comes_back(
    engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]], residual: str
) -> None:
    """With all the room there is, its next verify is its last; what it brought back, be it from the host or partly from
    the arena, serves the prefix cache."""
    engine.configure(**AUTO, residual_reload=residual)
    engine.add("p1", texts["p1"], GREEDY)
    demote(engine, 1)
    engine.run_until(lambda: bool(engine.states()))
    done = engine.drain()["p1"]
    report = summaries([done])[0]
    assert list(done.outputs[0].token_ids) == stock["p1"]
    assert (report["mode"], report["reason"]) == ("resident", "the KV pool had room for it")
    assert 0 < report["rounds"] < 4
    longer = [*texts["p1"], *stock["p1"]]
    again = engine.generate([longer], GREEDY)[0]
    assert again.num_cached_tokens >= len(texts["p1"])
    engine.configure(mode="off")
    assert engine.scheduler.reset_prefix_cache()
    assert tokens(engine.generate([longer], GREEDY)) == tokens([again])


def test_a_link_that_is_too_slow_demotes_nobody(
    engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]
) -> None:
    """Drafting would be slower than waiting: the requests that could have been demoted say so."""
    engine.configure(**AUTO, link_bytes_per_second=1e5)
    done = run(engine, texts, list(texts))
    assert {n: list(o.outputs[0].token_ids) for n, o in done.items()} == stock
    reports = summaries(list(done.values()))
    assert not any(r.get("rounds") for r in reports)
    assert any("would not have paid" in r["reason"] for r in reports)


def test_contract_of_the_blocks_that_come_back(engine: Harness, texts: dict[str, list[int]]) -> None:
    """``DeviceBlocks.attach`` is the reverse of vLLM's ``pop_blocks_for_free``: what that takes out of its books, the
    books hold again, and a row that grows extends the same list."""
    engine.configure(mode="off")
    engine.add("one", texts["p1"], GREEDY)
    engine.step()
    (request,), blocks = engine.scheduler.running, engine.coordinator.blocks
    (manager,) = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    before, cached = blocks.of_request(request), manager.num_cached_block[request.request_id]
    taken = blocks.detach(request)
    assert request.request_id not in manager.req_to_blocks
    assert request.request_id not in manager.num_cached_block
    blocks.attach(request, taken)
    manager.num_cached_block[request.request_id] = cached  # these have their hashes; reloaded ones have none
    assert blocks.of_request(request) == before
    done = engine.drain()["one"]
    assert len(done.outputs[0].token_ids) == OUTPUT_TOKENS


def demote(engine: Harness, count: int) -> None:
    """Detach the next ``count`` plain rows whose prompts are done."""
    elastic = engine.coordinator.elastic
    leaving = elastic.leaving

    def forced(ready: Any, *rest: Any) -> list[Any]:
        nonlocal count
        able = [r for r in ready if engine.coordinator.terms.resident_reason(r) is None][:count]
        count -= len(able)
        return able if able else leaving(iter(()), *rest)

    elastic.leaving = forced


def test_any_mix_of_moves_leaves_the_output_alone(
    engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]
) -> None:
    """Demotions and promotions at random moments, aborts, an arena that is full for a while."""
    moved = []

    @settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(seed=st.integers(0, 2**32 - 1), ahead=st.booleans())
    def run_one(seed: int, ahead: bool) -> None:
        moved.append(any_mix(engine, texts, stock, seed, ahead))

    run_one()
    assert sum(moved) > len(moved)  # of a single one the arena may have been full all the time


def any_mix(engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]], seed: int, ahead: bool) -> int:
    """Returns how many times a request was demoted."""
    engine.configure(**AUTO)
    rng, names = random.Random(seed), random.Random(seed).sample(list(texts), 4)
    coordinator, arena = engine.coordinator, engine.coordinator.reserved.arena
    elastic, aborted, done, lent = coordinator.elastic, set[str](), {}, 0

    def leaving(ready: Any, *_: Any) -> list[Any]:
        return [r for r in ready if coordinator.terms.resident_reason(r) is None and rng.random() < 0.15]

    def review(room: int) -> None:
        elastic._room = room
        for record in coordinator.records.values():
            record.returning = record.returning or rng.random() < 0.1
            track = coordinator.planner.tracks[record.request_id]
            track.held = not record.returning and rng.random() < 0.1

    detach, detached = coordinator.detach, []

    def counted(request: Any) -> bool:
        left = detach(request)
        detached.extend([request.request_id] * left)
        return left

    elastic.leaving, elastic.review, coordinator.detach = leaving, review, counted
    with engine.run_ahead() if ahead else watched(engine):
        waiting = list(names)
        for _ in range(3000):
            if waiting and rng.random() < 0.2:
                name = waiting.pop()
                engine.add(name, texts[name], GREEDY)
            if rng.random() < 0.1:
                arena.release(lent)
                lent = rng.choice([0, arena.free])
                assert arena.take(lent)
            if rng.random() < 0.01 and (running := list(engine.scheduler.requests)):
                victim = rng.choice(running).rpartition("-")[0]
                aborted.add(victim)
                engine.llm.llm_engine.abort_request([victim])
            done |= {o.request_id: o for o in engine.step() if o.finished}
            if not waiting and not engine.llm.llm_engine.has_unfinished_requests():
                break
        arena.release(lent)
    del elastic.leaving, elastic.review, coordinator.detach
    for name in set(names) - aborted:
        assert list(done[name].outputs[0].token_ids) == stock[name], (name, summaries([done[name]]))
    engine.assert_at_rest()
    return len(detached)


@pytest.mark.parametrize("ahead", [False, True])
def test_to_and_fro(engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]], ahead: bool) -> None:
    """Every request is demoted and promoted again and again."""
    engine.configure(**AUTO)
    coordinator = engine.coordinator
    moves = []

    def leaving(ready: Any, *_: Any) -> list[Any]:
        return [r for r in ready if coordinator.terms.resident_reason(r) is None]

    def review(room: int) -> None:
        coordinator.elastic._room = room
        for record in coordinator.records.values():
            record.returning = True

    leave = coordinator._leave

    def counted(record: Any, reason: str) -> None:
        moves.append(reason)
        leave(record, reason)

    coordinator.elastic.leaving, coordinator.elastic.review, coordinator._leave = leaving, review, counted
    try:
        if ahead:
            with engine.run_ahead():
                done = run(engine, texts, list(texts)[:3])
        else:
            done = run(engine, texts, list(texts)[:3])
    finally:
        del coordinator._leave
    assert {n: list(o.outputs[0].token_ids) for n, o in done.items()} == {n: stock[n] for n in done}
    assert moves.count("room") > 4
    assert set(moves) == {"room"}
