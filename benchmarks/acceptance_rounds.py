"""Rounds of drafts, predicted: from what full KV says and what a method keeps, by ``tests.reference``. Where outputs
and selections come from is told by a subclass: an engine (``benchmarks.acceptance_run``), or the reference model
itself on any device (``benchmarks.acceptance_device``)."""

import argparse
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from benchmarks.acceptance_engine import LOOPS_BELOW, distinct_4_grams
from benchmarks.acceptance_grid import FULL, Method
from compressors import Compressor, Kept, MethodSpec, Scorer
from tests.packings import Packing, packing
from tests.reference import Choose, Past, Reference, Rounds, run
from vericache.config import VeriCacheConfig
from vericache.demo.prompts import PROMPTS


class Refused(Exception):  # noqa: N818 it is no error of the benchmark's
    """The engine does not compress with this method, and why."""


@contextmanager
def refusals() -> Iterator[None]:
    """Settings that do not go together refuse the method."""
    try:
        yield
    except ValidationError as error:
        raise Refused("; ".join(e["msg"].removeprefix("Value error, ") for e in error.errors())) from None


@dataclass(frozen=True)
class Selected:
    """What a method keeps of one prompt, and the seconds of its scoring rows, selection and copy into the arena, where
    an engine was timed."""

    kept: Kept
    fraction: float
    seconds: float | None


def selected(kept: Kept, context: int, seconds: float | None = None) -> Selected:
    return Selected(kept, len(kept.positions) / (kept.counts.numel() * context), seconds)


@dataclass(frozen=True)
class Scored:
    """What a ``scorer`` said of a context: ``scores``, and ``needed`` if it is dynamic."""

    scorer: Scorer
    scores: Tensor
    needed: Tensor | None
    seconds: float | None = None

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


class Predicted(ABC):
    """Of the bundled prompts, ``length`` output tokens each."""

    def __init__(self, reference: Reference, prompts: Mapping[str, list[int]], args: argparse.Namespace) -> None:
        self.prompts, self.reference = prompts, reference
        self.length, self.drafts = args.tokens, args.drafts
        self._outputs: dict[float, dict[str, list[int]]] = {}
        self._full: dict[tuple[str, float | None], Past] = {}
        self._scored: dict[tuple[Any, ...], dict[str, Scored]] = {}

    @abstractmethod
    def outputs(self, temperature: float) -> dict[str, list[int]]:
        """What full KV says, by prompt."""

    @abstractmethod
    def chooser(self, temperature: float, seed: int) -> Choose:
        """As ``outputs`` was sampled."""

    @abstractmethod
    def compressed(self, spec: MethodSpec) -> Iterator[tuple[str, Kept, float | None]]:
        """Every prompt with what is kept of it, and the seconds of that (see ``Selected``). Raises Refused."""

    def spec(self, method: Method, ratio: float) -> MethodSpec:
        """Raises Refused."""
        with refusals():
            return VeriCacheConfig(**method.arguments, ratio=ratio).method

    def select(self, method: Method, ratio: float) -> dict[str, Selected]:
        """What the method keeps of every prompt. With a scorer that has been there before, by what it said then: none
        looks at ratio or counts. Raises Refused."""
        if method == FULL:
            return {name: self._everything(len(ids)) for name, ids in self.prompts.items()}
        spec, known, found = self.spec(method, ratio), self.scores(method), dict[str, Selected]()
        if known:
            return {name: known[name].select(spec) for name in self.prompts}
        with recorded_scores() as scores:
            for name, kept, seconds in self.compressed(spec):
                found[name] = selected(kept, len(self.prompts[name]), seconds)
                if scores:
                    known[name] = replace(scores.pop(), seconds=seconds)
        return found

    @property
    def header(self) -> dict[str, Any]:
        """``outputs``: shares of distinct 4-grams."""
        shares = {
            str(t): {name: round(distinct_4_grams(ids), 3) for name, ids in outputs.items()}
            for t, outputs in self._outputs.items()
        }
        return {"prompts": {name: len(ids) for name, ids in self.prompts.items()}, "outputs": shares}

    @property
    def head_dim(self) -> int:
        return int(self.reference.model.config.head_dim)

    def scores(self, method: Method) -> dict[str, Scored]:
        """By prompt, what the method's scorer said; empty before it was asked."""
        spec = VeriCacheConfig(**method.arguments).method
        return self._scored.setdefault((spec.name, spec.options, spec.sinks, spec.recent), {})

    def _full_kv(self, name: str, temperature: float) -> Past:
        output = (name, temperature)
        if output not in self._full:
            self._full[output] = self.reference.full(self.outputs(temperature)[name][:-1], self._prompt_kv(name))
        return self._full[output]

    def _prompt_kv(self, name: str) -> Past:
        if (name, None) not in self._full:
            self._full[name, None] = self.reference.full(self.prompts[name])
        return self._full[name, None]

    def _everything(self, context: int) -> Selected:
        model_config = self.reference.model.config
        heads = (model_config.num_hidden_layers, model_config.num_key_value_heads)
        kept = Kept(torch.full(heads, context), torch.arange(context).repeat(heads[0] * heads[1]))
        return Selected(kept, 1.0, None)

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
        return Rounds(ids, len(prompt), full, kept, self.chooser(temperature, 1 + list(PROMPTS).index(name)), packing)
