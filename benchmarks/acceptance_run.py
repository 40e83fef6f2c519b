"""The engine and the reference model behind ``benchmarks.acceptance``: outputs, selections, rounds, and the check that
predicted rounds are those of the engine."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor
from vllm import SamplingParams

from benchmarks.acceptance_engine import LOOPS_BELOW, distinct_4_grams
from benchmarks.acceptance_grid import FULL, Method
from benchmarks.engine import LiveEngine, summaries, tokens
from compressors import Compressor, Kept, MethodSpec, Scorer
from tests.packings import Packing, packing
from tests.reference import Choose, Past, Reference, Rounds, greedy, run
from vericache.config import VeriCacheConfig
from vericache.demo import model
from vericache.demo.prompts import PROMPTS, load
from vericache.demo.run import ENGINE
from vericache.engine.sampling import row_seeds

CHECKED_DRAFTS = 25
SOON = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)  # for requests that end once they are compressed


class Refused(Exception):  # noqa: N818 it is no error of the benchmark's
    """The engine does not compress with this method, and why."""


@dataclass(frozen=True)
class Selected:
    """What a method keeps of one prompt, and the seconds of its scoring rows, selection and copy into the arena."""

    kept: Kept
    fraction: float
    seconds: float


def selected(kept: Kept, context: int, seconds: float) -> Selected:
    return Selected(kept, len(kept.positions) / (kept.counts.numel() * context), seconds)


@dataclass(frozen=True)
class Scored:
    """What a ``scorer`` said of a context: ``scores``, and ``needed`` if it is dynamic."""

    scorer: Scorer
    scores: Tensor
    needed: Tensor | None
    seconds: float = 0.0

    def select(self, spec: MethodSpec) -> Selected:
        context = self.scores.shape[-1]
        return selected(Compressor(Known(self, context, spec), spec).select(), context, self.seconds)


class Known(Scorer):
    name, summary, query_aware = "known", "scores of another scorer", False

    def __init__(self, scored: Scored, context: int, spec: MethodSpec) -> None:
        super().__init__(scored.scorer.shape, context, spec)
        self.scored, self.dynamic = scored, scored.needed is not None  # type: ignore[misc]

    def scores(self) -> Tensor:
        return self.scored.scores

    def needed(self) -> Tensor:
        assert self.scored.needed is not None
        return self.scored.needed

    def narrowed(self, kept: Kept, scores: Tensor) -> Kept:
        return self.scored.scorer.narrowed(kept, scores)


@contextmanager
def recorded_scores() -> Iterator[list[Scored]]:
    """Of every selection; none where everything is kept, whatever the scores are."""
    found: list[Scored] = []
    select = Compressor.select

    def recording(self: Compressor) -> Kept:
        if self.scorer.num_tokens > self.budget:
            scores = self.scorer.scores()
            needed = self.scorer.needed() if self.scorer.dynamic else None
            found.append(Scored(self.scorer, scores, needed))
            self.scorer = Known(found[-1], self.scorer.num_tokens, self.spec)  # none is asked twice
        return select(self)

    Compressor.select = recording  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Compressor.select = select  # type: ignore[method-assign]


class Run:
    def __init__(self, args: argparse.Namespace) -> None:
        folder = model.prepare()
        arguments = {**ENGINE, "kv_cache_memory_bytes": 2 << 30, "enable_prefix_caching": True}
        self.engine = LiveEngine(folder, arguments, {"min_prompt_tokens": 1024, "draft_length": CHECKED_DRAFTS})
        self.prompts = load(args.prompts, self.engine.tokenizer)
        self.reference = Reference(folder)
        self.length, self.drafts = args.tokens, args.drafts
        self._ids = count()
        self._outputs: dict[float, dict[str, list[int]]] = {}
        self._full: dict[tuple[str, float | None], Past] = {}
        self._scored: dict[tuple[Any, ...], dict[str, Scored]] = {}
        self._prefills: list[float] = []
        self.engine.configure(compressor="streaming_llm", counts="uniform", ratio=0.5)
        with self.engine.recorded_kept() as kept:
            for name in self.prompts:  # their KV is in the prefix cache from here on
                self._until_compressed(name, kept)

    @property
    def head_dim(self) -> int:
        return int(self.reference.model.config.head_dim)

    @property
    def header(self) -> dict[str, Any]:
        """``prefill_ms``: of 1,000 prompt tokens, median over prompts; ``outputs``: shares of distinct 4-grams."""
        prefill = [1e6 * s / len(p) for s, p in zip(self._prefills, self.prompts.values(), strict=False)]
        shares = {
            str(t): {name: round(distinct_4_grams(ids), 3) for name, ids in outputs.items()}
            for t, outputs in self._outputs.items()
        }
        lengths = {name: len(ids) for name, ids in self.prompts.items()}
        return {"prompts": lengths, "prefill_ms": round(median(prefill), 1), "outputs": shares}

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

    def _full_kv(self, name: str, temperature: float) -> Past:
        prompt, output = (name, None), (name, temperature)
        if prompt not in self._full:
            self._full[prompt] = self.reference.full(self.prompts[name])
        if output not in self._full:
            self._full[output] = self.reference.full(self.outputs(temperature)[name][:-1], self._full[prompt])
        return self._full[output]

    # -- what a method keeps ---------------------------------------------------------------------------------------

    def select(self, method: Method, ratio: float) -> dict[str, Selected]:
        """Compresses every prompt in the engine, one at a time; with a scorer that has been there before, selects by
        what it said then: none looks at ratio or counts. Raises Refused."""
        if method == FULL:
            return {name: self._everything(len(ids)) for name, ids in self.prompts.items()}
        self._configure(method, ratio)
        spec = self.engine.llm.vericache_config.method
        known = self.scores(method)
        if known:
            return {name: known[name].select(spec) for name in self.prompts}
        found = {}
        with self.engine.recorded_kept() as kept, self._timed() as compressing, recorded_scores() as scores:
            for name in self.prompts:
                seconds = self._until_compressed(name, kept) + compressing[-1]
                (selection,) = kept.popitem()[1]
                found[name] = selected(selection, len(self.prompts[name]), seconds)
                if scores:
                    known[name] = replace(scores.pop(), seconds=seconds)
        return found

    def scores(self, method: Method) -> dict[str, Scored]:
        """By prompt, what the method's scorer said; empty before it was asked."""
        spec = VeriCacheConfig(**method.arguments).method
        return self._scored.setdefault((spec.name, spec.options, spec.sinks, spec.recent), {})

    def _configure(self, method: Method, ratio: float) -> None:
        try:
            self.engine.configure(**method.arguments, ratio=ratio)
        except ValidationError as error:
            raise Refused("; ".join(e["msg"].removeprefix("Value error, ") for e in error.errors())) from None

    def _everything(self, context: int) -> Selected:
        model_config = self.reference.model.config
        heads = (model_config.num_hidden_layers, model_config.num_key_value_heads)
        kept = Kept(torch.full(heads, context), torch.arange(context).repeat(heads[0] * heads[1]))
        return Selected(kept, 1.0, 0.0)

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

    # -- rounds ------------------------------------------------------------------------------------------------

    def rounds(self, selected: Mapping[str, Selected], temperature: float) -> dict[str, dict[int, list[int]]]:
        """Accepted drafts of every whole round, by prompt and draft length."""
        walks = []
        for name in selected:
            rounds = self._rounds(name, selected[name].kept, temperature)
            walks += [(rounds, rounds.whole(x)) for x in self.drafts]
        found = iter(run(self.reference, walks))
        return {name: {x: next(found) for x in self.drafts} for name in selected}

    def packed_rounds(self, kept: Mapping[str, Kept], packing: Packing | None) -> dict[str, list[int]]:
        """Accepted drafts of every whole round, by prompt, greedy, with the first of the draft lengths. One prompt at a
        time: a packed context is a copy of the whole KV."""
        found = {}
        for name in kept:
            rounds = self._rounds(name, kept[name], 0.0, packing)
            (found[name],) = run(self.reference, [(rounds, rounds.whole(self.drafts[0]))])
        return found

    def loops(self, name: str) -> bool:
        """Whether the prompt's greedy output says the same again and again."""
        return distinct_4_grams(self.outputs(0.0)[name]) < LOOPS_BELOW

    def pooled(self, found: Mapping[str, Sequence[int]]) -> dict[str, float]:
        """The accepted drafts of ``packed_rounds``, of outputs that do not loop: mean, number, least and most."""
        accepted = [a for name, rounds in found.items() if not self.loops(name) for a in rounds]
        mean = round(sum(accepted) / len(accepted), 2)
        return {"accepted": mean, "rounds": len(accepted), "min": min(accepted), "max": max(accepted)}

    def packing(self, page_format: str, page_tokens: int, keep: int) -> Packing | None:
        """What pages of the format lose of this model's KV (None: nothing); ``keep`` verified tokens stay exact."""
        return packing(page_format, page_tokens, keep, self.reference.model.config.rope_parameters["rope_theta"])

    def _rounds(self, name: str, kept: Kept, temperature: float, packing: Packing | None = None) -> Rounds:
        prompt = self.prompts[name]
        ids, full = [*prompt, *self.outputs(temperature)[name]], self._full_kv(name, temperature)
        return Rounds(ids, len(prompt), full, kept, chooser(temperature, 1 + list(PROMPTS).index(name)), packing)

    def check(self, method: Method, ratio: float, temperature: float) -> dict[str, Any]:
        """Rounds as the engine runs them beside what is predicted for rounds of as many drafts."""
        expected = self.outputs(temperature)
        everything = method == FULL
        self._configure(Method("streaming_llm", "uniform") if everything else method, 1.0 if everything else ratio)
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


def chooser(temperature: float, seed: int) -> Choose:
    """As the engine samples: the best token, or the best with the noise of (seed, position)."""

    def sampled(logits: Tensor, positions: Sequence[int]) -> list[int]:
        seeds = row_seeds([seed] * len(positions), positions)
        chosen: list[int] = torch.ops._C.fused_gumbel_argmax(logits / temperature, seeds).tolist()
        return chosen

    return sampled if temperature else greedy
