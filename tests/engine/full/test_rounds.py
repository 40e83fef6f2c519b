"""Every round accepts exactly what an independent forward predicts: identity cannot see a broken drafter."""

from pathlib import Path

import pytest
import torch
from vllm import SamplingParams

from benchmarks.engine import summaries, tokens
from compressors import METHODS
from compressors.budget import COUNTS
from tests.engine.harness import Harness
from tests.reference import Reference, greedy
from vericache.engine.sampling import row_seeds

OWN = {(m.name, m.default_counts) for m in METHODS.values() if m.network is None}
USUAL = {
    ("kvzip", "per_head"),
    ("kvzip", "uniform"),
    ("snapkv", "uniform"),
    ("streaming_llm", "uniform"),
    ("rkv", "uniform"),
}
MODES = [
    pytest.param(*mode, marks=() if mode in USUAL else pytest.mark.slow)
    for mode in sorted(OWN | {("kvzip", counts) for counts in COUNTS})
]


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.mark.parametrize(("compressor", "counts"), MODES)
def test_rounds_equal_the_prediction(
    engine: Harness, reference: Reference, texts: dict[str, list[int]], compressor: str, counts: str
) -> None:
    names = ["continue_code", "continue_prose", "summarise"][: 3 if compressor == "kvzip" else 1]
    options = {"chunk": 100} if "chunk" in METHODS[compressor].options else {}
    engine.configure(compressor=compressor, counts=counts, draft_length=12, compressor_options=options)
    params = SamplingParams(temperature=0, max_tokens=36, ignore_eos=True)
    with engine.recorded_kept() as kept:
        outputs = engine.generate([texts[n] for n in names], params)
    for name, output, report in zip(names, outputs, summaries(outputs), strict=True):
        output_ids = list(output.outputs[0].token_ids)
        predicted = reference.predict(
            texts[name], output_ids, kept[output.request_id][0], report["drafted_per_round"], greedy
        )
        assert report["accepted_per_round"] == predicted, name


def test_sampled_rounds_equal_the_prediction(
    engine: Harness, reference: Reference, texts: dict[str, list[int]]
) -> None:
    """T = 0.7: the drafter's tokens come from its own logits and the noise of the verifier's positions."""
    prompt, seed = texts["continue_prose"], 11
    engine.configure(draft_length=12)
    params = SamplingParams(temperature=0.7, seed=seed, max_tokens=48, ignore_eos=True)
    with engine.recorded_kept() as kept:
        (output,) = engine.generate([prompt], params)
    (report,) = summaries([output])

    def choose(logits: torch.Tensor, positions: range) -> list[int]:
        seeds = row_seeds([seed] * len(positions), list(positions))
        return torch.ops._C.fused_gumbel_argmax(logits.float() / 0.7, seeds).tolist()

    (ids,) = tokens([output])
    predicted = reference.predict(prompt, ids, kept[output.request_id][0], report["drafted_per_round"], choose)
    assert report["accepted_per_round"] == predicted
