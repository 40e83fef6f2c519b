"""What ``benchmarks.certified`` measures: decisions of real queries, and attention at equal budget."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.certified_model import Context, Recorded
from compressors import Kept
from compressors.budget import allocate, forced_mask
from compressors.poisson import sample
from compressors.select import top_positions
from vericache.certified.attention import HIDDEN, Fetch, Outcome, Policy, Sampled, certified_attention, padded
from vericache.certified.certificate import Bound, Target, Weights
from vericache.certified.estimator import estimate, shrinkage
from vericache.certified.sketch import KeySketch, sketch_keys, value_norms

SINKS, RECENT = 4, 32
DELTA = 0.1
EPSILONS = (0.01, 0.05, 0.1, 0.3)


@dataclass(frozen=True)
class Exact(KeySketch):
    """A perfect sketch: the keys themselves."""

    codes: Tensor
    tokens: int

    def logits(self, queries: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        found = queries.float() @ self.codes.mT * scale
        return found, torch.zeros_like(found)


@dataclass(frozen=True)
class Repeated(KeySketch):
    """One sketch for the queries of ``times`` positions, whose heads follow one another: ``[times * H, G, D]``."""

    inner: KeySketch
    times: int
    codes: Tensor
    tokens: int

    @classmethod
    def of(cls, inner: KeySketch, times: int) -> "Repeated":
        return cls(inner, times, inner.codes, inner.tokens)

    def logits(self, queries: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        positions = queries.unflatten(0, (self.times, -1))  # [S, H, G, D]
        found = self.inner.logits(positions.transpose(0, 1).flatten(1, 2), scale)
        split = (x.unflatten(1, (self.times, -1)).transpose(0, 1).flatten(0, 1) for x in found)
        return next(split), next(split)


def sketched(keys: Tensor, name: str) -> KeySketch:
    return Exact(keys, keys.shape[1]) if name == "perfect" else sketch_keys(keys, name)


def kept_of(scores: Tensor, ratio: float, selector: str, seed: int = 0) -> Kept:
    """The same number of tokens in every head, as in the paper; at random, their expected number."""
    n = scores.shape[-1]
    forced = forced_mask(n, SINKS, RECENT).to(scores.device)
    scores = scores.masked_fill(forced, float("inf"))
    counts = allocate(scores, round(n * ratio), "uniform", SINKS + RECENT, 1, 20.0)
    if selector == "top":
        return Kept(counts, top_positions(scores, counts))
    return sample(scores, counts, forced, selector, 1.0, 1e-3, seed)


def flat(context: Context) -> tuple[Tensor, Tensor]:
    """Keys and values of all layers, ``[L * H, n, D]``."""
    return torch.cat(list(context.past.keys)), torch.cat(list(context.past.values))


def sampled(kept: Kept, keys: Tensor, values: Tensor, sketch: KeySketch) -> Sampled:
    """All layers as one, ``H = L * H``."""
    assert kept.inclusion is not None
    places = padded(kept.counts.flatten(), kept.positions, keys.shape[1])
    at = places.clamp(max=keys.shape[1] - 1)[..., None].expand(-1, -1, keys.shape[2])
    r, held = kept.inclusion.flatten(0, 1).double(), (keys.gather(1, at), values.gather(1, at))
    return Sampled(sketch, r, places, *held, value_norms(values))


def cache_of(keys: Tensor, values: Tensor) -> Fetch:
    """The full cache ``[R, n, D]``, to fetch from; heads of several positions follow one another."""
    return lambda head, at: (keys[head % len(keys), at], values[head % len(keys), at])


@dataclass(frozen=True)
class Step:
    """Queries ``[S * R, G, D]`` of one or several steps of R heads, the tokens behind the context, and how many of them
    each head sees, int64 ``[S * R]``."""

    numbers: list[int]
    query: Tensor
    tail: tuple[Tensor, Tensor]
    seen: Tensor


def steps(prompt: Recorded, count: int, batch: int = 1) -> Iterator[Step]:
    """``count`` steps, the first, the last and between, at most ``batch`` at a time."""
    total = len(prompt.queries)
    chosen = [i * (total - 1) // max(1, count - 1) for i in range(count)]
    for first in range(0, count, batch):
        numbers = chosen[first : first + batch]
        longest = max(numbers) + 1
        keys, values = (
            x[:, :, :longest].flatten(0, 1).repeat(len(numbers), 1, 1) for x in (prompt.keys, prompt.values)
        )
        seen = torch.tensor(numbers, device=keys.device) + 1
        heads = len(keys) // len(numbers)
        yield Step(numbers, prompt.queries[numbers].flatten(0, 2), (keys, values), seen.repeat_interleave(heads))


class Tally:
    """Decisions of one kind."""

    def __init__(self, layers: int) -> None:
        self._layers, self.queries = layers, 0
        self._failed: list[Tensor] = []
        self._lists: dict[str, list[float]] = defaultdict(list)

    def add(self, outcome: Outcome, failed: Tensor, exact: "Dense", context: int) -> None:
        """One step: a decision, and bool ``[draws, R, G]``: of what follows the decision's choice, which failed."""
        self._failed.append(failed.view(len(failed), self._layers, -1).double())
        fetched = outcome.fetched.double() / context
        for name, values in (
            ("fetching", fetched > 0),
            ("fetched", fetched),
            ("fallback", outcome.fallback),
            ("certificate", outcome.error),
            ("output", exact.error(outcome.output)),
        ):
            self._lists[name].append(values.double().mean().item())

    def row(self) -> dict[str, float]:
        failed = torch.cat(self._failed)  # [draws of all steps, L, H * G]
        fetching, fetched = mean(self._lists["fetching"]), mean(self._lists["fetched"])
        return {
            "queries": self.queries,
            "decisions": failed.numel(),
            "failed": failed.mean().item(),
            "worst_layer": failed.mean((0, 2)).max().item(),
            **{name: mean(self._lists[name]) for name in ("output", "certificate", "fallback")},
            "fetching": fetching,
            "fetched": fetched,
            "fetched_when_fetching": fetched / fetching if fetching else 0.0,
        }


