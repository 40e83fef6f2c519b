"""Accepted drafts of rounds as the engine runs them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.engine import LiveEngine

LOOPS_BELOW = 0.3  # share of distinct 4-grams in the output


@dataclass(frozen=True)
class Measured:
    """One prompt with one method: full rounds as (drafted, accepted)."""

    prompt: str
    method: str
    rounds: list[tuple[int, int]]
    distinct: float  # share of distinct 4-grams of the output
    kept: float  # compressed bytes over full KV bytes; where pages are simulated, what they would be

    @property
    def accepted(self) -> list[int]:
        return [a for _, a in self.rounds]

    @property
    def loops(self) -> bool:
        return self.distinct < LOOPS_BELOW


def distinct_4_grams(ids: Sequence[int]) -> float:
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return len(set(grams)) / max(1, len(grams))


def measure(
    engine: "LiveEngine",
    prompts: Mapping[str, Sequence[int]],
    compressor: str,
    counts: str,
    tokens: int,
    **settings: Any,
) -> list[Measured]:
    """All prompts at once with one method; ``settings`` as in ``VeriCacheConfig`` (``draft_length`` is needed). Only
    full rounds count (at least so many drafts): shorter ones are cut by the end of the output."""
    from vllm import SamplingParams

    from benchmarks.engine import summaries

    engine.configure(compressor=compressor, counts=counts, **settings)
    outputs = engine.generate(list(prompts.values()), SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    found = []
    for name, output, report in zip(prompts, outputs, summaries(outputs), strict=True):
        pairs = zip(report["drafted_per_round"], report["accepted_per_round"], strict=True)
        rounds = [(k, a) for k, a in pairs if k >= settings["draft_length"]]
        distinct = distinct_4_grams(output.outputs[0].token_ids)
        kept = report.get("simulated_fraction", report["compressed_fraction"])
        found.append(Measured(name, f"{compressor} {counts}", rounds, distinct, kept))
    return found


def pooled(results: Sequence[Measured]) -> float:
    """Accepted drafts per full round over the prompts that do not loop."""
    accepted = [a for m in results if not m.loops for a in m.accepted]
    return sum(accepted) / max(1, len(accepted))
