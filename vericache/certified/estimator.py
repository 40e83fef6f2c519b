"""Sums over all tokens from a sample of them: the bounded shrinkage estimator (VerKV, Eq. 5 and Theorem 1)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vericache.errors import CompressionError

_FALSE = 6  # steps of false position before Newton's
_NEWTON = 32  # steps after which only bisection goes on; 4 are usual
_STEPS = 160  # bisection from the first bracket to neighbouring numbers takes about 100
_CLOSE = 4 * torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Shrinkage:
    """``bias`` float64 ``[...]``: by how much the estimate of D falls short on average, beta. ``multipliers``
    float64 ``[..., n]``: lambda, in [r, 1], 1 where certain.

    Both are exact for the weights they were solved for. From a sketch's weights, lambda is still a valid choice (as any
    one is), only not quite the best; beta is then an estimate.
    """

    bias: Tensor
    multipliers: Tensor


def shrinkage(weights: Tensor, inclusion: Tensor) -> Shrinkage:
    """The multipliers that estimate D best (VerKV, Eq. 5).

    A resident sampled token enters the estimate with ``lambda_i w_i / r_i``. The mean squared error

        (sum w (1 - lambda))^2 + sum lambda^2 w^2 (1 - r) / r        (over sampled tokens)

    is strictly convex. Its only minimum over the box ``r_i <= lambda_i <= 1`` is (Theorem 1)

        lambda_i = clip(beta r_i / (w_i (1 - r_i)), r_i, 1),    beta = sum w (1 - lambda).

    So heavy tokens enter with their own weight, light ones with ``w / r`` as Horvitz and Thompson have it.

    Args:
        weights: ``[..., n]``, at least 0, true ones or a sketch's. Any float dtype; all is computed in float64.
        inclusion: r, ``[..., n]`` or broadcast to it.

    Raises:
        CompressionError: a probability outside (0, 1].
    """
    w, r = torch.broadcast_tensors(weights.double(), inclusion.double())
    if not ((r > 0) & (r <= 1)).all():
        raise CompressionError(
            f"inclusion probabilities lie between {float(r.min()):.3g} and {float(r.max()):.3g}, expected all in "
            f"(0, 1]: a token that can never be sampled is missing from every estimate. Raise the sample's floor"
        )
    light = w * (1 - r)
    heavy = light / r
    bias = _fixed_point(w, r, light, heavy)
    multipliers = torch.where((bias >= heavy) | (r == 1), 1.0, torch.maximum(bias / heavy, r))
    return Shrinkage(bias.squeeze(-1), multipliers)


def _fixed_point(w: Tensor, r: Tensor, light: Tensor, heavy: Tensor) -> Tensor:
    """float64 ``[..., 1]``: the root of ``h(beta) = beta - sum w (1 - lambda(beta))``.

    h is increasing and linear between the breakpoints ``light`` (below it, lambda = r) and ``heavy`` (above it,
    lambda = 1). So on the segment of any beta its root is known in closed form, with A the tokens of ``beta <= light``
    and B those of ``light < beta < heavy``:

        (sum over A of light + sum over B of w) / (1 + sum over B of r / (1 - r)).

    Newton's method jumps from root to root until one lies on its own segment, which is then exact. Where r is next to
    1, h is nearly a step, and it would jump to and fro across it: a root that is not inside the bracket gives way to
    the bracket's middle. The plain iteration of the fixed point diverges wherever the slope is steep.
    """
    odds = torch.where(r < 1, r / (1 - r), 0.0)
    high = light.sum(-1, keepdim=True)
    low = high / (1 + odds.sum(-1, keepdim=True)) / 2  # no segment is steeper, and the root may be that
    bias = _near(torch.where(r < 1, w, 0.0), r, odds, low, high)
    for step in range(_STEPS):
        middle = (light < bias) & (bias < heavy)
        fixed = torch.where(middle, w, torch.where(bias <= light, light, 0.0)).sum(-1, keepdim=True)
        root = fixed / (1 + torch.where(middle, odds, 0.0).sum(-1, keepdim=True))
        low = torch.where(bias < root, torch.maximum(low, bias), low)
        high = torch.where(bias > root, torch.minimum(high, bias), high)
        if bool((((root - bias).abs() <= _CLOSE * bias) | (high - low <= _CLOSE * high)).all()):
            return root
        inside = (low < root) & (root < high) & (step < _NEWTON)
        bias = torch.where(inside, root, (low + high) / 2)
    return bias


def _near(w: Tensor, r: Tensor, odds: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """A start for Newton's method between ``low`` and ``high``, mostly on the root's segment: false position.

    Its steps need no segment: ``sum w (1 - lambda) = sum w - sum clip(beta odds, r w, w)``, and clipping takes a
    fraction of the time of the comparisons that tell segments apart. The difference of sums is rounded, so that the
    bracket it leads to is no proof.
    """
    light, total = r * w, w.sum(-1, keepdim=True)

    def above(bias: Tensor) -> Tensor:
        shares = torch.minimum(torch.maximum(bias * odds, light), w)
        return bias - total + shares.sum(-1, keepdim=True)

    left, right = above(low), above(high)
    bias = high
    for _ in range(_FALSE):
        bias = torch.where(right > left, (low * right - high * left) / (right - left), high)
        bias = torch.minimum(torch.maximum(bias, low), high)
        found = above(bias)
        below = found < 0
        # The end that stays twice in a row would stay for long: its value is halved.
        left, right = torch.where(below, found, left / 2), torch.where(below, right / 2, found)
        low, high = torch.where(below, bias, low), torch.where(below, high, bias)
    return bias


def estimate(
    weights: Tensor, values: Tensor, inclusion: Tensor, resident: Tensor, multipliers: Tensor
) -> tuple[Tensor, Tensor]:
    """The estimates of ``D [...]`` and ``N [..., Dv]``, float64 (VerKV, Eq. 5); the attention's output is N / D.

        D^ = sum over certain w + sum over resident sampled lambda w / r,    N^ alike with w v.

    Args:
        weights: exact ones, ``[..., n]``; not read where not resident.
        values: ``[..., n, Dv]`` or broadcast to it; not read where not resident.
        inclusion: r, ``[..., n]``.
        resident: bool ``[..., n]``; certain tokens, fetched ones among them, must be.
        multipliers: lambda, of ``shrinkage``, ``[..., n]``.

    Raises:
        CompressionError: a certain token is not resident.
    """
    if ((inclusion == 1) & ~resident).any():
        missing = int(((inclusion == 1) & ~resident).sum())
        raise CompressionError(f"{missing} certain tokens are not resident, expected all; fetch them first")
    share = torch.where(resident, multipliers / inclusion.double() * weights.double(), 0.0)
    known = torch.where(resident[..., None], values.double(), 0.0)
    return share.sum(-1), (share[..., None, :] @ known).squeeze(-2)
