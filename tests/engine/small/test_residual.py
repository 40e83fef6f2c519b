"""Reloads that leave in the arena what it holds: the tokens are stock vLLM's, in whatever state a request ends or
fails, and fewer bytes cross the link. Kept tokens are not read from the host (``CpuCopyEngine``), so a wrong one would
show."""

from contextlib import nullcontext
from typing import Any

import pytest
from vllm import SamplingParams

from benchmarks.engine import summaries, tokens
from tests.engine.conftest import OUTPUT_TOKENS
from tests.engine.harness import Harness
from tests.faults import failing_copies
from vericache.store.transfer import Direction

GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
ON: dict[str, Any] = {"residual_reload": "on", "compressor": "snapkv", "counts": "per_head"}
SLOW: dict[str, Any] = {**ON, "draft_length": 12, "iteration_seconds": 0.05, "link_bytes_per_second": 2e7}
NAMES = ["continue_code", "summarise", "continue_prose"]


def reloaded(engine: Harness, texts: dict[str, list[int]], **settings: Any) -> tuple[list[list[int]], float]:
    """Output, and bytes per round that crossed the link."""
    engine.configure(**settings)
    before = engine.coordinator.stats.moved["Load"]
    outputs = engine.generate([texts[n] for n in NAMES], GREEDY)
    assert all(s["mode"] == "draft" for s in summaries(outputs))
    rounds = sum(s["rounds"] for s in summaries(outputs))
    return tokens(outputs), (engine.coordinator.stats.moved["Load"] - before) / rounds


@pytest.mark.parametrize(
    "method",
    [
        {"compressor": "snapkv", "counts": "per_head"},
        {"compressor": "streaming_llm", "counts": "uniform"},
        {"compressor": "kvzip", "counts": "per_head", "page_tokens": 32},
    ],
)
def test_fewer_bytes_and_the_same_tokens(
    engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]], method: dict[str, Any]
) -> None:
    expected = [stock[n] for n in NAMES]
    whole, residual = (reloaded(engine, texts, **method, ratio=0.5, residual_reload=on) for on in ("off", "on"))
    assert whole[0] == residual[0] == expected
    # Half of a prompt of 240 tokens in blocks of 32, of which tokens that are made fill the last ones.
    assert 0.4 < residual[1] / whole[1] < 0.65


def test_the_planner_books_what_is_left_to_fetch(engine: Harness, texts: dict[str, list[int]]) -> None:
    """And rounds aim shorter, since the link is free sooner."""
    lengths: dict[str, int] = {}
    for residual in ("off", "on"):
        engine.configure(**{**SLOW, "residual_reload": residual}, ratio=0.5, window=32)
        engine.add("one", texts["summarise"], GREEDY)
        engine.run_until(lambda: "DRAFTING" in engine.states().values())
        needs, (record,) = engine.coordinator.needs, engine.coordinator.records.values()
        left = needs.residual.full(record) - record.kept_bytes
        assert needs.demand(record.request_id, 8).link_ns == pytest.approx(left / 2e7 * 1e9, rel=1e-6)
        assert (record.kept_bytes > 0) == (residual == "on")
        lengths[residual] = needs.fair_length(record.tokens)
        engine.drain()
    assert lengths["on"] < lengths["off"]


def test_random_sampling(engine: Harness, texts: dict[str, list[int]]) -> None:
    engine.configure(**ON)
    asked = [texts[n] for n in NAMES]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=30, ignore_eos=True) for i in range(len(asked))]
    assert tokens(engine.generate(asked, params)) == engine.plain(asked, params)


def test_compressed_anew(engine: Harness, texts: dict[str, list[int]]) -> None:
    """Each time from blocks that were partly filled from the arena before; the new slot remembers anew."""
    prompt = texts["continue_code"][:160]
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    expected = engine.plain([prompt], params)
    engine.configure(**ON, tail_tokens=30, window=16, draft_length=8)
    with engine.recorded_kept() as kept:
        (output,) = engine.generate([prompt], params)
    assert tokens([output]) == expected
    assert len(kept[output.request_id]) > 2


@pytest.mark.parametrize("state", ["LOADING", pytest.param("VERIFYING", marks=pytest.mark.slow)])
def test_abort(engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]], state: str) -> None:
    """With two steps in flight: the slot is given to the next request while its reload may still be under way."""
    engine.configure(**SLOW)
    with engine.run_ahead():
        for name in NAMES:
            engine.add(name, texts[name], GREEDY)
        gone: list[str] = []

        def reached() -> bool:
            gone[:] = [name for name, s in engine.states().items() if s == state][:1]
            return bool(gone)

        engine.run_until(reached)
        engine.llm.llm_engine.abort_request(gone)
        engine.add("later", texts["write_tests"], GREEDY)
        done = engine.drain()
    expected = {n: stock[n] for n in NAMES if n not in gone} | {"later": stock["write_tests"]}
    assert {n: list(o.outputs[0].token_ids) for n, o in done.items() if n not in gone} == expected


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.slow), True])
def test_failing_reload(engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]], ahead: bool) -> None:
    engine.configure(**SLOW)
    failing = failing_copies(engine, Direction.TO_DEVICE, lambda n: n == 2)
    with failing, engine.run_ahead() if ahead else nullcontext():
        outputs = engine.generate([texts[n] for n in NAMES], GREEDY)
    assert tokens(outputs) == [stock[n] for n in NAMES]
    assert sorted(s["recoveries"] for s in summaries(outputs)) == [0, 0, 1]


def test_pages_that_others_hold_are_fetched_whole(engine: Harness, texts: dict[str, list[int]]) -> None:
    """Also after the others have left: whose prefill filled them does not change."""
    document = texts["continue_code"][:192]
    asked = [document + texts[n][: 30 + 10 * i] for i, n in enumerate(NAMES)]
    lasting = [1, 2, 3]  # times 20 tokens
    params = [SamplingParams(temperature=0.0, max_tokens=20 * n, ignore_eos=True) for n in lasting]
    expected = engine.plain(asked, params)
    assert engine.scheduler.reset_prefix_cache()
    engine.configure(**ON)
    loads: list[Any] = []
    load = engine.coordinator.residual.load
    engine.coordinator.residual.load = lambda record: loads.append(load(record)) or loads[-1]
    assert tokens(engine.generate(asked, params)) == expected
    assert {op.first + op.whole for op in loads} == {6}
    assert all(op.slot is not None for op in loads)
