"""What a request may ask for, and what may go wrong, on the V2 runner: a fast subset of the V1 runner's tests."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from benchmarks.engine import tokens
from compressors.snapkv import SnapKV
from tests.faults import BrokenError, failing_copies
from tests.interpreted.engine.v2_engine import SLOW, V2Engine, params
from vericache.store.transfer import Direction

EXACT = not torch.cuda.is_available()
KINDS = {
    "json": StructuredOutputsParams(
        json={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    ),
    "regex": StructuredOutputsParams(regex=r"(\d{3}-){4}\d{3}"),
    "choice": StructuredOutputsParams(choice=["all of it", "none of it"]),
}


def structured(temperature: float) -> list[SamplingParams]:
    """vLLM rewrites the object, so each time a copy."""
    return [
        SamplingParams(temperature=temperature, seed=5, max_tokens=16, structured_outputs=deepcopy(kind))
        for kind in KINDS.values()
    ]


@pytest.mark.parametrize(("temperature", "ratio"), [pytest.param(0.0, 1.0, marks=SLOW), (0.8, 0.4)])
def test_structured_outputs(engine: V2Engine, temperature: float, ratio: float) -> None:
    prompts = [engine.prompt(60, 60 + i) for i in range(len(KINDS))]
    engine.configure(ratio=ratio, compressor="random", counts="per_head")
    drafted = engine.generate(prompts, structured(temperature))
    assert tokens(drafted) == engine.plain(prompts, structured(temperature))
    reports = [o.kv_transfer_params["vericache"] for o in drafted]
    assert all(r["mode"] == "draft" for r in reports)
    if ratio == 1.0 and EXACT:
        assert all(r["accepted_tokens"] == r["draft_tokens"] > 0 for r in reports), "drafts obey the grammar"
    engine.at_rest()


def test_rows_that_append_to_the_context(engine: V2Engine) -> None:
    """KVzip's scoring rows write behind the context, into blocks of their own."""
    prompts = [engine.prompt(70, 30), engine.prompt(64, 31)]
    found = engine.same(prompts, params(2, 8), ratio=0.6, compressor="kvzip", counts="per_head")
    assert all(s["mode"] == "draft" for s in found)


@pytest.mark.parametrize(
    "compressor", ["h2o", *(pytest.param(name, marks=SLOW) for name in ("expected_attention", "lagkv"))]
)
def test_rows_that_replay_the_context_and_methods_that_read_it(engine: V2Engine, compressor: str) -> None:
    """H2O's rows begin anywhere in the context; Expected Attention needs values and the model's rotation."""
    options = {"h2o": {"chunk": 24}, "lagkv": {"lag": 8}}.get(compressor, {})
    prompts = [engine.prompt(70, 30), engine.prompt(64, 31)]
    found = engine.same(prompts, params(2, 8), ratio=0.6, compressor=compressor, compressor_options=options)
    assert all(s["mode"] == "draft" for s in found)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"bad_words": ["e", " the"]}, id="bad words"),
        pytest.param({"allowed_token_ids": list(range(40, 90))}, marks=SLOW, id="allowed tokens"),
        pytest.param({"stop_token_ids": list(range(100, 180))}, marks=SLOW, id="stop tokens"),
    ],
)
def test_more_request_features(engine: V2Engine, options: dict[str, Any]) -> None:
    engine.same([engine.prompt(60, 32), engine.prompt(70, 33)], params(2, 8, **options), ratio=0.8)


def test_stop_strings_and_several_outputs(engine: V2Engine) -> None:
    prompt = engine.prompt(60, 34)
    (whole,) = engine.generate([prompt], params(1, 14, detokenize=True))
    stop = whole.outputs[0].text[5:8]
    wanted = [{"detokenize": True, "stop": [stop]}, {"n": 2, "temperature": 0.9}]
    for options in wanted:
        engine.configure(ratio=1.0)
        (drafted,) = engine.generate([prompt], params(1, 14, **options))
        engine.coordinator.configure(engine.coordinator.settings.model_copy(update={"min_prompt_tokens": 100_000}))
        (plain,) = engine.generate([prompt], params(1, 14, **options))
        assert [o.token_ids for o in drafted.outputs] == [o.token_ids for o in plain.outputs]
        assert [o.stop_reason for o in drafted.outputs] == [o.stop_reason for o in plain.outputs]
    engine.at_rest()


@pytest.mark.parametrize(
    ("direction", "which"),
    [
        (Direction.TO_DEVICE, 2),
        pytest.param(Direction.TO_HOST, 1, marks=SLOW),
        pytest.param(Direction.TO_HOST, 3, marks=SLOW),
    ],
)
def test_failing_copies(engine: V2Engine, direction: Direction, which: int) -> None:
    """A reload, an offload, a write-back: the request is computed again, or goes on; its row state begins anew."""
    prompts = [engine.prompt(60, 35), engine.prompt(70, 36)]
    expected = engine.plain(prompts, params(2, 10))
    engine.configure(ratio=0.8)
    with failing_copies(engine, direction, lambda n: n == which):
        outputs = engine.generate(prompts, params(2, 10))
    assert tokens(outputs) == expected
    assert sorted(o.kv_transfer_params["vericache"]["recoveries"] for o in outputs) == [0, 1]
    engine.at_rest()


def test_failing_compressor(engine: V2Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise BrokenError("this compressor always fails")

    monkeypatch.setattr(SnapKV, "observe", broken)
    options = {"compressor": "snapkv", "counts": "uniform", "compressor_options": {"window": 8, "kernel": 3}}
    found = engine.same([engine.prompt(60, 37)], params(1, 8), ratio=0.8, max_recoveries=1, **options)
    assert found[0]["mode"] == "resident"


def test_recomputed_in_the_middle_of_a_round(engine: V2Engine) -> None:
    expected = engine.plain([engine.prompt(60, 38)], params(1, 12))
    engine.configure(ratio=0.8)
    engine.llm.llm_engine.add_request("a", {"prompt_token_ids": engine.prompt(60, 38)}, params(1, 12)[0])
    while not any(len(r.drafts) > 1 for r in engine.coordinator.records.values()):
        engine.llm.llm_engine.step()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    outputs = []
    while engine.llm.llm_engine.has_unfinished_requests():
        outputs += engine.llm.llm_engine.step()
    assert [list(o.outputs[0].token_ids) for o in outputs if o.finished] == expected
    engine.at_rest()
