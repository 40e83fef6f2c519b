"""Aborts in every state: survivors are untouched, everything comes back, the next request is answered."""

import pytest
from vllm import SamplingParams
from vllm.v1.request import RequestStatus

from benchmarks.engine import tokens
from tests.engine.conftest import OUTPUT_TOKENS
from tests.engine.harness import Harness

GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
NAMES = ["continue_code", "summarise", "continue_prose"]


def slow_link(engine: Harness, **settings: object) -> None:
    """A reload spans several iterations, so that LOADING lasts."""
    engine.configure(
        compressor="snapkv",
        counts="uniform",
        draft_length=12,
        iteration_seconds=0.05,
        link_bytes_per_second=2e7,
        **settings,
    )


def start(engine: Harness, texts: dict[str, list[int]]) -> None:
    for name in NAMES:
        engine.add(name, texts[name], GREEDY)


def finish(engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]], aborted: set[str]) -> None:
    """Survivors are right, and so is a request that comes afterwards."""
    done = engine.drain()
    for name in NAMES:
        if name not in aborted:
            assert list(done[name].outputs[0].token_ids) == stock[name]
    assert tokens(engine.generate([texts["write_tests"]], GREEDY)) == [stock["write_tests"]]


@pytest.mark.parametrize("state", ["DEMOTING", "WAITING", "DRAFTING", "LOADING"])
def test_abort_in_state(engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]], state: str) -> None:
    slow_link(engine)
    if state == "DEMOTING":  # several scoring rows keep the state visible between steps
        engine.configure(compressor="kvzip", compressor_options={"chunk": 64})
    if state == "WAITING":  # the link is taken: one round at a time
        slow_link(engine, window=16)
    start(engine, texts)
    victims: set[str] = set()

    def reached() -> bool:
        victims.update(name for name, s in engine.states().items() if s == state)
        return bool(victims)

    engine.run_until(reached)
    victim = min(victims)
    engine.llm.llm_engine.abort_request([victim])
    assert victim not in engine.states()
    finish(engine, texts, stock, {victim})


def test_abort_during_a_verify(engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]) -> None:
    """The abort arrives while the verify row is in the forward pass."""
    slow_link(engine)
    start(engine, texts)
    coordinator, aborted = engine.coordinator, set()
    execute = engine.core.model_executor.execute_model

    def abort_verifying(output: object, **kwargs: object) -> object:
        if not aborted:
            for request_id, track in coordinator.planner.tracks.items():
                if track.state.name == "VERIFYING":
                    aborted.add(request_id.rpartition("-")[0])
                    engine.core.aborts_queue.put_nowait([request_id])
                    break
        return execute(output, **kwargs)

    engine.core.model_executor.execute_model = abort_verifying
    try:
        engine.run_until(lambda: bool(aborted))
    finally:
        del engine.core.model_executor.execute_model
    engine.llm.llm_engine.output_processor.abort_requests(list(aborted), internal=False)
    finish(engine, texts, stock, aborted)


def test_abort_before_anything_is_allocated(
    engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]
) -> None:
    """Public fault 16: abort in the same tick as submit."""
    start(engine, texts)
    engine.llm.llm_engine.abort_request(["summarise"])
    finish(engine, texts, stock, {"summarise"})


def test_abort_all(engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]) -> None:
    """``finish_requests(None)``, as pause, sleep and shutdown do, with requests in different states."""
    slow_link(engine)
    start(engine, texts)
    engine.run_until(lambda: "LOADING" in engine.states().values())
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    engine.llm.llm_engine.output_processor.abort_requests(list(NAMES), internal=False)
    engine.assert_at_rest()
    finish_one = engine.generate([texts["write_tests"]], GREEDY)
    assert tokens(finish_one) == [stock["write_tests"]]


def test_many_disconnects_while_loading(
    engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]
) -> None:
    """Public fault 15: blocks of aborted loading requests come back every time."""
    slow_link(engine)
    free = engine.coordinator.blocks.free
    for i in range(6):
        name = f"client{i}"
        engine.add(name, texts["summarise"], GREEDY)
        engine.run_until(lambda name=name: engine.states().get(name) == "LOADING")
        engine.llm.llm_engine.abort_request([name])
        engine.core.step_fn()
        assert engine.coordinator.blocks.free == free
    assert tokens(engine.generate([texts["summarise"]], GREEDY)) == [stock["summarise"]]


@pytest.mark.parametrize("when", [3, 9, 17, 23])
def test_abort_with_two_steps_in_flight(
    engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]], when: int
) -> None:
    """What a step in flight still touches is not reused: the fence holds blocks and host pages back."""
    slow_link(engine)
    with engine.run_ahead():
        start(engine, texts)
        for _ in range(when):
            engine.step()
        engine.llm.llm_engine.abort_request(["summarise"])
        finish(engine, texts, stock, {"summarise"})


def test_shared_prefix_survives_an_abort(
    engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]
) -> None:
    """Public fault 20: two requests share a cached prefix, the first is cancelled while drafting, idle steps follow;
    the cached blocks are byte-equal and the second drafts as well as ever."""
    engine.configure()
    assert engine.scheduler.reset_prefix_cache()
    prompt = texts["continue_code"]
    (alone,) = engine.generate([prompt], GREEDY)
    caches = engine.runner.kv_caches
    cached = [b for b in engine.scheduler.kv_cache_manager.block_pool.blocks if b.block_hash is not None]
    before = [(b.block_id, b.block_hash, [c[b.block_id].clone() for c in caches]) for b in cached]
    engine.add("first", prompt, GREEDY)
    engine.run_until(lambda: engine.states().get("first") == "DRAFTING")
    engine.llm.llm_engine.abort_request(["first"])
    for _ in range(3):
        engine.core.step_fn()
    (second,) = engine.generate([prompt], GREEDY)
    assert tokens([second]) == tokens([alone]) == [stock["continue_code"]]
    report = second.kv_transfer_params["vericache"]
    assert report["accepted_per_round"] == alone.kv_transfer_params["vericache"]["accepted_per_round"]
    pool = engine.scheduler.kv_cache_manager.block_pool.blocks
    for block_id, block_hash, data in before:
        if pool[block_id].block_hash == block_hash:
            assert all((c[block_id] == d).all() for c, d in zip(caches, data, strict=True))
