"""Answers to retrieval questions by dense attention, by a selection alone, and by certified attention."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean

import torch
from torch import Tensor

from benchmarks.certified_model import Attend, Context, Model, OwnRow
from benchmarks.certified_run import DELTA, cache_of, kept_of
from benchmarks.certified_tasks import make
from tests.reference import Past, Row, visible_positions
from vericache.certified.attention import Policy, Sampled, certified_attention, padded
from vericache.certified.certificate import Target
from vericache.certified.sketch import sketch_keys


@dataclass
class Answers:
    """``right``: whole answers; ``logprob``: of the right answer, per token."""

    right: list[float] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    fetched: list[float] = field(default_factory=list)

    def add(self, logits: Tensor, answer: Sequence[int]) -> None:
        wanted = torch.tensor(answer)
        self.right.append(float((logits.argmax(-1) == wanted).all()))
        self.logprob.append(logits.log_softmax(-1)[torch.arange(len(answer)), wanted].mean().item())


def quality(
    model: Model, kind: str, tokens: int, contexts: int, ratio: float, eps: float, z: float
) -> dict[str, object]:
    """Of one kind of task, over ``contexts`` contexts of about ``tokens`` tokens. The question's last token and the
    answer are decoded by the method, token by token; what precedes them is prefilled on full KV."""
    found: dict[str, Answers] = defaultdict(Answers)
    lengths = []
    for seed in range(contexts):
        task = make(kind, int(tokens * 3.2), seed)
        context = model.context(model.encode(task.context)[:tokens])
        lengths.append(len(context.tokens))
        methods = Methods(context, ratio, Policy(Target(eps, DELTA), z=z), seed)
        for question, answer in task.questions:
            ask, told = model.encode(question), model.encode(answer)
            asked = Row(ask[:-1], context.past, Past([], []))
            model.reference.forward([asked])
            own = Past([k[:, -len(ask) + 1 :] for k in asked.keys], [v[:, -len(ask) + 1 :] for v in asked.values])
            for name, row in methods.rows([ask[-1], *told[:-1]], own):
                found[name].add(model.reference.forward([row])[0], told)
            found["certified"].fetched.append(methods.fetched_share())
    return {
        "tokens": round(mean(lengths)),
        "questions": len(found["dense"].right),
        "methods": {n: {"right": mean(a.right), "logprob": mean(a.logprob)} for n, a in found.items()},
        "fetched": mean(found["certified"].fetched),
    }


class Methods:
    """One compressed context."""

    def __init__(self, context: Context, ratio: float, policy: Policy, seed: int) -> None:
        self._context, self._policy = context, policy
        n = context.shape[2]
        self._top = visible_positions(kept_of(context.scores, ratio, "top"), n)
        kept = kept_of(context.scores, ratio, "poisson", seed)
        assert kept.inclusion is not None
        self._layers = []
        for layer, (keys, values) in enumerate(zip(context.past.keys, context.past.values, strict=True)):
            places = padded(kept.counts[layer], kept.layer(layer), n)
            at = places.clamp(max=n - 1)[..., None].expand(-1, -1, keys.shape[-1])
            r = kept.inclusion[layer].double()
            self._layers.append(Sampled(sketch_keys(keys), r, places, keys.gather(1, at), values.gather(1, at)))
        self._shares: list[float] = []

    def fetched_share(self) -> float:
        """Of the context, mean over the decisions since the last call."""
        share, self._shares = mean(self._shares), []
        return share

    def rows(self, ids: Sequence[int], own: Past) -> Iterator[tuple[str, Row]]:
        past = self._context.past
        yield "dense", Row(ids, past.then(own), Past([], []))
        shown = torch.ones(*self._top.shape[:2], own.length, dtype=torch.bool)
        joined = past.then(own)
        yield "top-k", Row(ids, Past(joined.keys, joined.values, torch.cat([self._top, shown], -1)), Past([], []))
        start = joined.length
        yield "sample alone", OwnRow(ids, start, self._compute(own, fetching=False))
        yield "certified", OwnRow(ids, start, self._compute(own, fetching=True))

    def _compute(self, own: Past, fetching: bool) -> Attend:
        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            heads, rows = key.shape[:2]
            keys, values = torch.cat([own.keys[layer], key], 1), torch.cat([own.values[layer], value], 1)
            past = self._context.past
            fetch = cache_of(past.keys[layer], past.values[layer]) if fetching else None
            out = torch.empty_like(query)
            for i in range(rows):
                tail = (keys[:, : own.length + i + 1], values[:, : own.length + i + 1])
                asked = query[:, i].unflatten(0, (heads, -1))
                outcome = certified_attention(asked, self._layers[layer], tail, scale, self._policy, fetch)
                out[:, i] = outcome.output.flatten(0, 1)
                if fetching:
                    self._shares.append(outcome.fetched.double().mean().item() / past.length)
            return out

        return attend
