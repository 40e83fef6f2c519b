"""Packed draft pages: the output is exact whatever they lose, and they lose what their format says."""

import pytest
from vllm import SamplingParams

from benchmarks.engine import summaries, tokens
from tests.engine.harness import Harness
from tests.engine.packed.conftest import GREEDY, NAMES, OUTPUT, PAGE, RECENT
from tests.packings import packing
from tests.reference import Reference, greedy

THETA = 1e5  # of the model's rotary embedding
TAIL = 32  # with a round of 64 it fills whole pages: the output does not fit in what is left of the last one


@pytest.mark.parametrize(("compressor", "counts"), [("kvzip", "per_head"), ("streaming_llm", "uniform")])
def test_rounds_equal_the_prediction(
    engine: Harness,
    reference: Reference,
    texts: dict[str, list[int]],
    page_format: str,
    plain: dict[str, list[int]],
    compressor: str,
    counts: str,
) -> None:
    """Also those after verified tokens were folded."""
    options = {"chunk": 100} if compressor == "kvzip" else {}
    engine.configure(compressor=compressor, counts=counts, draft_length=12, compressor_options=options)
    with engine.recorded_kept() as kept:
        outputs = engine.generate([texts[n] for n in NAMES[:2]], GREEDY)
    for name, output, report in zip(NAMES, outputs, summaries(outputs), strict=False):
        ids = list(output.outputs[0].token_ids)
        assert ids == plain[name]
        selection, drafted = kept[output.request_id][0], report["drafted_per_round"]
        predicted = reference.predict(
            texts[name], ids, selection, drafted, greedy, packing(page_format, PAGE, RECENT, THETA)
        )
        assert report["accepted_per_round"] == predicted, name
        simulated = page_format.startswith("kvquant")
        assert ("simulated_fraction" in report) == simulated
        assert report["simulated_fraction" if simulated else "compressed_fraction"] < 0.16
        assert (report["compressed_fraction"] > 0.2) == simulated


def test_rows_of_all_kinds_beside_each_other(
    engine: Harness, texts: dict[str, list[int]], plain: dict[str, list[int]]
) -> None:
    """Drafting, short and resident requests, greedy and sampled, two steps in flight; one is aborted after folds."""
    engine.configure(compressor="streaming_llm", counts="uniform", draft_length=6)
    sampled = SamplingParams(temperature=0.8, seed=5, max_tokens=OUTPUT, ignore_eos=True)
    off = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, extra_args={"vericache_mode": "off"})
    requests = [(texts[n], GREEDY) for n in NAMES]
    requests += [(texts[NAMES[0]], sampled), (texts[NAMES[1]], off), (texts[NAMES[2]][:60], GREEDY)]
    alone = engine.plain([p for p, _ in requests[4:]], [params for _, params in requests[4:]])
    with engine.run_ahead():
        for i, (prompt, params) in enumerate(requests):
            engine.add(str(i), prompt, params)
        engine.add("aborted", texts[NAMES[3]], GREEDY)
        records = engine.coordinator.records
        engine.run_until(lambda: any(r.folded > 0 for i, r in records.items() if i.startswith("aborted")))
        engine.llm.llm_engine.abort_request(["aborted"])
        done = engine.drain()
    assert [list(done[str(i)].outputs[0].token_ids) for i in range(4)] == [plain[n] for n in NAMES]
    assert [list(done[str(i)].outputs[0].token_ids) for i in range(4, 7)] == alone
    modes = [done[str(i)].kv_transfer_params["vericache"]["mode"] for i in range(7)]
    assert modes == ["draft"] * 5 + ["resident"] * 2


def test_full_arena_and_long_outputs(engine: Harness, texts: dict[str, list[int]], plain: dict[str, list[int]]) -> None:
    """Room for two: the others wait their turn or stay resident. The tail's reservation holds through folds, and where
    it ends the context is compressed anew."""
    engine.configure(
        compressor="snapkv", counts="per_head", tail_tokens=TAIL, draft_length=6, compressor_options={"window": 8}
    )
    reserved, settings = engine.coordinator.reserved, engine.coordinator.settings
    longest = max(len(texts[n]) for n in NAMES) + 1
    hostage = reserved.arena.free - 2 * reserved.units(settings.method, longest, TAIL + settings.window)
    assert reserved.arena.take(hostage)
    with engine.recorded_kept() as kept:
        outputs = engine.generate([texts[n] for n in NAMES], GREEDY)
    reserved.arena.release(hostage)
    assert tokens(outputs) == [plain[n] for n in NAMES]
    assert any(s["mode"] == "draft" for s in summaries(outputs))
    assert max(len(selections) for selections in kept.values()) >= 2, "no context was compressed anew"
