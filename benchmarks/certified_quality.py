"""Answers to retrieval questions by dense attention, by a selection alone, and by certified attention."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean

import torch
from torch import Tensor

from benchmarks.batched_reference import Attend
from benchmarks.certified_model import Context, Model
from benchmarks.certified_run import DELTA, Repeated, cache_of, kept_of
from benchmarks.certified_tasks import Task, make
from tests.reference import Past, Row, visible_positions
from vericache.certified.attention import Policy, Sampled, certified_attention, padded
from vericache.certified.certificate import Bound, Target
from vericache.certified.sketch import sketch_keys, value_norms

METHODS = ("dense", "top-k", "sample alone", "certified")


@dataclass
class Answers:
    """``right``: whole answers; ``logprob``: of the right answer, per token."""

    right: list[float] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)

    def add(self, logits: Tensor, answer: Sequence[int]) -> None:
        wanted = torch.tensor(answer, device=logits.device)
        self.right.append(float((logits.argmax(-1) == wanted).all()))
        self.logprob.append(logits.log_softmax(-1).gather(1, wanted[:, None]).mean().item())


def quality(
    model: Model, kind: str, tokens: int, questions: int, ratio: float, eps: float, z: float, bound: Bound
) -> dict[str, object]:
    """Of one kind of task, over contexts of about ``tokens`` tokens, until ``questions`` are asked. The question's last
    token and the answer are decoded by the method, as many positions at a time as a context has questions; what
    precedes them is prefilled on full KV."""
    found: dict[str, Answers] = defaultdict(Answers)
    lengths, shares = list[int](), list[float]()
    while len(found["dense"].right) < questions:
        task, ids = sized(model, kind, tokens, seed=len(lengths))
        context = model.context(ids)
        methods = Methods(context, ratio, Policy(Target(eps, DELTA, bound), z=z), len(lengths))
        lengths.append(len(ids))
        asked = [(model.encode(question), model.encode(answer)) for question, answer in task.questions]
        prefill = [Row(ask[:-1], len(ids), [context.past]) for ask, _ in asked]
        model.reference.forward(prefill)
        owns = [Past(row.keys, row.values) for row in prefill]
        inputs = [[ask[-1], *told[:-1]] for ask, told in asked]
        for name in METHODS:
            for logits, (_, told) in zip(methods.logits(model, name, inputs, owns), asked, strict=True):
                found[name].add(logits, told)
        shares.append(methods.fetched_share())
    return {
        "tokens": round(mean(lengths)),
        "contexts": len(lengths),
        "questions": len(found["dense"].right),
        "methods": {n: {"right": mean(a.right), "logprob": mean(a.logprob)} for n, a in found.items()},
        "fetched": mean(shares),
    }


def sized(model: Model, kind: str, tokens: int, seed: int) -> tuple[Task, list[int]]:
    """A task whose context has nearly so many tokens, never more: a cut would take facts away."""
    characters = 3 * tokens
    for _ in range(4):
        ids = model.encode(make(kind, characters, seed).context)
        characters = int(characters * 0.98 * tokens / len(ids))
    while len(ids := model.encode((task := make(kind, characters, seed)).context)) > tokens:
        characters = int(characters * 0.98)
    return task, ids


class Methods:
    """One compressed context."""

    def __init__(self, context: Context, ratio: float, policy: Policy, seed: int) -> None:
        self._context, self._policy = context, policy
        n = context.shape[2]
        self._top = context.past.only(visible_positions(kept_of(context.scores, ratio, "top"), n))
        kept = kept_of(context.scores, ratio, "poisson", seed)
        assert kept.inclusion is not None
        self._layers = []
        for layer, (keys, values) in enumerate(zip(context.past.keys, context.past.values, strict=True)):
            places = padded(kept.counts[layer], kept.layer(layer), n)
            at = places.clamp(max=n - 1)[..., None].expand(-1, -1, keys.shape[-1])
            r = kept.inclusion[layer].double()
            held = (keys.gather(1, at), values.gather(1, at))
            self._layers.append(Sampled(sketch_keys(keys), r, places, *held, value_norms(values)))
        self._shares: list[Tensor] = []

    def fetched_share(self) -> float:
        """Of the context, mean over the decisions since the last call."""
        share, self._shares = torch.stack(self._shares).mean().item(), []
        return share

    def logits(self, model: Model, name: str, inputs: Sequence[Sequence[int]], owns: Sequence[Past]) -> list[Tensor]:
        """``[T, vocab]`` of each row of ``inputs``, which follow the context and ``owns``."""
        past = self._context.past
        if name in ("dense", "top-k"):
            read = past if name == "dense" else self._top
            rows = [Row(ids, past.length + own.length, [read, own]) for ids, own in zip(inputs, owns, strict=True)]
            return model.reference.forward(rows)
        rows = [Row(ids, past.length + own.length, []) for ids, own in zip(inputs, owns, strict=True)]
        return model.reference.decoded(rows, self.attend(owns, [len(i) for i in inputs], name == "certified"))

    def attend(self, owns: Sequence[Past], lengths: Sequence[int], fetching: bool) -> Attend:
        """Attention of rows of ``lengths`` tokens behind the context and ``owns``, of all positions at once."""
        past = self._context.past

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            heads, positions, _ = key.shape
            tail, seen = _tails(layer, owns, lengths, key, value)
            asked = query.transpose(0, 1).unflatten(1, (heads, -1)).flatten(0, 1)  # [T * H, G, D]
            fetch = cache_of(past.keys[layer], past.values[layer]) if fetching else None
            part = _repeated(self._layers[layer], positions)
            outcome = certified_attention(asked, part, tail, scale, self._policy, fetch, seen)
            if fetching:
                self._shares.append(outcome.fetched.double().mean() / past.length)
            return outcome.output.unflatten(0, (positions, heads)).flatten(1, 2).transpose(0, 1)

        return attend


def _tails(
    layer: int, owns: Sequence[Past], lengths: Sequence[int], key: Tensor, value: Tensor
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Keys and values ``[T * H, t, D]`` behind the context of all positions, and how many of them each sees."""
    most = max(own.length + length for own, length in zip(owns, lengths, strict=True))
    sides = []
    for stored, new in (([o.keys[layer] for o in owns], key), ([o.values[layer] for o in owns], value)):
        both = [torch.cat(pair, 1) for pair in zip(stored, new.split(list(lengths), 1), strict=True)]
        wide = [torch.nn.functional.pad(x, (0, 0, 0, most - x.shape[1])) for x in both]
        sides.append(torch.cat([x.repeat(length, 1, 1) for x, length in zip(wide, lengths, strict=True)]))
    counts = [own.length + i + 1 for own, length in zip(owns, lengths, strict=True) for i in range(length)]
    return (sides[0], sides[1]), torch.tensor(counts, device=key.device).repeat_interleave(len(key))


def _repeated(part: Sampled, times: int) -> Sampled:
    """The same sample for the heads of so many positions."""
    return Sampled(
        Repeated.of(part.sketch, times),
        part.inclusion.repeat(times, 1),
        part.positions.repeat(times, 1),
        part.keys.repeat(times, 1, 1),
        part.values.repeat(times, 1, 1),
        None if part.norms is None else part.norms.repeat(times, 1),
    )
