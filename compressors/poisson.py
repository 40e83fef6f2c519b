"""PoissonComp: a random selection whose probabilities follow the scores, over any scorer.

A token's *inclusion probability* is ``r_i = min(1, c w_i)``, where w is the score (to a power, and not below a floor)
and c makes the r of a head sum to its count. What is kept is a sample with known probabilities, from which sums over
all tokens can be estimated: Horvitz and Thompson weigh a kept token by ``1 / r_i``.

Both designs give every token a key from one uniform number u, and keep the smallest keys of a head:

* ``poisson``: key ``u / r``, all below 1. Tokens are independent, the size is random.
* ``pareto`` (Rosén, 1997): key ``[u / (1 - u)] / [r / (1 - r)]``, as many as the head's count. The size is fixed, and r
  holds up to O(1 / count).

An engine reserves memory for the exact budget before any score exists, and a Poisson sample must fit into it. So it
aims a few standard deviations lower (``fitting``); the rare sample that is larger all the same loses its largest keys.
"""

import torch
from torch import Tensor

from compressors.errors import MethodError
from compressors.select import Kept, top_positions

SPREAD = 3.0  # standard deviations of its size by which a Poisson sample aims below the budget
_CERTAIN = 1 - 1e-6  # larger probabilities are 1
_WORD = 0xFFFFFFFF


def sample(scores: Tensor, counts: Tensor, forced: Tensor, design: str, power: float, floor: float, seed: int) -> Kept:
    """A random selection of ``counts.sum()`` token-heads, or of at most as many by design ``poisson``.

    Args:
        scores: float32 ``[L, H, n]``, at least 0, at +inf where ``forced`` (bool ``[n]``).
        counts: int64 ``[L, H]``, each larger than the number of forced tokens.
        power: exponent of the scores; 0.5 flattens them, 2 sharpens them.
        floor: share of a head's largest score that every token's is raised to. A token of probability 0 could never be
            kept, and would be missing from any estimate.
        seed: 0 .. 2**32 - 1. The same for the same (seed, layer, head, position), whatever else is drawn.

    Raises:
        MethodError: a negative score.
    """
    if (scores < 0).any():
        raise MethodError(
            f"selector {design!r} takes scores for weights, and the smallest score is {float(scores.min()):.3g}; "
            f"expected none below 0. Use selector 'top' with this method"
        )
    sizes = counts.double()
    if design == "poisson":
        free = int(counts.sum()) - counts.numel() * int(forced.sum())
        sizes = forced.sum() + (sizes - forced.sum()) * (fitting(free) / free)
    chances, keys = torch.empty_like(scores), torch.empty_like(scores)
    for layer, heads in enumerate(scores):
        r = inclusion(heads, sizes[layer], forced, power, floor)
        u = uniforms(seed, layer, heads.shape[0], heads.shape[1], scores.device)
        key = u / r if design == "poisson" else u.logit() - r.logit()
        chances[layer], keys[layer] = r, key.masked_fill(r == 1, float("-inf"))
    if design == "poisson":
        counts = _fitted(keys, int(counts.sum()))
    return Kept(counts, top_positions(-keys, counts), chances)


def fitting(budget: float) -> float:
    """The mean size of a Poisson sample that exceeds ``budget`` once in about 700 times or less.

    The variance of its size, the sum of ``r (1 - r)``, is at most its mean m. m solves ``m + SPREAD sqrt(m) = budget``.
    """
    half = SPREAD / 2
    return ((budget + half**2) ** 0.5 - half) ** 2


def _fitted(keys: Tensor, budget: int) -> Tensor:
    """Counts int64 ``[L, H]`` of the keys below 1. Where they are more than ``budget``, the largest of them go, as in
    sequential Poisson sampling (Ohlsson, 1998): never a token that is certain, whose key is -inf."""
    kept = keys < 1
    counts = kept.sum(-1)
    if (over := int(counts.sum()) - budget) > 0:
        last = keys.masked_fill(~kept, float("-inf")).flatten().topk(over).indices // keys.shape[-1]
        counts = counts - torch.bincount(last, minlength=counts.numel()).view_as(counts)
    return counts


def inclusion(scores: Tensor, sizes: Tensor, forced: Tensor, power: float, floor: float) -> Tensor:
    """Probabilities float64 ``[H, n]`` that sum to ``sizes`` (float64 ``[H]``), 1 where ``forced``.

    Closed form: with weights w in descending order and tails ``T_k = sum of w_j over j >= k``, the k largest are
    certain for the smallest k with ``c_k w_k <= 1``, ``c_k = (size - k) / T_k`` (from there on ``c_k w_k`` only falls).
    """
    weight = scores[:, ~forced].double()
    weight = weight / weight.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    weight = weight.pow(power).clamp(min=floor)
    size = (sizes - forced.sum())[:, None]
    ranked = weight.sort(-1, descending=True).values
    tails = ranked.flip(-1).cumsum(-1).flip(-1)
    factor = (size - torch.arange(ranked.shape[-1], device=scores.device)) / tails
    certain = (factor * ranked > 1).sum(-1, keepdim=True).clamp(max=ranked.shape[-1] - 1)
    r = (factor.gather(-1, certain) * weight).clamp(max=1)
    out = torch.ones_like(scores, dtype=torch.float64)
    out[:, ~forced] = torch.where((r > _CERTAIN) | (size >= ranked.shape[-1]), 1.0, r)
    return out


def uniforms(seed: int, layer: int, heads: int, tokens: int, device: torch.device | str | None = None) -> Tensor:
    """float64 ``[heads, tokens]`` in (0, 1): the first word of Philox 2x32-10 (Salmon et al., 2011), keyed by ``seed``,
    at counter (position, layer and head)."""
    low = torch.arange(tokens, device=device).expand(heads, tokens)
    high = ((layer << 16) + torch.arange(heads, device=device))[:, None].expand(heads, tokens)
    return (philox(low, high, seed)[0].double() + 0.5) / 2**32


def philox(low: Tensor, high: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """Two words below 2**32 for each counter ``(low, high)``, int64."""
    for _ in range(10):
        product = low * 0xD256D193  # wraps around in int64: its 64 bits are the right ones
        low, high = ((product >> 32) & _WORD) ^ key ^ high, product & _WORD
        key = (key + 0x9E3779B9) & _WORD
    return low, high
