"""What ``benchmarks.certified`` measures: decisions of real queries, and attention at equal budget."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.certified_model import Context, Recorded
from compressors import Kept
from compressors.budget import allocate, forced_mask
from compressors.poisson import sample
from compressors.select import top_positions
from vericache.certified.attention import Fetch, Outcome, Policy, Sampled, certified_attention, padded
from vericache.certified.certificate import Target, Weights
from vericache.certified.estimator import estimate, shrinkage
from vericache.certified.sketch import KeySketch, sketch_keys

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


def sketched(keys: Tensor, name: str) -> KeySketch:
    return Exact(keys, keys.shape[1]) if name == "perfect" else sketch_keys(keys, name)


def kept_of(scores: Tensor, ratio: float, selector: str, seed: int = 0) -> Kept:
    """The same number of tokens in every head, as in the paper; at random, their expected number."""
    n = scores.shape[-1]
    forced = forced_mask(n, SINKS, RECENT)
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
    return Sampled(sketch, kept.inclusion.flatten(0, 1).double(), places, keys.gather(1, at), values.gather(1, at))


def cache_of(keys: Tensor, values: Tensor) -> Fetch:
    """The full cache ``[R, n, D]``, to fetch from."""
    return lambda head, at: (keys[head, at], values[head, at])


def steps(prompt: Recorded, count: int) -> Iterator[tuple[int, Tensor, tuple[Tensor, Tensor]]]:
    """Number, queries ``[L * H, G, D]`` and tail of ``count`` steps, the first, the last and between."""
    total = len(prompt.queries)
    for i in range(count):
        step = i * (total - 1) // max(1, count - 1)
        tail = (prompt.keys[:, :, : step + 1].flatten(0, 1), prompt.values[:, :, : step + 1].flatten(0, 1))
        yield step, prompt.queries[step].flatten(0, 1), tail


class Tally:
    """Decisions of one kind."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._failed: list[Tensor] = []
        self._lists: dict[str, list[float]] = defaultdict(list)

    def add(self, outcome: Outcome, failed: Tensor, exact: "Dense", context: int) -> None:
        """One step: its decision, and bool ``[draws, R, G]``."""
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
            "queries": failed[0].numel() * len(self._failed),
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
    def of(cls, query: Tensor, keys: Tensor, values: Tensor, tail: tuple[Tensor, Tensor]) -> "Dense":
        logits = query.float() @ torch.cat([keys, tail[0]], 1).mT * query.shape[-1] ** -0.5
        return cls(logits, logits.softmax(-1) @ torch.cat([values, tail[1]], 1), logits.double().logsumexp(-1))

    def error(self, output: Tensor) -> Tensor:
        return (output - self.output).norm(dim=-1) / self.output.norm(dim=-1)


def decisions(
    prompts: Mapping[str, Recorded], ratio: float, sketch: str, z: float, eps: float, count: int, draws: int
) -> dict[str, float]:
    """``count`` steps of each prompt, each estimated from ``draws`` independent samples: what becomes certain does not
    depend on the sample, so it is found once."""
    policy = Policy(Target(eps, DELTA), z=z)
    tally: Tally | None = None
    for prompt in prompts.values():
        keys, values = flat(prompt.context)
        layers, _, n = prompt.context.shape
        held, scale = sketched(keys, sketch), keys.shape[-1] ** -0.5
        tally = tally or Tally(layers)
        for step, query, tail in steps(prompt, count):
            exact = Dense.of(query, keys, values, tail)
            part = sampled(kept_of(prompt.context.scores, ratio, "poisson", seed=step), keys, values, held)
            outcome = certified_attention(query, part, tail, scale, policy, cache_of(keys, values))
            totals = estimates(outcome, part, exact, query, scale, z, draws, seed=step)
            tally.add(outcome, (totals - exact.log_total).expm1().abs() > eps, exact, n)
    assert tally is not None
    return tally.row()


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
    rng, found = torch.Generator().manual_seed(seed), [outcome.log_total]
    for _ in range(draws - 1):
        drawn = torch.rand(r.shape, generator=rng) < r
        found.append((shares * drawn[:, None]).sum(-1).log() + weights.shift[..., 0])
    return torch.stack(found)


def budget_errors(prompts: Mapping[str, Recorded], ratio: float, count: int, draws: int) -> dict[str, Any]:
    """Relative error of the attention's output from what is kept alone: mean, median and 95th percentile by method."""
    errors: dict[str, list[Tensor]] = defaultdict(list)
    for prompt in prompts.values():
        keys, values = flat(prompt.context)
        held = sketched(keys, "per_channel2")
        top = kept_of(prompt.context.scores, ratio, "top")
        for step, query, tail in steps(prompt, count):
            exact = Dense.of(query, keys, values, tail)
            attend = _Alone(query, keys, values, tail)
            errors["top-k"].append(exact.error(attend.plain(top)))
            for draw in range(draws):
                kept = kept_of(prompt.context.scores, ratio, "poisson", seed=step + 1000 * draw)
                errors["sample, unweighted"].append(exact.error(attend.plain(kept)))
                errors["sample, 1 / r"].append(exact.error(attend.weighted(kept, shrink=False)))
                errors["sample, shrinkage, true weights"].append(exact.error(attend.weighted(kept, shrink=True)))
                part = sampled(kept, keys, values, held)
                outcome = certified_attention(query, part, tail, query.shape[-1] ** -0.5, Policy(), None)
                errors["sample, shrinkage, 2-bit sketch"].append(exact.error(outcome.output))
    return {name: _summary(torch.cat([e.flatten() for e in found])) for name, found in errors.items()}


def _summary(errors: Tensor) -> dict[str, float]:
    median, high = errors.double().quantile(torch.tensor([0.5, 0.95], dtype=torch.float64)).tolist()
    return {"queries": errors.numel(), "mean": errors.mean().item(), "median": median, "p95": high}


class _Alone:
    """Attention of one step from a selection alone, with all keys at hand to measure it."""

    def __init__(self, query: Tensor, keys: Tensor, values: Tensor, tail: tuple[Tensor, Tensor]) -> None:
        self._logits = query.float() @ torch.cat([keys, tail[0]], 1).mT * query.shape[-1] ** -0.5
        self._values, self._context = torch.cat([values, tail[1]], 1), keys.shape[1]

    def _resident(self, kept: Kept) -> Tensor:
        """bool ``[R, n + t]``."""
        n, all_tokens = self._context, self._values.shape[1]
        places = padded(kept.counts.flatten(), kept.positions, n)
        found = torch.zeros(len(places), n + 1, dtype=torch.bool).scatter_(1, places, True)[:, :n]
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
