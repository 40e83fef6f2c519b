"""Packed draft pages on vLLM's V2 runner: the tokens of plain rows, and the rounds that an independent forward
predicts, through folds and aborts."""

import pytest
import torch

from benchmarks.engine import summaries, tokens
from tests.interpreted.engine.v2_engine import SLOW, V2Engine, params
from tests.packings import turboquant
from tests.reference import Reference, greedy

RECENT, PAGE = 4, 32 if torch.cuda.is_available() else 16  # less is enough, and faster, where the kernel is interpreted
SETTINGS = {"page_format": "turboquant4", "recent": RECENT, "page_tokens": PAGE}
TOKENS = PAGE + 14  # enough for a fold


@pytest.fixture
def folds(one_step_engine: V2Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Strips of every fold."""
    seen: list[int] = []
    fold = one_step_engine.worker.arena.fold

    def recording(slot: int, strips: int) -> None:
        seen.append(strips)
        fold(slot, strips)

    monkeypatch.setattr(one_step_engine.worker.arena, "fold", recording)
    return seen


def test_rounds_equal_the_prediction(one_step_engine: V2Engine, folds: list[int]) -> None:
    """With one step in flight: with two, the first draft of a round is made before what precedes it is folded."""
    engine = one_step_engine
    prompts = [engine.prompt(60, 1), engine.prompt(75, 3)]
    engine.configure(ratio=0.8, tail_tokens=100, draft_length=3)
    with engine.recorded_kept() as kept:
        outputs = engine.generate(prompts, params(2, TOKENS))
    assert len(folds) == 2
    engine.at_rest()
    if torch.cuda.is_available():
        return  # bfloat16 rounds otherwise
    reference, packing = Reference(engine.folder), turboquant(4, PAGE, RECENT)
    for prompt, output, report in zip(prompts, outputs, summaries(outputs), strict=True):
        ids, selection = list(output.outputs[0].token_ids), kept[output.request_id][0]
        predicted = reference.predict(prompt, ids, selection, report["drafted_per_round"], greedy, packing)
        assert report["accepted_per_round"] == predicted
        assert sum(predicted) > 0


@pytest.mark.parametrize("ratio", [pytest.param(0.5, marks=SLOW)])
def test_compressed_anew_and_aborted(engine: V2Engine, folds: list[int], ratio: float) -> None:
    """Slots with folded pages are filled again and given back; what stays has the tokens of plain rows."""
    engine.configure(ratio=ratio, tail_tokens=PAGE + 4)
    prompts = [engine.prompt(50 + i, i) for i in range(2)]
    for i, prompt in enumerate(prompts):
        engine.llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, params(1, TOKENS)[0])
    while not folds:
        engine.llm.llm_engine.step()
    engine.llm.llm_engine.abort_request(["1"])
    done = []
    while engine.llm.llm_engine.has_unfinished_requests():
        done += [o for o in engine.llm.llm_engine.step() if o.finished]
    assert tokens(done) == engine.plain(prompts[:1], params(1, TOKENS))
    engine.at_rest()
    assert len(engine.worker.arena.pool.free) == len(engine.worker.arena.pool.bytes)
