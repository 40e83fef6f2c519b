"""The attention of one position from a sample: judged by the sketch, completed from the full cache, then estimated."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vericache.certified.certificate import Numerator, Target, Weights, certificate
from vericache.certified.estimator import estimate, shrinkage
from vericache.certified.fetch import plan_fetch, united
from vericache.certified.sketch import KeySketch

HIDDEN = -1e30  # logit of what a query does not see: finite, and its weight is 0
ROUNDS = 8  # of fetching; what still misses its target then gets every token
# The output's certificate needs |N^|, which depends on the sample. So what is fetched is decided for assumed lengths,
# one after another, each SHORTER times the one before: a row of sets in which no sample has a say. The first whose
# true certificate keeps the target is taken; since all of them share delta, it does not matter which.
LEVELS, SHORTER = 4, 0.8
_TINY = 1e-300

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
    fewer than m. ``keys``, ``values`` ``[H, m, D]``: theirs, behind RoPE; not read where the position is n. ``norms``
    ``[H, n]``: of the values of all tokens or more (``value_norms``), needed where the output is certified.
    """

    sketch: KeySketch
    inclusion: Tensor
    positions: Tensor
    keys: Tensor
    values: Tensor
    norms: Tensor | None = None


def padded(counts: Tensor, kept: Tensor, tokens: int) -> Tensor:
    """``Sampled.positions`` of heads that keep ``counts`` int64 ``[H]`` tokens, ``kept`` int64 ``[counts.sum()]`` by
    head, of a context of ``tokens``."""
    places = torch.full((len(counts), max(1, int(counts.max()))), tokens, device=kept.device)
    places[torch.arange(places.shape[1], device=kept.device) < counts[:, None]] = kept
    return places


@dataclass(frozen=True)
class Outcome:
    """``output`` float32 ``[H, G, D]``. Of each query, float64 ``[H, G]``: ``error``, the certificate that holds for
    it, of what the target is about; ``log_total``, the logarithm of the estimated D. Of each KV head ``[H]``:
    ``fetched`` int64, tokens that came from the full cache; ``fallback`` bool, all tokens did. ``certain`` bool
    ``[H, n + t]``: tokens that entered with their own weight, whatever the draws had been."""

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
    """Softmax attention over a sampled context and the exact tokens behind it, with ``|D^ - D| <= eps D``, or
    ``|o^ - o| <= eps |o|`` where the output is certified, for each query with probability 1 - delta (VerKV, Eq. 5 and
    7, KVFetch).

    A KV head whose certificate asks for more than ``policy.max_fetch`` of the context, or still misses the target
    after ``ROUNDS`` of fetching, reads all its tokens and is exact.

    Args:
        query: ``[H, G, D]``, the G queries of each KV head, behind RoPE.
        tail: keys and values ``[H, t, D]`` of the tokens behind the context, t at least 1.
        fetch: the full cache; None estimates from the sample alone, whatever the certificate says.
        seen: int64 ``[H]``, how many tokens of the tail each head sees, so that positions with tails of different
            lengths can be heads of one call; all unless given.
    """
    known = _Known(query.float(), sampled, tail, scale, seen, policy)
    everyone = torch.arange(len(query), device=query.device)
    if fetch is not None:
        decide = _decide_output if policy.target.bound == "output" else _bring
        decide(known, everyone, fetch)
    weights, total, mixed = known.sums(everyone)
    output = (mixed / total[..., None]).float()
    error = known.error(everyone, weights, mixed.norm(dim=-1))
    log_total = total.log() + weights.shift[..., 0]
    return Outcome(output, error, log_total, known.fetched, known.fallback, known.inclusion == 1)


def _bring(known: "_Known", heads: Tensor, fetch: Fetch, level: int = 0) -> None:
    """Fetch until the certificates of ``heads`` int64 ``[...]`` keep the target, for the assumed length of ``level``
    where that matters."""
    policy = known.policy
    for again in range(ROUNDS + 1):
        weights = known.weights(heads)
        length = known.assumed_length(heads, weights, level)
        late = (known.error(heads, weights, length) > policy.target.eps).any(-1)
        if not late.any():
            return
        heads, length = heads[late], length[late]
        if again == ROUNDS:
            break
        part = Weights(weights.upper[late], weights.total[late], weights.shift[late])
        plan = plan_fetch(
            part,
            known.inclusion[heads, None],
            known.target,
            policy.shortlist,
            policy.max_fetch,
            known.numerator(heads, length),
        )
        everything = plan.excessive.any(-1)
        known.fallback[heads] |= everything
        known.complete(heads, united(plan.chosen)[:, 0] | everything[:, None], fetch)
    known.complete_all(heads, fetch)


