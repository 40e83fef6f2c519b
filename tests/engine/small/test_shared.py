"""Requests whose prompts begin alike verify together on one reload of that part: the tokens are stock vLLM's, the bytes
on the link are counted once, and a sharer that leaves takes nothing from the others."""

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
PREFIX = 192  # tokens, six blocks
METHOD: dict[str, Any] = {"compressor": "streaming_llm", "counts": "uniform"}
SLOW: dict[str, Any] = {**METHOD, "draft_length": 12, "iteration_seconds": 0.05, "link_bytes_per_second": 4e7}


@pytest.fixture
def asked(texts: dict[str, list[int]]) -> list[list[int]]:
    """One document, eight questions."""
    document = texts["continue_code"][:PREFIX]
    return [document + tail[: 20 + 5 * i] for i, tail in enumerate(texts.values())]


@pytest.fixture(scope="module")
def _known() -> list[list[int]]:
    return []


@pytest.fixture
def expected(engine: Harness, asked: list[list[int]], _known: list[list[int]]) -> list[list[int]]:
    """From plain vLLM rows; nothing stays in the prefix cache."""
    if not _known:
        engine.configure(mode="off")
        _known += tokens(engine.generate(asked, GREEDY))
        assert engine.scheduler.reset_prefix_cache()
    return _known


def test_bytes_per_accepted_token_fall_with_the_number_of_sharers(
    engine: Harness, asked: list[list[int]], expected: list[list[int]]
) -> None:
    """Over those of the same requests each with a reload of its own, since drafts are not equally good for all."""
    cost: dict[str, list[float]] = {"on": [], "off": []}
    for shared, found in cost.items():
        for count in (1, 3, 7):
            engine.configure(**METHOD, shared_verifies=shared)
            before = engine.coordinator.stats.moved["Load"]
            outputs = engine.generate(asked[:count], GREEDY)
            assert tokens(outputs) == expected[:count]
            accepted = sum(s["accepted_tokens"] for s in summaries(outputs))
            found.append((engine.coordinator.stats.moved["Load"] - before) / accepted)
            engine.assert_at_rest()
    share = [on / off for on, off in zip(*cost.values(), strict=True)]
    assert share == sorted(share, reverse=True)
    assert share[0] == 1
    assert share[-1] < 0.5


def test_the_same_prompt_again_and_again(
    engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]
) -> None:
    """Also its last full block is shared; what follows it is each one's own."""
    engine.configure(**METHOD)
    outputs = engine.generate([texts["summarise"]] * 5, GREEDY)
    assert tokens(outputs) == [stock["summarise"]] * 5
    assert all(s["rounds"] > 1 for s in summaries(outputs))


def test_different_sampling_over_one_prompt(engine: Harness, texts: dict[str, list[int]]) -> None:
    engine.configure(**METHOD)
    asked = [texts["summarise"]] * 5
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=10 + 7 * i, ignore_eos=True) for i in range(len(asked))
    ]
    assert tokens(engine.generate(asked, params)) == engine.plain(asked, params)