@dataclass(frozen=True)
class Dense:
    """Exact attention: ``logits [R, G, n + t]``, ``output [R, G, D]``, ``log_total`` float64 ``[R, G]``."""

    logits: Tensor
    output: Tensor
    log_total: Tensor

    @classmethod
    def of(cls, step: Step, keys: Tensor, values: Tensor) -> "Dense":
        """``keys`` and ``values [R, n, D]`` of the context."""
        logits, times, behind = logits_of(step, keys), len(step.numbers), step.tail[0].shape[1]
        here, own = logits.softmax(-1).split([keys.shape[1], behind], -1)
        # The positions of a batch share the context's values.
        mixed = torch.einsum("shgn,hnd->shgd", here.unflatten(0, (times, -1)), values).flatten(0, 1)
        return cls(logits, mixed + own @ step.tail[1], logits.double().logsumexp(-1))

    def part(self, rows: slice) -> "Dense":
        return Dense(self.logits[rows], self.output[rows], self.log_total[rows])

    def error(self, output: Tensor) -> Tensor:
        return (output - self.output).norm(dim=-1) / self.output.norm(dim=-1)


def logits_of(step: Step, keys: Tensor) -> Tensor:
    """Exact ones, float32 ``[S * R, G, n + t]``, ``HIDDEN`` where a query does not see a token."""
    scale, times, behind = step.query.shape[-1] ** -0.5, len(step.numbers), step.tail[0].shape[1]
    positions = step.query.float().unflatten(0, (times, -1))
    here = torch.einsum("shgd,hnd->shgn", positions, keys).flatten(0, 1)
    later = torch.arange(behind, device=keys.device) >= step.seen[:, None]
    own = (step.query.float() @ step.tail[0].mT * scale).masked_fill(later[:, None], HIDDEN)
    return torch.cat([here * scale, own], -1)


def together(parts: list[Sampled], sketch: KeySketch) -> Sampled:
    """Samples of several positions as one."""
    most = max(p.positions.shape[1] for p in parts)
    tokens = parts[0].inclusion.shape[1]

    def wide(held: Tensor) -> Tensor:
        return torch.nn.functional.pad(held, (0, 0, 0, most - held.shape[1]))

    return Sampled(
        Repeated.of(sketch, len(parts)) if len(parts) > 1 else sketch,
        torch.cat([p.inclusion for p in parts]),
        torch.cat(
            [torch.nn.functional.pad(p.positions, (0, most - p.positions.shape[1]), value=tokens) for p in parts]
        ),
        torch.cat([wide(p.keys) for p in parts]),
        torch.cat([wide(p.values) for p in parts]),
        torch.cat([p.norms for p in parts if p.norms is not None]),
    )


def decisions(
    prompts: Mapping[str, Recorded],
    ratio: float,
    sketch: str,
    z: float,
    eps: float,
    count: int,
    draws: int,
    batch: int = 1,
    bound: Bound = "denominator",
) -> dict[str, float]:
    """``count`` steps of each prompt, each estimated from ``draws`` independent samples. Where the denominator is
    certified, what becomes certain does not depend on the sample, so it is found once; else every sample is decided.
    ``batch`` steps are decided at a time."""
    policy = Policy(Target(eps, DELTA, bound), z=z)
    tally: Tally | None = None
    for prompt in prompts.values():
        keys, values = flat(prompt.context)
        layers, heads, n = prompt.context.shape
        held, scale = sketched(keys, sketch), keys.shape[-1] ** -0.5
        tally = tally or Tally(layers)
        for step in steps(prompt, count, batch):
            exact = Dense.of(step, keys, values)
            tally.queries += exact.log_total.numel()
            for draw in range(1 if bound == "denominator" else draws):
                kept = [kept_of(prompt.context.scores, ratio, "poisson", i + 1000 * draw) for i in step.numbers]
                part = together([sampled(each, keys, values, held) for each in kept], held)
                fetch = cache_of(keys, values)
                outcome = certified_attention(step.query, part, step.tail, scale, policy, fetch, step.seen)
                if bound == "denominator":
                    totals = estimates(outcome, part, exact, step.query, scale, z, draws, seed=step.numbers[0])
                    failed = (totals - exact.log_total).expm1().abs() > eps
                else:
                    failed = exact.error(outcome.output)[None] > eps
                for first in range(0, len(step.query), layers * heads):
                    rows = slice(first, first + layers * heads)
                    tally.add(_rows(outcome, rows), failed[:, rows], exact.part(rows), n)
    assert tally is not None
    return tally.row()


