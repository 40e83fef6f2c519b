"""Floors on the drafter's quality. Identity and predicted rounds hold for a bad selection too."""

from benchmarks.acceptance_engine import measure, pooled
from tests.engine.harness import Harness
from vericache.demo import prompts

# Whose greedy output does not loop (see docs/results/acceptance.md).
NAMES = ["continue_code", "write_tests"]


def test_kvzip_per_head_keeps_what_matters(engine: Harness) -> None:
    """A quarter of the KV, 25 drafts a round, prompts of full length."""
    texts = prompts.load(NAMES, engine.tokenizer)
    results = measure(engine, texts, "kvzip", "per_head", 64, ratio=0.25, draft_length=25)
    assert not any(m.loops for m in results)
    assert pooled(results) >= 12, results  # some 20; few rounds