def test_full_kv_is_in_the_host_once(engine: Harness, asked: list[list[int]], expected: list[list[int]]) -> None:
    engine.configure(**METHOD)
    host, block = engine.coordinator.reserved.host, engine.coordinator.plan.block_tokens
    moved = engine.coordinator.stats.moved["Offload"]
    for i, prompt in enumerate(asked[:4]):
        engine.add(str(i), prompt, GREEDY)
    engine.run_until(lambda: len(engine.states()) == 4 and "DEMOTING" not in engine.states().values())
    held = [record.host_pages for record in engine.coordinator.records.values()]
    assert len({tuple(pages[: PREFIX // block]) for pages in held}) == 1
    assert host.size - host.free == sum(map(len, held)) - 3 * PREFIX // block
    copied = (engine.coordinator.stats.moved["Offload"] - moved) // engine.coordinator.plan.block_bytes
    assert copied <= PREFIX // block + 4 * 2
    done = engine.drain()
    assert [list(done[str(i)].outputs[0].token_ids) for i in range(4)] == expected[:4]


@pytest.mark.parametrize(
    ("state", "victims"),
    [
        pytest.param("WAITING", 1, marks=pytest.mark.slow),
        pytest.param("DRAFTING", 1, marks=pytest.mark.slow),
        ("LOADING", 1),
        pytest.param("VERIFYING", 1, marks=pytest.mark.slow),
        pytest.param("LOADING", 3, marks=pytest.mark.slow),
        ("VERIFYING", 3),
    ],
)
def test_abort_of_a_sharer(
    engine: Harness, asked: list[list[int]], expected: list[list[int]], state: str, victims: int
) -> None:
    """In whatever state, one or all but one: with two steps in flight, so that what they used is still in use."""
    engine.configure(**SLOW, **({"window": 16} if state == "WAITING" else {}))
    with engine.run_ahead():
        for i, prompt in enumerate(asked[:4]):
            engine.add(str(i), prompt, GREEDY)
        gone: list[str] = []

        def reached() -> bool:
            gone[:] = sorted(name for name, s in engine.states().items() if s == state)[:victims]
            return bool(gone)

        engine.run_until(reached)
        engine.llm.llm_engine.abort_request(gone)
        done = engine.drain()
    for i in range(4):
        if str(i) not in gone:
            assert list(done[str(i)].outputs[0].token_ids) == expected[i]


@pytest.mark.parametrize(
    ("failing", "ahead"),
    [
        pytest.param(1, False, marks=pytest.mark.slow),
        (1, True),
        pytest.param(2, True, marks=pytest.mark.slow),
        pytest.param(5, True, marks=pytest.mark.slow),
    ],
)
def test_a_reload_that_fails_fails_for_all_who_share_it(
    engine: Harness, asked: list[list[int]], expected: list[list[int]], failing: int, ahead: bool
) -> None:
    engine.configure(**SLOW)
    with (
        failing_copies(engine, Direction.TO_DEVICE, lambda n: n == failing),
        engine.run_ahead() if ahead else nullcontext(),
    ):
        outputs = engine.generate(asked[:4], GREEDY)
    assert tokens(outputs) == expected[:4]
    recovered = [s["recoveries"] for s in summaries(outputs)]
    assert max(recovered) == 1
    if failing == 1:  # the first of a party brings the prefix
        assert sum(recovered) > 1


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_copy_that_fails_fails_for_all_who_rely_on_it(
    engine: Harness, asked: list[list[int]], expected: list[list[int]], ahead: bool
) -> None:
    engine.configure(**METHOD)
    with failing_copies(engine, Direction.TO_HOST, lambda n: n == 1), engine.run_ahead() if ahead else nullcontext():
        outputs = engine.generate(asked[:4], GREEDY)
    assert tokens(outputs) == expected[:4]
    assert sum(s["recoveries"] for s in summaries(outputs)) >= 1


def test_one_comes_later_and_one_is_much_shorter(
    engine: Harness, asked: list[list[int]], expected: list[list[int]]
) -> None:
    engine.configure(**SLOW)
    short = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    engine.add("0", asked[0], GREEDY)
    engine.add("1", asked[1], short)
    engine.run_until(lambda: "LOADING" in engine.states().values())
    engine.add("2", asked[2], GREEDY)
    done = engine.drain()
    assert [list(done[str(i)].outputs[0].token_ids) for i in range(3)] == [expected[0], expected[1][:9], expected[2]]


@pytest.mark.slow
def test_lock_step(engine: Harness, asked: list[list[int]], expected: list[list[int]]) -> None:
    engine.configure(**SLOW, policy="lockstep")
    outputs = engine.generate(asked[:5], GREEDY)
    assert tokens(outputs) == expected[:5]
