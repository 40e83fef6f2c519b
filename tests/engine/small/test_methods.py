"""Every registered method, count mode and selector drafts in the engine, and what comes out is stock vLLM's output."""

from typing import Any

import pytest
from vllm import SamplingParams

from benchmarks.engine import summaries, tokens
from compressors import METHODS
from compressors.budget import COUNTS
from compressors.select import SELECTORS
from tests.engine.harness import Harness
from vericache.request_options import RequestOptions

MODES = [{"counts": counts} for counts in COUNTS] + [{"selector": selector} for selector in SELECTORS[1:]]


def asking(**options: Any) -> SamplingParams:
    extra = {f"vericache_{name}": value for name, value in options.items()}
    return SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, extra_args=extra)


@pytest.mark.parametrize("compressor", [m.name for m in METHODS.values() if m.network is None])
def test_every_method(
    engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]], compressor: str
) -> None:
    engine.configure(compressor=compressor, ratio=0.3, draft_length=6)
    names = list(texts)[:3]
    outputs = engine.generate([texts[n] for n in names], asking())
    assert tokens(outputs) == [stock[n] for n in names]
    for summary in summaries(outputs):
        assert (summary["mode"], summary["compressor"]) == ("draft", compressor), summary["reason"]
        assert summary["counts"] == METHODS[compressor].default_counts
        assert summary["rounds"] > 1


def test_every_count_mode_and_selector(
    engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]
) -> None:
    engine.configure(
        compressor="snapkv",
        counts="uniform",
        ratio=0.3,
        draft_length=6,
        request_options=tuple(RequestOptions.model_fields),
    )
    names = list(texts)[: len(MODES)]
    with engine.recorded_kept() as kept:
        outputs = engine.generate([texts[n] for n in names], [asking(**mode) for mode in MODES])
    assert tokens(outputs) == [stock[n] for n in names]
    heads = engine.worker.arena.shape.layers * engine.worker.arena.shape.kv_heads
    for name, mode, output, summary in zip(names, MODES, outputs, summaries(outputs), strict=True):
        assert summary["mode"] == "draft", summary["reason"]
        assert mode.items() <= summary.items()
        first, most = int(kept[output.request_id][0].counts.sum()), heads * int(0.3 * len(texts[name]) + 0.5)
        assert first <= most if mode.get("selector") == "poisson" else first == most


def test_what_a_dynamic_budget_leaves_is_free_for_others(
    engine: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]
) -> None:
    engine.configure(compressor="dbudgetkv", ratio=0.9, draft_length=6, compressor_options={"loss_percent": 60})
    names = list(texts)[:2]
    for name in names:
        engine.add(name, texts[name], asking())
    engine.run_until(lambda: list(engine.states().values()) == ["DRAFTING"] * 2)
    reserved, records = engine.coordinator.reserved, engine.coordinator.records.values()
    bound = sum(reserved.units(r.spec, r.filled_at, r.tail_capacity) for r in records)
    held = sum(len(slot.pages) + slot.tail.numel() for slot in engine.worker.arena.slots.values())
    assert held <= reserved.arena.used == sum(r.arena_units for r in records) < 0.75 * bound
    outputs = engine.drain()
    assert [list(outputs[n].outputs[0].token_ids) for n in names] == [stock[n] for n in names]


def test_compressors_know_the_models_rotary_embedding(engine: Harness) -> None:
    rotary = engine.worker.compression._shape.rotary
    assert rotary is not None
    assert rotary.neox
    assert rotary.cos_sin.shape[1] == engine.worker.arena.shape.head_dim
