"""On a GPU with batch-invariant kernels every logit of every token is plain vLLM's, bit by bit.

``BITWISE_MODEL=FOLDER`` runs it on real weights and texts instead of random ones.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.engine import summaries, tokens
from tests.interpreted.engine.conftest import REAL_MODEL
from tests.interpreted.engine.v2_engine import V2Engine, params
from vericache.demo.prompts import PROMPTS as TEXTS
from vericache.demo.prompts import load
from vericache.engine.ops import DraftRow

PROMPTS, TOKENS = 64, 256
RATIO = 0.5 if REAL_MODEL else 1.0  # random weights would accept nothing from a dropper


def prompts(engine: V2Engine) -> list[list[int]]:
    if not REAL_MODEL:
        return [engine.prompt(100 + i, i) for i in range(PROMPTS)]
    texts = list(load(list(TEXTS), engine.tokenizer).values())
    return [texts[i % len(texts)][200 * (i // len(texts)) :][: 100 + i] for i in range(PROMPTS)]


@contextmanager
def recorded(engine: V2Engine) -> Iterator[dict[tuple[int, int], int]]:
    """A checksum of the logits that decided each token, by (request's place, position). A later verify of a position
    replaces what an earlier one, whose drafts were rejected before it, computed there."""
    found: dict[tuple[int, int], int] = {}
    runner, sums = engine.runner, []
    sample, compute = runner.sample, runner.model.compute_logits

    def recording(hidden: Tensor, batch: Any, grammar: Any) -> Any:
        drafting = {r.row_id for r in (runner._metadata.rows if runner._metadata else ()) if isinstance(r, DraftRow)}
        kept: list[Tensor] = []

        def computing(hidden: Tensor) -> Tensor:
            kept.append(compute(hidden))
            return kept[-1]

        runner.model.compute_logits = computing
        try:
            out = sample(hidden, batch, grammar)
        finally:
            runner.model.compute_logits = compute
        bits = kept[0].view(torch.int16).long()
        weights = torch.arange(1, bits.shape[1] + 1, device=bits.device)
        starts = batch.cu_num_logits_np
        rows = [r for i, r in enumerate(batch.req_ids) for _ in range(starts[i + 1] - starts[i])]
        sums.append((rows, drafting, batch.positions[batch.logits_indices].clone(), (bits * weights).sum(1)))
        return out

    runner.sample = recording
    try:
        yield found
    finally:
        del runner.sample
        for rows, drafting, positions, values in sums:
            for row, position, value in zip(rows, positions.tolist(), values.tolist(), strict=True):
                if row not in drafting:
                    found[int(row.split("-")[0]), position] = value


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_and_logits_are_plain_vllms(
    engine: V2Engine, temperature: float, record_property: Callable[[str, object], None]
) -> None:
    given = prompts(engine)
    engine.configure(ratio=RATIO, draft_length=8, verify_tokens=60)
    with recorded(engine) as ours:
        drafted = engine.generate(given, params(PROMPTS, TOKENS, temperature=temperature))
    engine.coordinator.configure(engine.coordinator.settings.model_copy(update={"min_prompt_tokens": 100_000}))
    with recorded(engine) as theirs:
        plain = engine.generate(given, params(PROMPTS, TOKENS, temperature=temperature))
    assert tokens(drafted) == tokens(plain)
    assert all(s["mode"] == "draft" for s in summaries(drafted))
    rounds = [a for s in summaries(drafted) for a in s["accepted_per_round"]]
    record_property("rounds", len(rounds))
    record_property("accepted", sum(rounds))
    assert sum(rounds) > len(rounds)
    first, others = (min(i for i, _ in x) for x in (ours, theirs))
    wanted = {(i, len(p) - 1 + t) for i, p in enumerate(given) for t in range(TOKENS)}
    assert wanted <= {(i - others, p) for i, p in theirs}  # chunks of prompts have logits rows too
    assert all(ours[i + first, p] == theirs[i + others, p] for i, p in wanted)
    engine.at_rest()
