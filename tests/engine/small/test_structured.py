"""Structured outputs while drafting: what plain rows give, and drafts under the same grammar."""

import re
from contextlib import nullcontext
from copy import deepcopy

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from benchmarks.engine import summaries, tokens
from tests.engine.harness import Harness

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}
CHOICES = ["the licence applies to all of it", "the licence applies to none of it"]
KINDS = {
    "json": StructuredOutputsParams(json=SCHEMA),
    "json_object": StructuredOutputsParams(json_object=True),
    "regex": StructuredOutputsParams(regex=r"(\d{3}-){6}\d{3}"),
    "choice": StructuredOutputsParams(choice=CHOICES),
    "grammar": StructuredOutputsParams(grammar='root ::= "let " ("x" | "y") " = " [0-9]+ ";" root?'),
}


def structured(kind: str, temperature: float = 0.0) -> SamplingParams:
    """A copy each time: vLLM rewrites the object (a choice becomes a grammar)."""
    wanted = deepcopy(KINDS[kind])
    return SamplingParams(temperature=temperature, seed=5, max_tokens=48, structured_outputs=wanted)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("ahead", [False, True])
def test_output_is_that_of_plain_rows(
    engine: Harness, texts: dict[str, list[int]], temperature: float, ahead: bool
) -> None:
    """All kinds beside unconstrained requests, with poor drafts, which the grammar must survive being wrong."""
    prompts = list(texts.values())[: len(KINDS) + 1]
    params = [*(structured(k, temperature) for k in KINDS), SamplingParams(temperature=0, max_tokens=30)]
    expected = engine.plain(prompts, params)
    engine.configure(compressor="random", counts="per_head", ratio=0.3)
    with engine.run_ahead() if ahead else nullcontext():
        outputs = engine.generate(prompts, params)
    assert tokens(outputs) == expected
    assert {s["mode"] for s in summaries(outputs)} == {"draft"}


def test_drafts_obey_the_grammar(engine: Harness, texts: dict[str, list[int]]) -> None:
    """A perfect drafter that ignores the grammar proposes what the grammar forbids; ours is nearly always accepted."""
    engine.configure(compressor="streaming_llm", counts="uniform", ratio=1.0)
    kinds = ["json", "json_object", "regex", "choice"]
    outputs = engine.generate([texts["summarise"]] * len(kinds), [structured(k) for k in kinds])
    for kind, summary in zip(kinds, summaries(outputs), strict=True):
        drafted = sum(summary["drafted_per_round"])
        assert sum(summary["accepted_per_round"]) >= 0.9 * drafted > 0, kind
    assert re.fullmatch(KINDS["regex"].regex, outputs[2].outputs[0].text)
    assert outputs[3].outputs[0].text in CHOICES


def test_many_with_one_schema(engine: Harness, texts: dict[str, list[int]]) -> None:
    """Public faults 11 and 12: a shared prefix and schema, drafts as long as the answer, more requests than seats."""
    prompts = [[*texts["continue_code"], *texts["summarise"][: 2 * i]] for i in range(12)]
    expected = engine.plain(prompts, structured("json"))
    engine.configure(compressor="snapkv", counts="uniform", draft_length=30)
    assert tokens(engine.generate(prompts, structured("json"))) == expected


def test_a_recomputed_request_keeps_its_grammar(engine: Harness, texts: dict[str, list[int]]) -> None:
    """The matcher is rewound when a request becomes a plain row in the middle of a round."""
    expected = engine.plain([texts["summarise"]], structured("json"))
    engine.configure(compressor="snapkv", counts="uniform", draft_length=12)
    engine.add("a", texts["summarise"], structured("json"))
    engine.run_until(lambda: any(r.grammar_ahead > 3 for r in engine.coordinator.records.values()))
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    outputs = engine.drain()
    assert [list(o.outputs[0].token_ids) for o in outputs.values()] == expected