def _decide_output(known: "_Known", heads: Tensor, fetch: Fetch) -> None:
    """Fetch until the certificates of ``heads``, with the norms of their estimates, keep the target."""
    for level in range(LEVELS):
        _bring(known, heads, fetch, level)
        weights, _, mixed = known.sums(heads)
        error = known.error(heads, weights, mixed.norm(dim=-1))
        heads = heads[(error > known.target.eps).any(-1)]
        if not len(heads):
            return
    known.complete_all(heads, fetch)


class _Known:
    """What is known of one position's attention so far: of the n tokens of the context, then of the t behind it."""

    def __init__(
        self,
        query: Tensor,
        sampled: Sampled,
        tail: tuple[Tensor, Tensor],
        scale: float,
        seen: Tensor | None,
        policy: Policy,
    ) -> None:
        self._query, self._scale, self.policy = query, scale, policy
        # Of each set that may be taken.
        self.target = policy.target
        if policy.target.bound == "output":
            self.target = replace(policy.target, delta=policy.target.delta / LEVELS)
        heads, group, dim = query.shape
        self._context, behind = sampled.inclusion.shape[1], tail[0].shape[1]
        n = self._context
        self._norms: Tensor | None = None
        if policy.target.bound == "output":
            assert sampled.norms is not None, "the output's certificate needs the norms of values"
            self._norms = torch.nn.functional.pad(sampled.norms.double(), (0, behind))
        self.fallback = torch.zeros(heads, dtype=torch.bool, device=query.device)
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

    def weights(self, heads: Tensor) -> Weights:
        """From the sketch's logits wherever a token is sampled, resident or not: they must not depend on the sample."""
        r = self.inclusion[heads, None]
        logits = torch.where(r < 1, self._estimated[heads], self._exact[heads])
        return Weights.of(logits, r, self._sigma[heads], self.policy.z)

    def numerator(self, heads: Tensor, length: Tensor) -> Numerator | None:
        return None if self._norms is None else Numerator(self._norms[heads, None], length)

    def error(self, heads: Tensor, weights: Weights, length: Tensor) -> Tensor:
        """Certificates ``[..., G]`` with ``length`` for that of N^."""
        return certificate(weights, self.inclusion[heads, None], self.target, self.numerator(heads, length))

    def assumed_length(self, heads: Tensor, weights: Weights, level: int) -> Tensor:
        """That of N if the certain tokens' values were those of all, then less. No bound, but no sample's either."""
        if self._norms is None:
            return weights.total
        certain = weights.upper * (self.inclusion[heads, None] == 1)
        mixed = (certain @ self._values[heads].double()).norm(dim=-1)
        return SHORTER**level * mixed * weights.total / certain.sum(-1).clamp(min=_TINY)

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

    def complete_all(self, heads: Tensor, fetch: Fetch) -> None:
        self.fallback[heads] = True
        self.complete(heads, torch.ones_like(self.inclusion[heads], dtype=torch.bool), fetch)

    def sums(self, heads: Tensor) -> tuple[Weights, Tensor, Tensor]:
        """D ``[..., G]`` and N ``[..., G, D]``, float64, in the unit of the weights, from the tokens at hand."""
        weights, r, at_hand = self.weights(heads), self.inclusion[heads], self._at_hand[heads]
        multipliers = shrinkage(weights.upper, r[:, None]).multipliers
        most = int(at_hand.sum(-1).max())
        places = at_hand.byte().argsort(dim=-1, descending=True, stable=True)[:, :most]
        each = places[:, None].expand(-1, self._query.shape[1], -1)
        values = self._values[heads].gather(1, places[..., None].expand(-1, -1, self._values.shape[-1]))
        # A place that only fills up a head is one of its absent tokens, which are sampled.
        total, mixed = estimate(
            weights.exact(self._exact[heads].gather(-1, each)),
            values[:, None],
            r.gather(1, places)[:, None],
            at_hand.gather(1, places)[:, None],
            multipliers.gather(-1, each),
        )
        return weights, total, mixed
