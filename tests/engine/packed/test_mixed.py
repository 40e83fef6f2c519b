"""Draft pages with a width per layer, and with one per token: the output is exact, drafts are what the widths leave."""

from typing import Any

import pytest

from benchmarks.engine import summaries
from tests.engine.harness import Harness
from tests.engine.packed.conftest import GREEDY, NAMES, PAGE, RECENT
from tests.packings import by_layer, by_token, kept_bits, mixed
from tests.reference import Reference, greedy

LAYER_BITS = ((4, 4), (4, 2), (3, 3), (16, 4))


@pytest.fixture(scope="module")
def pages() -> dict[str, Any]:
    return {"page_format": "turboquant_mixed", "layer_bits": LAYER_BITS}


@pytest.mark.parametrize("compressor", [pytest.param("kvzip", marks=pytest.mark.slow), "rdkv"])
def test_rounds_equal_the_prediction(
    engine: Harness, reference: Reference, texts: dict[str, list[int]], plain: dict[str, list[int]], compressor: str
) -> None:
    """KVzip leaves widths to the layers; RDKV gives each token its own, and folded ones have their layer's."""
    options = {"chunk": 100} if compressor == "kvzip" else {"chunk": 100, "widest": 16}
    engine.configure(compressor=compressor, draft_length=12, compressor_options=options)
    with engine.recorded_kept() as kept:
        outputs = engine.generate([texts[n] for n in NAMES], GREEDY)
    form = engine.coordinator.plan.page_format
    for name, output, report in zip(NAMES, outputs, summaries(outputs), strict=True):
        ids = list(output.outputs[0].token_ids)
        assert ids == plain[name]
        selection, widths = kept[output.request_id][0], by_layer(LAYER_BITS)
        assert (selection.bits is not None) == (compressor == "rdkv")
        if selection.bits is not None:
            widths = by_token(kept_bits(selection, len(texts[name])), widths)
        packing = mixed(widths, PAGE, RECENT)
        predicted = reference.predict(texts[name], ids, selection, report["drafted_per_round"], greedy, packing)
        assert report["accepted_per_round"] == predicted, name
        full = engine.coordinator.plan.block_bytes / engine.coordinator.plan.block_tokens * len(texts[name])
        assert report["simulated_fraction"] == round(form.packed_bytes(selection) / full, 4)
        assert report["simulated_fraction"] < report["compressed_fraction"]
