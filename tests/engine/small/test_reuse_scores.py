"""Scores of contexts that begin alike are computed once; the tokens are stock vLLM's."""

from typing import Any

import pytest
from vllm import SamplingParams

from benchmarks.engine import summaries, tokens
from tests.engine.conftest import OUTPUT_TOKENS
from tests.engine.harness import Harness

GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
CHUNK = 64
METHOD: dict[str, Any] = {"compressor": "kvzip", "compressor_options": {"chunk": CHUNK}}


class Rows:
    """Scoring rows that the coordinator plans, by request."""

    def __init__(self, engine: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count: dict[str, int] = {}
        self.chunks: list[int] = []
        step = engine.coordinator.step

        def watched(*args: Any) -> Any:
            plan = step(*args)
            for probing in plan.probes:
                name = probing.record.request_id
                self.count[name] = self.count.get(name, 0) + 1
                self.chunks.append(probing.row.index)
            return plan

        monkeypatch.setattr(engine.coordinator, "step", watched)


@pytest.fixture
def asked(texts: dict[str, list[int]]) -> list[list[int]]:
    """One document of three chunks, some questions."""
    document = texts["continue_code"][: 3 * CHUNK]
    return [document + tail[: 20 + 5 * i] for i, tail in enumerate(list(texts.values())[:4])]


@pytest.fixture
def rows(engine: Harness, monkeypatch: pytest.MonkeyPatch) -> Rows:
    engine.coordinator.scores.withdraw_all()
    return Rows(engine, monkeypatch)


def plain(engine: Harness, asked: list[list[int]]) -> list[list[int]]:
    return engine.plain(asked, [GREEDY] * len(asked))


def test_a_document_is_scored_once(engine: Harness, asked: list[list[int]], rows: Rows) -> None:
    expected = plain(engine, asked)
    engine.configure(**METHOD)
    for prompt, output in zip(asked, expected, strict=True):
        found = engine.generate([prompt], GREEDY)
        assert tokens(found) == [output]
        assert summaries(found)[0]["rounds"] > 0
    assert rows.chunks == [0, 1, 2, 3, 3, 3, 3]
    engine.assert_at_rest()


def test_at_the_same_time(engine: Harness, asked: list[list[int]], rows: Rows) -> None:
    """One scores, the others wait for it."""
    expected = plain(engine, asked)
    engine.configure(**METHOD)
    assert tokens(engine.generate(asked, GREEDY)) == expected
    assert sorted(rows.chunks) == [0, 1, 2, 3, 3, 3, 3]
    engine.assert_at_rest()


@pytest.mark.parametrize("how", ["reuse_scores", "other chunks", "prefix cache emptied", "of another salt"])
def test_not_where_they_do_not_hold(engine: Harness, asked: list[list[int]], rows: Rows, how: str) -> None:
    engine.configure(**METHOD, **({"reuse_scores": "off"} if how == "reuse_scores" else {}))
    salted = [{"prompt_token_ids": prompt, "cache_salt": str(i)} for i, prompt in enumerate(asked)]
    for i, prompt in enumerate(asked[:2]):
        if i and how == "other chunks":
            engine.configure(compressor="kvzip", compressor_options={"chunk": CHUNK + 32})
        if i and how == "prefix cache emptied":
            assert engine.scheduler.reset_prefix_cache()
        if how == "of another salt":
            engine.llm.llm_engine.add_request(str(i), salted[i], GREEDY)
            engine.drain()
        else:
            engine.generate([prompt], GREEDY)
    assert len(rows.chunks) == (7 if how == "other chunks" else 8)


def test_a_context_that_is_compressed_anew(engine: Harness, texts: dict[str, list[int]], rows: Rows) -> None:
    """Only what came since is scored."""
    prompt, params = texts["continue_code"], SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    expected = engine.plain([prompt], params)
    engine.configure(**METHOD, tail_tokens=32)
    assert tokens(engine.generate([prompt], params)) == expected
    assert rows.chunks[:4] == [0, 1, 2, 3]
    assert len(rows.chunks) > 4, "the context was compressed anew"
    assert max(rows.chunks.count(i) for i in range(3)) == 1
    engine.assert_at_rest()


def test_abort_in_the_middle_of_a_pass(engine: Harness, asked: list[list[int]], rows: Rows) -> None:
    """What the pass relied on is there for others; what it would have left is not."""
    expected = plain(engine, asked)
    engine.configure(**METHOD)
    engine.generate([asked[0]], GREEDY)
    engine.add("gone", asked[1], GREEDY)
    engine.run_until(lambda: rows.chunks[4:] == [3])
    engine.llm.llm_engine.abort_request(["gone"])
    engine.drain()
    assert tokens(engine.generate([asked[2]], GREEDY)) == [expected[2]]
    assert rows.chunks == [0, 1, 2, 3, 3, 3]
    engine.assert_at_rest()


def test_abort_while_others_wait(engine: Harness, asked: list[list[int]], rows: Rows) -> None:
    """Another one scores in its place."""
    expected = plain(engine, asked)
    engine.configure(**METHOD)
    for i, prompt in enumerate(asked):
        engine.add(str(i), prompt, GREEDY)
    engine.run_until(lambda: rows.chunks == [0, 1])
    engine.llm.llm_engine.abort_request(["0"])
    done = engine.drain()
    assert [list(done[str(i)].outputs[0].token_ids) for i in (1, 2, 3)] == expected[1:]
    assert sorted(rows.chunks[2:]) == [0, 1, 2, 3, 3, 3]
    engine.assert_at_rest()
