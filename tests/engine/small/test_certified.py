"""Certified decode in the engine: with almost no error allowed it is dense decoding, and what it did is reported."""

from typing import Any

import pytest
from vllm import SamplingParams

from benchmarks.engine import summaries, tokens
from tests.engine.conftest import SMALL_LAYERS
from tests.engine.harness import Harness
from vericache.errors import RequestError

ALLOWED = ("mode", "bound", "epsilon", "delta", "compressor", "ratio", "selector")
KNOBS: dict[str, Any] = {"compressor": "snapkv", "ratio": 0.3, "request_options": ALLOWED}


def asking(epsilon: float = 0.05, tokens: int = 16, **options: Any) -> SamplingParams:
    extra = {"vericache_mode": "certified", "vericache_epsilon": epsilon} | {
        f"vericache_{name}": value for name, value in options.items()
    }
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=extra)


@pytest.fixture(autouse=True)
def a_quarter_is_measured(engine: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.worker.certified, "measured", 0.25)  # read when an engine starts


def test_as_epsilon_goes_to_0_the_tokens_are_dense_attentions(
    engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]
) -> None:
    engine.configure(**KNOBS)
    names = list(texts)[:2]
    outputs = engine.generate([texts[n] for n in names], [asking(1e-9)] * 2)
    assert tokens(outputs) == [stock[n][:16] for n in names]
    for summary in summaries(outputs):
        assert summary["mode"] == "certified"
        found = summary["certified"]
        assert found["tokens"] == 15  # the first one is the prompt's
        assert found["decisions"] == 15 * SMALL_LAYERS * 3
        assert found["largest_certificate"] <= 1e-9
        assert found["largest_measured_error"] < 1e-5


@pytest.mark.parametrize("length", [16, 24])
def test_a_full_tail_is_computed_anew_and_sampled_again(
    engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]], length: int
) -> None:
    """Beside requests that draft and one that stays resident. The 16th token is that of the prompt computed anew; the
    answer is a certified one even if it is the last."""
    engine.configure(**KNOBS, window=10, draft_length=8, tail_tokens=4)
    names = list(texts)[:3]
    plain = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    off = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, extra_args={"vericache_mode": "off"})
    outputs = engine.generate([texts[n] for n in names], [asking(1e-9, length), plain, off])
    assert tokens(outputs) == [stock[n][:length] for n in names]
    found = summaries(outputs)
    assert [s["mode"] for s in found] == ["certified", "draft", "resident"]
    assert found[0]["recoveries"] == 0
    assert found[0]["certified"]["tokens"] == length - 2


def test_what_a_loose_target_did_is_reported(engine: Harness, texts: dict[str, list[int]]) -> None:
    engine.configure(**KNOBS)
    names = list(texts)[:2]
    strict, loose = engine.generate([texts[names[0]]] * 2, [asking(0.01), asking(0.5)])
    few, many = (summary["certified"] for summary in summaries([loose, strict]))
    assert 0 < few["fetched_tokens"] < many["fetched_tokens"]
    assert few["largest_measured_error"] > 0
    assert few["largest_certificate"] <= 0.5
    assert few["fetched_bytes"] == few["fetched_tokens"] * 2 * 64 * 4
    assert (few["epsilon"], few["delta"]) == (0.5, 0.1)


def test_the_output_can_be_certified_instead(engine: Harness, texts: dict[str, list[int]]) -> None:
    """Its certificate takes more tokens than the denominator's, and more for a smaller error."""
    engine.configure(**KNOBS)
    text = texts[next(iter(texts))]
    asked = [asking(0.5), asking(0.5, bound="output"), asking(0.1, bound="output")]
    denominator, loose, strict = (s["certified"] for s in summaries(engine.generate([text] * 3, asked)))
    assert [each["bound"] for each in (denominator, loose, strict)] == ["denominator", "output", "output"]
    assert loose["decisions"] == strict["decisions"] == 15 * SMALL_LAYERS * 3
    assert denominator["fetched_tokens"] < loose["fetched_tokens"] < strict["fetched_tokens"]
    for each, epsilon in ((loose, 0.5), (strict, 0.1)):
        assert each["largest_certificate"] <= epsilon
        assert each["measured_decisions"] > 0
        assert each["largest_measured_error"] <= epsilon


def test_it_is_refused_where_the_server_does_not_allow_it(engine: Harness, texts: dict[str, list[int]]) -> None:
    engine.configure(compressor="snapkv")
    with pytest.raises(RequestError, match="not allowed by this server"):
        engine.generate([texts["summarise"]], [asking()])
    engine.configure(**KNOBS)
    with pytest.raises(RequestError, match="greater than 0"):
        engine.generate([texts["summarise"]], [asking(0.0)])
    assert not engine.llm.llm_engine.has_unfinished_requests()
