"""Prompts are copied to the host while they are computed: every block once, and nothing is left behind."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise

import pytest
from vllm import SamplingParams

from benchmarks.engine import summaries, tokens
from tests.engine.conftest import OUTPUT_TOKENS
from tests.engine.harness import Harness
from tests.faults import failing_copies
from vericache.engine.ops import Compress, Offload, Op
from vericache.store.transfer import Direction

GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)


@contextmanager
def small_steps(engine: Harness, tokens: int = 160) -> Iterator[None]:
    """Prompts are computed in chunks."""
    scheduler = engine.scheduler
    before, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, tokens
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = before


@contextmanager
def recorded(engine: Harness) -> Iterator[list[Op]]:
    found: list[Op] = []
    run = engine.worker._run

    def recording(op: Op) -> None:
        found.append(op)
        run(op)

    engine.worker._run = recording
    try:
        yield found
    finally:
        del engine.worker._run


@pytest.mark.parametrize("ahead", [False, True])
def test_every_block_is_copied_once(
    engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]], ahead: bool
) -> None:
    engine.scheduler.reset_prefix_cache()
    engine.configure(compressor="streaming_llm", counts="uniform")
    with small_steps(engine), recorded(engine) as ops, engine.run_ahead() if ahead else nullcontext():
        outputs = engine.generate(list(texts.values()), GREEDY)
    assert tokens(outputs) == [stock[n] for n in texts]
    assert all(s["mode"] == "draft" for s in summaries(outputs))
    copied: dict[str, Counter[int]] = {}
    early = 0
    for op in ops:
        if isinstance(op, Offload):
            copied.setdefault(op.request_id, Counter()).update(op.pages)
            early += len(op.pages)
        elif isinstance(op, Compress):
            pages = copied[op.request_id]
            assert set(pages.values()) == {1}, "no block is copied twice"
            assert len(pages) == len(op.blocks), "all of the context is on the host"
    last = sum(len(op.pages) for op, then in pairwise(ops) if isinstance(then, Compress))
    assert early - last >= early / 2, "most of it was copied before the prompts were done"
    engine.assert_at_rest()


def test_a_prompt_that_is_given_up_leaves_nothing(engine: Harness, texts: dict[str, list[int]]) -> None:
    engine.scheduler.reset_prefix_cache()
    engine.configure(compressor="streaming_llm", counts="uniform")
    with small_steps(engine, 100):
        engine.add("gone", texts["continue_code"], GREEDY)
        engine.run_until(lambda: any(engine.coordinator.prestore._stored.values()))
        engine.step()
        (request_id,) = engine.scheduler.requests
        engine.llm.llm_engine.abort_request([request_id], internal=True)
    engine.assert_at_rest()


def test_recomputed_while_its_prompt_was_copied(
    engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]
) -> None:
    engine.scheduler.reset_prefix_cache()
    engine.configure(compressor="streaming_llm", counts="uniform")
    with small_steps(engine, 100):
        engine.add("a", texts["continue_code"], GREEDY)
        engine.run_until(lambda: any(s.blocks for s in engine.coordinator.prestore._stored.values()))
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        (output,) = engine.drain().values()
    assert list(output.outputs[0].token_ids) == stock["continue_code"]
    engine.assert_at_rest()


def test_a_failing_copy_ahead(engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]) -> None:
    """It is made anew later; nothing else happens."""
    engine.scheduler.reset_prefix_cache()
    engine.configure(compressor="streaming_llm", counts="uniform")
    with small_steps(engine, 100), failing_copies(engine, Direction.TO_HOST, lambda n: n == 1):
        (output,) = engine.generate([texts["continue_code"]], GREEDY)
    assert list(output.outputs[0].token_ids) == stock["continue_code"]
    report = output.kv_transfer_params["vericache"]
    assert (report["mode"], report["recoveries"]) == ("draft", 0)
    engine.assert_at_rest()


def test_a_small_host_store_is_for_what_drafts(
    engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]
) -> None:
    """Pages of prompts under way are given up before a drafting request is."""
    engine.scheduler.reset_prefix_cache()
    host = engine.coordinator.reserved.host
    engine.configure(compressor="streaming_llm", counts="uniform")
    plan = engine.coordinator.plan
    longest = max(len(p) for p in texts.values()) + OUTPUT_TOKENS + engine.coordinator.settings.window
    taken = host.take(host.size - 2 * plan.blocks_for(longest))
    assert taken is not None
    with small_steps(engine):
        outputs = engine.generate(list(texts.values()), GREEDY)
    host.release(taken)
    assert tokens(outputs) == [stock[n] for n in texts]
    engine.assert_at_rest()