def _rows(outcome: Outcome, rows: slice) -> Outcome:
    return Outcome(**{f.name: getattr(outcome, f.name)[rows] for f in fields(outcome)})


def estimates(
    outcome: Outcome, part: Sampled, exact: "Dense", query: Tensor, scale: float, z: float, draws: int, seed: int
) -> Tensor:
    """log D^, float64 ``[draws, R, G]``: the first draw is ``outcome``'s, the others are of samples drawn anew behind
    the same decision."""
    behind = exact.logits.shape[-1] - part.inclusion.shape[-1]
    r = torch.nn.functional.pad(part.inclusion, (0, behind), value=1.0).masked_fill(outcome.certain, 1.0)
    rough, sigma = (torch.nn.functional.pad(x, (0, behind)) for x in part.sketch.logits(query, scale))
    weights = Weights.of(torch.where(r[:, None] < 1, rough, exact.logits), r[:, None], sigma, z)
    shares = shrinkage(weights.upper, r[:, None]).multipliers / r[:, None] * weights.exact(exact.logits)
    rng, found = torch.Generator(r.device).manual_seed(seed), [outcome.log_total]
    for _ in range(draws - 1):
        drawn = torch.rand(r.shape, generator=rng, device=r.device) < r
        found.append((shares * drawn[:, None]).sum(-1).log() + weights.shift[..., 0])
    return torch.stack(found)


def budget_errors(prompts: Mapping[str, Recorded], ratio: float, count: int, draws: int) -> dict[str, Any]:
    """Relative error of the attention's output from what is kept alone: mean, median and 95th percentile by method."""
    errors: dict[str, list[Tensor]] = defaultdict(list)
    for prompt in prompts.values():
        keys, values = flat(prompt.context)
        held = sketched(keys, "per_channel2")
        top = kept_of(prompt.context.scores, ratio, "top")
        for step in steps(prompt, count):
            (number,), query, tail = step.numbers, step.query, step.tail
            exact = Dense.of(step, keys, values)
            attend = _Alone(step, keys, values)
            errors["top-k"].append(exact.error(attend.plain(top)))
            for draw in range(draws):
                kept = kept_of(prompt.context.scores, ratio, "poisson", seed=number + 1000 * draw)
                errors["sample, unweighted"].append(exact.error(attend.plain(kept)))
                errors["sample, 1 / r"].append(exact.error(attend.weighted(kept, shrink=False)))
                errors["sample, shrinkage, true weights"].append(exact.error(attend.weighted(kept, shrink=True)))
                part = sampled(kept, keys, values, held)
                outcome = certified_attention(query, part, tail, query.shape[-1] ** -0.5, Policy(), None)
                errors["sample, shrinkage, 2-bit sketch"].append(exact.error(outcome.output))
    return {name: _summary(torch.cat([e.flatten() for e in found])) for name, found in errors.items()}


def _summary(errors: Tensor) -> dict[str, float]:
    median, high = (
        errors.double().quantile(torch.tensor([0.5, 0.95], dtype=torch.float64, device=errors.device)).tolist()
    )
    return {"queries": errors.numel(), "mean": errors.mean().item(), "median": median, "p95": high}


class _Alone:
    """Attention of one step from a selection alone, with all keys at hand to measure it."""

    def __init__(self, step: Step, keys: Tensor, values: Tensor) -> None:
        self._logits, self._context = logits_of(step, keys), keys.shape[1]
        self._values = torch.cat([values, step.tail[1]], 1)

    def _resident(self, kept: Kept) -> Tensor:
        """bool ``[R, n + t]``."""
        n, all_tokens = self._context, self._values.shape[1]
        places = padded(kept.counts.flatten(), kept.positions, n)
        found = places.new_zeros(len(places), n + 1, dtype=torch.bool).scatter_(1, places, True)[:, :n]
        return torch.nn.functional.pad(found, (0, all_tokens - n), value=True)

    def plain(self, kept: Kept) -> Tensor:
        logits = self._logits.masked_fill(~self._resident(kept)[:, None], float("-inf"))
        return logits.softmax(-1) @ self._values

    def weighted(self, kept: Kept, shrink: bool) -> Tensor:
        assert kept.inclusion is not None
        r = kept.inclusion.flatten(0, 1).double()
        r = torch.nn.functional.pad(r, (0, self._values.shape[1] - self._context), value=1.0)[:, None]
        weights = (self._logits - self._logits.amax(-1, keepdim=True)).double().exp()
        multipliers = shrinkage(weights, r).multipliers if shrink else torch.ones_like(weights)
        total, mixed = estimate(weights, self._values[:, None], r, self._resident(kept)[:, None], multipliers)
        return (mixed / total[..., None]).float()
