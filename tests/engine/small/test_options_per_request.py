"""Requests with options of their own in one batch: each drafts as it asked, all give the output of plain rows."""

from typing import Any

import pytest
from vllm import SamplingParams

from benchmarks.engine import summaries, tokens
from tests.engine.harness import Harness
from vericache.errors import RequestError
from vericache.request_options import RequestOptions

ALL = tuple(RequestOptions.model_fields)


def asking(**options: Any) -> SamplingParams:
    extra = {f"vericache_{name}": value for name, value in options.items()}
    return SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, extra_args=extra)


def test_options_in_one_batch(engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]) -> None:
    engine.configure(compressor="snapkv", counts="uniform", ratio=0.5, draft_length=8, request_options=ALL)
    wishes: list[dict[str, Any]] = [
        {},
        {"compressor": "kvzip", "counts": "per_head", "ratio": 0.3},
        {"compressor": "streaming_llm", "ratio": 0.8, "draft_length": 3},
        {"compressor": "random", "counts": "per_layer"},
        {"draft_length": 1},
        {"mode": "off"},
    ]
    names = list(texts)[: len(wishes)]
    outputs = engine.generate([texts[n] for n in names], [asking(**w) for w in wishes])
    assert tokens(outputs) == [stock[n] for n in names]
    found = summaries(outputs)
    assert [s["mode"] for s in found] == ["draft"] * 5 + ["resident"]
    for wish, summary in zip(wishes[:5], found, strict=False):
        assert summary["compressor"] == wish.get("compressor", "snapkv")
        assert summary["counts"] == wish.get("counts", "uniform")
        assert summary["ratio"] == wish.get("ratio", 0.5)
    assert max(found[2]["drafted_per_round"]) <= 4 + 1
    assert max(found[4]["drafted_per_round"]) <= 2 + 1


def test_short_prompts_draft_when_asked(engine: Harness, texts: dict[str, list[int]]) -> None:
    prompt = texts["summarise"][:100]
    expected = engine.plain([prompt], asking())
    engine.configure(compressor="snapkv", counts="uniform", ratio=0.5)
    auto, forced = engine.generate([prompt, prompt], [asking(), asking(mode="draft")])
    assert tokens([auto, forced]) == expected * 2
    assert [s["mode"] for s in summaries([auto, forced])] == ["resident", "draft"]


def test_a_wrong_option_stops_the_call_before_it_starts(engine: Harness, texts: dict[str, list[int]]) -> None:
    with pytest.raises(RequestError) as error:
        engine.generate([texts["summarise"]] * 2, [asking(), asking(ratio=0.5)])
    assert error.value.field == "vericache_ratio"
    assert not engine.llm.llm_engine.has_unfinished_requests()


def test_an_option_that_got_past_the_door_is_answered_not_fatal(engine: Harness, texts: dict[str, list[int]]) -> None:
    engine.configure(request_options=ALL)
    engine.add("a", texts["summarise"], asking(ratio=7))
    (summary,) = summaries(engine.drain().values())
    assert summary["mode"] == "resident"
    assert "vericache_ratio" in summary["reason"]


def test_a_compressor_that_got_past_the_door_is_answered_not_fatal(
    engine: Harness, texts: dict[str, list[int]]
) -> None:
    """Its texts were not made ready."""
    engine.configure(compressor="snapkv", request_options=("mode",))
    engine.add("a", texts["summarise"], asking(compressor="kvzip"))
    (summary,) = summaries(engine.drain().values())
    assert (summary["mode"], summary["reason"]) == ("resident", "this server lets no client choose compressor 'kvzip'")
