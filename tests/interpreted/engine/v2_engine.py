"""An engine on the V2 runner, and what its tests ask of it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from benchmarks.engine import LiveEngine, summaries, tokens
from tests.engine.harness import assert_at_rest

SLOW = () if torch.cuda.is_available() else pytest.mark.slow  # a minute each through the interpreter


class V2Engine(LiveEngine):
    """Single runs against the same engine with every request resident: stock V2 rows and stock V2 sampling."""

    def prompt(self, length: int, seed: int) -> list[int]:
        return torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()

    def same(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], **settings: Any
    ) -> list[dict[str, Any]]:
        """Drafting gives every token (and logprob) that plain rows give; the summaries of the drafting run."""
        self.configure(**settings)
        drafted = self.generate(prompts, params)
        plain_settings = self.coordinator.settings.model_copy(update={"min_prompt_tokens": 100_000})
        self.coordinator.configure(plain_settings)
        plain = self.generate(prompts, params)
        assert tokens(drafted) == tokens(plain)
        for ours, theirs in zip(drafted, plain, strict=True):
            if ours.outputs[0].logprobs is not None:
                assert theirs.outputs[0].logprobs is not None
                for a, b in zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
                    assert {t: x.rank for t, x in a.items()} == {t: x.rank for t, x in b.items()}
                    for token, entry in a.items():
                        assert abs(entry.logprob - b[token].logprob) < 1e-4
        self.at_rest()
        return summaries(drafted)

    def at_rest(self) -> None:
        assert_at_rest(self)
        assert self.worker is None or not self.worker._loads
        assert not self.runner.req_states.req_id_to_index


def params(count: int, tokens: int = 14, **options: Any) -> list[SamplingParams]:
    """One per request; those that sample differ in their seed."""
    seeded = [{"seed": 7 + i} if options.get("temperature") else {} for i in range(count)]
    usual = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
    return [SamplingParams(**{**usual, **s, **options}) for s in seeded]
