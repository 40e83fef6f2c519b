"""The attention of one position from a sample: judged by the sketch, completed from the full cache, then estimated."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vericache.certified.certificate import Target, Weights, denominator_error
from vericache.certified.estimator import estimate, shrinkage
from vericache.certified.fetch import plan_fetch, united
from vericache.certified.sketch import KeySketch

HIDDEN = -1e30  # logit of what a query does not see: finite, and its weight is 0
ROUNDS = 8  # of fetching; what still misses its target then gets every token

# KV head, positions int64 [k] of the context -> keys and values [k, D] of the full cache
Fetch = Callable[[int, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Policy:
    """What is promised, and how a decision is made (``Weights.of``, ``plan_fetch``)."""

    target: Target = field(default_factory=Target)
    z: float = 1.0
    shortlist: int = 128
    max_fetch: float = 0.5


@dataclass(frozen=True)
class Sampled:
    """One layer of a compressed context of n tokens, H KV heads.

    ``inclusion`` float64 ``[H, n]``: r. ``positions`` int64 ``[H, m]``: of the resident tokens, n where a head has
    fewer than m. ``keys``, ``values`` ``[H, m, D]``: theirs, behind RoPE; not read where the position is n.
    """

    sketch: KeySketch
    inclusion: Tensor
    positions: Tensor
    keys: Tensor
    values: Tensor


def padded(counts: Tensor, kept: Tensor, tokens: int) -> Tensor:
    """``Sampled.positions`` of heads that keep ``counts`` int64 ``[H]`` tokens, ``kept`` int64 ``[counts.sum()]`` by
    head, of a context of ``tokens``."""
    places = torch.full((len(counts), max(1, int(counts.max()))), tokens, device=kept.device)
    places[torch.arange(places.shape[1], device=kept.device) < counts[:, None]] = kept
    return places


@dataclass(frozen=True)
class Outcome:
    """``output`` float32 ``[H, G, D]``. Of each query, float64 ``[H, G]``: ``error``, the certificate that holds for
    it; ``log_total``, the logarithm of the estimated D. Of each KV head ``[H]``: ``fetched`` int64, tokens that came
    from the full cache; ``fallback`` bool, all tokens did. ``certain`` bool ``[H, n + t]``: tokens that entered with
    their own weight, whatever the draws had been."""

    output: Tensor
    error: Tensor
    log_total: Tensor
    fetched: Tensor
    fallback: Tensor
    certain: Tensor


def certified_attention(
    query: Tensor,
    sampled: Sampled,
    tail: tuple[Tensor, Tensor],
    scale: float,
    policy: Policy,
    fetch: Fetch | None,
    seen: Tensor | None = None,
) -> Outcome:
    """Softmax attention over a sampled context and the exact tokens behind it, with ``|D^ - D| <= eps D`` for each
    query with probability 1 - delta (VerKV, Eq. 5 and 7, KVFetch).

    A KV head whose certificate asks for more than ``policy.max_fetch`` of the context, or still misses the target
    after ``ROUNDS`` of fetching, reads all its tokens and is exact.

    Args:
        query: ``[H, G, D]``, the G queries of each KV head, behind RoPE.
        tail: keys and values ``[H, t, D]`` of the tokens behind the context, t at least 1.
        fetch: the full cache; None estimates from the sample alone, whatever the certificate says.
        seen: int64 ``[H]``, how many tokens of the tail each head sees, so that positions with tails of different
            lengths can be heads of one call; all unless given.
    """
    known = _Known(query.float(), sampled, tail, scale, seen)
    fallback = torch.zeros(len(query), dtype=torch.bool, device=query.device)
    weights, error = known.certificate(policy)
    if fetch is not None:
        for _ in range(ROUNDS):
            late = known.late(error, policy)
            if not len(late):
                break
            part = Weights(weights.upper[late], weights.total[late], weights.shift[late])
            plan = plan_fetch(part, known.inclusion[late, None], policy.target, policy.shortlist, policy.max_fetch)
            everything = plan.excessive.any(-1)
            fallback[late] |= everything
            known.complete(late, united(plan.chosen)[:, 0] | everything[:, None], fetch)
            weights, error = known.certificate(policy)
        late = known.late(error, policy)
        if len(late):
            fallback[late] = True
            known.complete(late, torch.ones_like(known.inclusion[late], dtype=torch.bool), fetch)
            weights, error = known.certificate(policy)
    total, mixed = known.estimate(weights)
    output = (mixed / total[..., None]).float()
    return Outcome(output, error, total.log() + weights.shift[..., 0], known.fetched, fallback, known.inclusion == 1)


class _Known:
    """What is known of one position's attention so far: of the n tokens of the context, then of the t behind it."""

    def __init__(
        self, query: Tensor, sampled: Sampled, tail: tuple[Tensor, Tensor], scale: float, seen: Tensor | None
    ) -> None:
        self._query, self._scale = query, scale
        heads, group, dim = query.shape
        self._context, behind = sampled.inclusion.shape[1], tail[0].shape[1]
        n = self._context
        estimated, sigma = sampled.sketch.logits(query, scale)
        self._estimated = torch.nn.functional.pad(estimated, (0, behind))
        self._sigma = torch.nn.functional.pad(sigma, (0, behind))
        self.inclusion = torch.nn.functional.pad(sampled.inclusion.double(), (0, behind), value=1.0)
        self.fetched = torch.zeros(heads, dtype=torch.int64, device=query.device)
        # One place more than there are tokens takes the padding of heads with fewer resident ones.
        places = sampled.positions[:, None].expand(-1, group, -1)
        exact = query.new_zeros(heads, group, n + 1).scatter_(-1, places, self._logits(query, sampled.keys))
        own = self._logits(query, tail[0])
        if seen is not None:
            later = torch.arange(behind, device=query.device) >= seen[:, None]
            own = own.masked_fill(later[:, None], HIDDEN)
        self._exact = torch.cat([exact[..., :n], own], -1)
        spread = sampled.positions[..., None].expand(-1, -1, dim)
        values = query.new_zeros(heads, n + 1, dim).scatter_(1, spread, sampled.values.float())
        self._values = torch.cat([values[:, :n], tail[1].float()], 1)
        resident = places.new_zeros(heads, n + 1, dtype=torch.bool).scatter_(1, sampled.positions, True)
        self._at_hand = torch.nn.functional.pad(resident[:, :n], (0, behind), value=True)

    def _logits(self, query: Tensor, keys: Tensor) -> Tensor:
        return query @ keys.float().mT * self._scale

    def certificate(self, policy: Policy) -> tuple[Weights, Tensor]:
        """From the sketch's logits wherever a token is sampled, resident or not: it must not depend on the sample."""
        r = self.inclusion[:, None]
        weights = Weights.of(torch.where(r < 1, self._estimated, self._exact), r, self._sigma, policy.z)
        return weights, denominator_error(weights, r, policy.target.delta)

    @staticmethod
    def late(error: Tensor, policy: Policy) -> Tensor:
        """KV heads with a query whose certificate misses the target."""
        return (error > policy.target.eps).any(-1).nonzero()[:, 0]

    def complete(self, heads: Tensor, chosen: Tensor, fetch: Fetch) -> None:
        """The tokens ``chosen`` bool ``[len(heads), n + t]`` become certain; those that are absent are fetched."""
        absent = chosen & ~self._at_hand[heads]
        counts = absent.sum(-1)
        late, (rows, at) = heads.tolist(), absent.nonzero().unbind(-1)
        read = [(head, part) for head, part in zip(late, at.split(counts.tolist()), strict=True) if len(part)]
        if read:
            keys, values = zip(*(fetch(head, part) for head, part in read), strict=True)
            logits = [self._logits(self._query[head], k) for (head, _), k in zip(read, keys, strict=True)]
            mine = heads[rows]
            self._exact[mine, :, at] = torch.cat(logits, -1).mT
            self._values[mine, at] = torch.cat(values).float()
            self._at_hand[mine, at] = True
            self.fetched[heads] += counts
        self.inclusion[heads] = self.inclusion[heads].masked_fill(chosen, 1.0)

    def estimate(self, weights: Weights) -> tuple[Tensor, Tensor]:
        """D ``[H, G]`` and N ``[H, G, D]``, float64, in the unit of ``weights``, from the tokens at hand."""
        r, multipliers = self.inclusion, shrinkage(weights.upper, self.inclusion[:, None]).multipliers
        most = int(self._at_hand.sum(-1).max())
        places = self._at_hand.byte().argsort(dim=-1, descending=True, stable=True)[:, :most]
        each = places[:, None].expand(-1, self._query.shape[1], -1)
        values = self._values.gather(1, places[..., None].expand(-1, -1, self._values.shape[-1]))
        at_hand = self._at_hand.gather(1, places)
        # A place that only fills up a head is one of its absent tokens, which are sampled.
        return estimate(
            weights.exact(self._exact.gather(-1, each)),
            values[:, None],
            r.gather(1, places)[:, None],
            at_hand[:, None],
            multipliers.gather(-1, each),
        )
