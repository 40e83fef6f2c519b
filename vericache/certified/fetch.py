"""KVFetch: which tokens must come from the full cache for the certificate to hold (VerKV).

Nothing here knows which tokens are resident. A choice that looked at it (skipping tokens that are absent, preferring
those at hand) would leave a sample whose probabilities are no longer r, and no bound.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vericache.certified.certificate import Numerator, Target, Weights, certificate
from vericache.certified.estimator import shrinkage
from vericache.errors import ConfigError


@dataclass(frozen=True)
class Fetch:
    """A decision of KVFetch, for each query.

    ``chosen`` bool ``[..., n]``: tokens that become certain; those of them that are not resident are copied.
    ``count`` int64 ``[...]``: how many, k*. ``error`` float64 ``[...]``: the certificate then. ``excessive`` bool
    ``[...]``: k* is more than ``max_fetch`` of the tokens, so that exact attention (a verification) is the better way
    and all of them are chosen.
    """

    chosen: Tensor
    count: Tensor
    error: Tensor
    excessive: Tensor


def plan_fetch(
    weights: Weights,
    inclusion: Tensor,
    target: Target,
    shortlist: int = 128,
    max_fetch: float = 1.0,
    numerator: Numerator | None = None,
) -> Fetch:
    """The least k such that the first k tokens of ``fetch_ranks``, made certain, bring the certificate down to
    ``target.eps``. It never grows with k, in any order, so k* is found by bisection; where all are fetched it is 0.
    The output's certificate, for the assumed length of ``numerator``, may grow a little (``certificate``): k* is then
    one that suffices, and k* - 1 does not, but a smaller one might.

    k* is exactly the least for this order and these weights; the weights of sampled tokens are the sketch's, with their
    radius also where chosen, since no exact logit is known yet. Once the
    chosen tokens are there, their exact logits go into new ``Weights``, their r becomes 1, and a second call says
    whether more are needed: what it looks at is still no more than the queries, the keys and r.

    The queries of one KV head share what is fetched (``united``), and that only lowers their certificates.

    Args:
        weights: ``[..., n]``; inclusion: r, ``[..., n]`` or broadcast to it.
        shortlist: how many of the heaviest tokens are put into the best order, at least 0.
        max_fetch: share of n above which a decision is excessive, in [0, 1].
        numerator: for a target of the output.

    Raises:
        ConfigError: shortlist or max_fetch out of range.
    """
    if shortlist < 0:
        raise ConfigError(f"shortlist is {shortlist}, expected at least 0 tokens; 128 is a good choice")
    if not 0 <= max_fetch <= 1:
        raise ConfigError(f"max_fetch is {max_fetch}, expected a share of the tokens, 0 <= max_fetch <= 1")
    r = inclusion.double().expand_as(weights.upper)
    ranks = fetch_ranks(weights.upper, r, shortlist, None if numerator is None else _worth(weights, numerator))

    def error(count: Tensor) -> Tensor:
        return certificate(weights, r.masked_fill(ranks < count[..., None], 1.0), target, numerator)

    sampled = (r < 1).sum(-1)  # enough: the certificate is 0
    count = sampled.clamp(max=int(max_fetch * r.shape[-1]))
    excessive = error(count) > target.eps
    count = torch.where(excessive, sampled, count)
    fewest = torch.where(excessive, sampled, 0)
    while bool((fewest < count).any()):
        middle = (fewest + count) // 2
        enough = (error(middle) <= target.eps) | (fewest == count)
        count, fewest = torch.where(enough, middle, count), torch.where(enough, fewest, middle + 1)
    return Fetch(ranks < count[..., None], count, error(count), excessive)


def _worth(weights: Weights, numerator: Numerator) -> Tensor:
    """How much a token's share in the bound of D counts in that of the output, up to a factor: 1 / D + |v| / |N|."""
    return numerator.length[..., None] + numerator.norms.double() * weights.total[..., None]


def fetch_ranks(weights: Tensor, inclusion: Tensor, shortlist: int, worth: Tensor | None = None) -> Tensor:
    """The place of every token in the order of fetching, int64 ``[..., n]``: certain tokens come last.

    First come the ``shortlist`` heaviest, in falling order of their share in the bound's bias and standard deviation,

        w (1 - lambda) + lambda w sqrt((1 - r) / r),

    then all others by falling weight, so that a kernel sorts a short list only. The share stands for the fall of the
    certificate when the token alone is fetched, which would take a fixed point for each; k* is nearly the same.
    Of equal tokens the first is fetched first.

    Args:
        weights: ``[..., n]``, as for ``shrinkage``; inclusion: r, ``[..., n]``.
        worth: factors of shares and weights, ``[..., n]``, at least 0; 1 unless given.
    """
    w, r = torch.broadcast_tensors(weights.double(), inclusion.double())
    multipliers = shrinkage(w, r).multipliers
    w = w if worth is None else w * worth
    share = w * (1 - multipliers) + multipliers * w * ((1 - r) / r).sqrt()
    place = _places(torch.where(r < 1, w, -1.0))
    return _places(torch.where((place < shortlist) & (r < 1), share, -1.0 - place))


def _places(keys: Tensor) -> Tensor:
    """int64 ``[..., n]``: 0 for the largest key, and so on."""
    return keys.argsort(dim=-1, descending=True, stable=True).argsort(-1)


def united(chosen: Tensor) -> Tensor:
    """bool ``[..., G, n]`` of the G queries of a KV head -> ``[..., 1, n]``: what any of them fetches, all may use."""
    return chosen.any(-2, keepdim=True)
