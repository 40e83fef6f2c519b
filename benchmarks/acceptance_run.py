"""The engine behind ``benchmarks.acceptance``: outputs, selections, and the check that predicted rounds are those of
the engine."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams

from benchmarks.acceptance_grid import FULL, Method
from benchmarks.acceptance_rounds import Predicted, Refused, refusals
from benchmarks.engine import LiveEngine, summaries, tokens
from compressors import Kept, MethodSpec
from tests.reference import Choose, Reference, greedy, run
from vericache.demo import model
from vericache.demo.prompts import PROMPTS, load
from vericache.demo.run import ENGINE
from vericache.engine.sampling import row_seeds

CHECKED_DRAFTS = 25
SOON = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)  # for requests that end once they are compressed


class Run(Predicted):
    def __init__(self, args: argparse.Namespace) -> None:
        folder = model.prepare()
        arguments = {**ENGINE, "kv_cache_memory_bytes": 2 << 30, "enable_prefix_caching": True}
        self.engine = LiveEngine(
            folder, arguments, {"min_prompt_tokens": 1024, "draft_length": CHECKED_DRAFTS, "reuse_scores": "off"}
        )
        super().__init__(Reference(folder), load(args.prompts, self.engine.tokenizer), args)
        self._ids = count()
        self._prefills: list[float] = []
        self.engine.configure(compressor="streaming_llm", counts="uniform", ratio=0.5)
        with self.engine.recorded_kept() as kept:
            for name in self.prompts:  # their KV is in the prefix cache from here on
                self._until_compressed(name, kept)

    @property
    def header(self) -> dict[str, Any]:
        """And ``prefill_ms``: of 1,000 prompt tokens, median over prompts."""
        prefill = [1e6 * s / len(p) for s, p in zip(self._prefills, self.prompts.values(), strict=False)]
        return {**super().header, "prefill_ms": round(median(prefill), 1)}

    # -- what full KV says -------------------------------------------------------------------------------------

    def params(self, temperature: float) -> list[SamplingParams]:
        seeds = [1 + list(PROMPTS).index(name) for name in self.prompts]
        return [
            SamplingParams(
                temperature=temperature, seed=seed if temperature else None, max_tokens=self.length, ignore_eos=True
            )
            for seed in seeds
        ]

    def outputs(self, temperature: float) -> dict[str, list[int]]:
        """The engine's own output with every request resident."""
        if temperature not in self._outputs:
            found = self.engine.plain(list(self.prompts.values()), self.params(temperature))
            self._outputs[temperature] = dict(zip(self.prompts, found, strict=True))
        return self._outputs[temperature]

    def chooser(self, temperature: float, seed: int) -> Choose:
        """As the engine samples: the best token, or the best with the noise of (seed, position)."""

        def sampled(logits: Tensor, positions: Sequence[int]) -> list[int]:
            seeds = row_seeds([seed] * len(positions), positions)
            chosen: list[int] = torch.ops._C.fused_gumbel_argmax(logits / temperature, seeds).tolist()
            return chosen

        return sampled if temperature else greedy

    # -- what a method keeps ---------------------------------------------------------------------------------------

    def spec(self, method: Method, ratio: float) -> MethodSpec:
        """The engine's from here on."""
        with refusals():
            self.engine.configure(**method.arguments, ratio=ratio)
        return self.engine.llm.vericache_config.method

    def compressed(self, spec: MethodSpec) -> Iterator[tuple[str, Kept, float | None]]:
        """In the engine, one at a time."""
        with self.engine.recorded_kept() as kept, self._timed() as compressing:
            for name in self.prompts:
                seconds = self._until_compressed(name, kept) + compressing[-1]
                (selection,) = kept.popitem()[1]
                yield name, selection, seconds

    def _until_compressed(self, name: str, kept: Mapping[str, list[Kept]]) -> float:
        """Steps a request until it is compressed, and ends it. Returns the seconds of steps with its scoring rows."""
        request, scoring, prefill = f"{name}{next(self._ids)}", 0.0, 0.0
        engine = self.engine.llm.llm_engine
        engine.add_request(request, {"prompt_token_ids": list(self.prompts[name])}, SOON)
        while request not in kept:
            start = perf_counter()
            done = engine.step()
            letters = self.engine.coordinator.stats.trace[-1].values()
            scoring += (perf_counter() - start) * ("S" in letters)
            prefill += (perf_counter() - start) * ("P" in letters)
            if any(output.finished for output in done):
                raise Refused(summaries(done)[0]["reason"])
        self._prefills.append(prefill)
        engine.abort_request([request])
        return scoring

    @contextmanager
    def _timed(self) -> Iterator[list[float]]:
        """Seconds of every compression: selection, and the copy into the arena."""
        worker, seconds = self.engine.worker.compression, list[float]()
        compress = worker.compress

        def timed(op: Any) -> int:
            start = perf_counter()
            pages: int = compress(op)
            seconds.append(perf_counter() - start)
            return pages

        worker.compress = timed
        try:
            yield seconds
        finally:
            worker.compress = compress

    def check(self, method: Method, ratio: float, temperature: float) -> dict[str, Any]:
        expected = self.outputs(temperature)
        everything = method == FULL
        self.spec(Method("streaming_llm", "uniform") if everything else method, 1.0 if everything else ratio)
        with self.engine.recorded_kept() as kept:
            outputs = self.engine.generate(list(self.prompts.values()), self.params(temperature))
        reports, walks = summaries(outputs), []
        for name, output, report in zip(self.prompts, outputs, reports, strict=True):
            rounds = self._rounds(name, kept[output.request_id][0], temperature)
            walks.append((rounds, rounds.walk(report["drafted_per_round"])))
        predicted = [a for found in run(self.reference, walks) for a in found]
        drafted, accepted = ([n for r in reports for n in r[f"{what}_per_round"]] for what in ("drafted", "accepted"))
        return {
            "method": method.name, "ratio": ratio, "temperature": temperature,
            "outputs_equal": tokens(outputs) == list(expected.values()), "rounds": len(accepted),
            "rounds_equal": sum(a == p for a, p in zip(accepted, predicted, strict=True)),
            "drafted": sum(drafted), "accepted": sum(accepted), "predicted": sum(predicted),
        }  # fmt: skip
