"""How far the estimates of a query's sums may be off, before the sample is looked at (VerKV, Eq. 7).

The error of an estimate is ``sum X_i - beta`` with independent ``X_i = lambda_i (w_i / r_i) (Z_i - r_i)`` of mean 0.
Bernstein's inequality bounds the sum by their variances and their largest size.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vericache.certified.estimator import shrinkage
from vericache.errors import CompressionError, ConfigError

# What a certificate is about: D, as in the paper, or the attention's output N / D. Not N alone: nothing but the output
# reads it, and that depends on D as much.
Bound = Literal["denominator", "output"]


@dataclass(frozen=True)
class Target:
    """The relative error ``eps`` of what ``bound`` names, which a decision may exceed with probability ``delta`` at
    most.

    ``eps`` 0 fetches every token. Bernstein's inequality is loose here: far fewer decisions exceed it than ``delta``.

    Raises:
        ConfigError: eps outside [0, 1), delta outside (0, 1).
    """

    eps: float = 0.05
    delta: float = 0.1
    bound: Bound = "denominator"

    def __post_init__(self) -> None:
        if not 0 <= self.eps < 1:
            raise ConfigError(f"eps is {self.eps}, expected 0 <= eps < 1; 0.05 is a good choice, 0 fetches all")
        _require_probability(self.delta)


def _require_probability(delta: float) -> None:
    if not 0 < delta < 1:
        raise ConfigError(f"delta is {delta}, expected a probability 0 < delta < 1; 0.1 is a good choice")


@dataclass(frozen=True)
class Weights:
    """What is known of a query's weights before the sample is looked at, float64: ``upper [..., n]``, their upper ends
    w+; ``total [...]``, the lower end of D; ``shift [..., 1]``, m.

    Exact where a token is certain; for sampled ones as good as the sketch and its radius.
    """

    upper: Tensor
    total: Tensor
    shift: Tensor

    @classmethod
    def of(cls, logits: Tensor, inclusion: Tensor, sigma: Tensor | None = None, z: float = 0.0) -> "Weights":
        """``w+ = exp(s + z sigma - m)`` and ``D- = sum exp(s - z sigma - m)``, without the radius where certain.

        With z = 0 the sketch is taken at its word, as the paper does. If no sampled logit is off by more than
        ``z sigma``, the bound that follows holds for the true weights. The sketch's noise makes ``exp(s)`` too large on
        average; that is left as it is, since it widens the bound.

        Args:
            logits: ``[..., n]``, n at least 1: exact where certain, a sketch's elsewhere, also of resident tokens.
            inclusion: r, ``[..., n]`` or broadcast to it.
            sigma: standard deviation of the sketch's logits, ``[..., n]``; needed where z is not 0.

        Raises:
            ConfigError: z below 0.
            CompressionError: a logit or its radius is not finite.
        """
        if not 0 <= z < math.inf:
            raise ConfigError(f"z is {z}, expected a finite number of standard deviations, at least 0")
        logits = logits.double()
        radius = torch.zeros_like(logits)
        if z:
            assert sigma is not None, "a radius needs the sketch's sigma"
            radius = torch.where(inclusion < 1, z * sigma.double(), 0.0)
        upper = logits + radius
        if not upper.isfinite().all():
            wrong = int((~upper.isfinite()).sum())
            raise CompressionError(f"{wrong} of {upper.numel()} logits are not finite, expected finite ones to certify")
        shift = upper.amax(-1, keepdim=True)
        return cls((upper - shift).exp(), (logits - radius - shift).exp().sum(-1), shift)

    def exact(self, logits: Tensor) -> Tensor:
        """Weights of exact ``logits [..., n]`` in the same unit, for ``estimate``."""
        return (logits.double() - self.shift).exp()


@dataclass(frozen=True)
class Deviation:
    """Of an estimated sum, float64 ``[...]`` each: ``bias`` beta, ``variance`` V, ``largest`` b of any one token.

    Exact for the weights given, whatever the multipliers.
    """

    bias: Tensor
    variance: Tensor
    largest: Tensor

    @classmethod
    def of(cls, weights: Tensor, inclusion: Tensor, multipliers: Tensor) -> "Deviation":
        """Over sampled tokens: ``beta = sum w (1 - lambda)``, ``V = sum lambda^2 w^2 (1 - r) / r`` and
        ``b = max lambda (w / r) max(r, 1 - r)``.

        For N, give ``w |v|`` for the weights: the bound is then that of vectors (Pinelis, 1994: as for numbers, in any
        dimension), with ``sum w (1 - lambda) |v|`` for the norm of the bias. With ``w |v - o|`` and the output
        ``o = N / D`` it bounds ``N^ - o D^``, hence the output's own error, without a detour over both sums.

        Args:
            weights: ``[..., n]``; inclusion: r, ``[..., n]`` or broadcast to it; multipliers: lambda, ``[..., n]``.
        """
        w, r = torch.broadcast_tensors(weights.double(), inclusion.double())
        w = torch.where(r < 1, w, 0.0)
        share = multipliers * w
        variance = (share.square() * (1 - r) / r).sum(-1)
        return cls((w - share).sum(-1), variance, (share / r * torch.maximum(r, 1 - r)).amax(-1))

    def bound(self, delta: float) -> Tensor:
        """The error that is exceeded with probability ``delta`` at most, float64 ``[...]`` (VerKV, Eq. 7, times D):

            beta + b l / 3 + sqrt((b l / 3)^2 + 2 V l),    l = ln(2 / delta).

        Raises:
            ConfigError: delta outside (0, 1).
        """
        _require_probability(delta)
        log = math.log(2 / delta)
        jump = self.largest * log / 3
        return self.bias + jump + (jump.square() + 2 * self.variance * log).sqrt()


def denominator_error(weights: Weights, inclusion: Tensor, delta: float) -> Tensor:
    """The certificate of D, float64 ``[...]``: ``|D^ - D| / D`` exceeds it with probability ``delta`` at most (VerKV,
    Eq. 7), with the multipliers ``shrinkage(weights.upper, inclusion)``. 0 where no token is sampled.

    It never grows when a token becomes certain: beta falls, so do all multipliers, so do V and b. The guarantee is
    exact for true weights; with a sketch's, D and all terms are estimates.

    Args:
        weights: of ``Weights.of``, ``[..., n]``.
        inclusion: r, ``[..., n]`` or broadcast to it.
    """
    multipliers = shrinkage(weights.upper, inclusion).multipliers
    error = Deviation.of(weights.upper, inclusion, multipliers).bound(delta)
    return torch.where(error == 0, 0.0, error / weights.total)


@dataclass(frozen=True)
class Numerator:
    """What a certificate of the output needs beside the weights. ``norms``: ``|v|`` or more, ``[..., n]`` or broadcast
    to the weights. ``length`` float64 ``[...]``: ``|N^|``, in the unit of the weights: an assumed one where it is to be
    decided what is fetched, the estimate's own where that is to be proven.
    """

    norms: Tensor
    length: Tensor


def certificate(weights: Weights, inclusion: Tensor, target: Target, numerator: Numerator | None = None) -> Tensor:
    """The certificate of what ``target.bound`` names, float64 ``[...]``; ``numerator`` is needed for the output's.

    Of the output, ``delta`` is shared by N and D in equal parts. Its certificate falls with every token that becomes
    certain where all values are equally long; elsewhere beta moves between tokens, and it may grow a little.
    """
    if target.bound == "denominator":
        return denominator_error(weights, inclusion, target.delta)
    assert numerator is not None, "the output's certificate needs the norms of values"
    multipliers = shrinkage(weights.upper, inclusion).multipliers
    each = target.delta / 2
    error = Deviation.of(weights.upper, inclusion, multipliers).bound(each)
    of_numerator = Deviation.of(weights.upper * numerator.norms, inclusion, multipliers).bound(each)
    relative = torch.where(error == 0, 0.0, error / weights.total)
    return output_error(numerator_error(of_numerator, numerator.length), relative)


def numerator_error(bound: Tensor, norm: Tensor) -> Tensor:
    """The relative error of N from the absolute ``bound [...]`` and from ``norm [...]``, that of the *estimate*:
    ``E / (|N^| - E)``, since ``|N| >= |N^| - E`` wherever the bound holds. Infinite where E is as large as the norm.

    N^ depends on the sample: a check of sets that were chosen without it (``attention.LEVELS``).
    """
    left = norm - bound
    return torch.where(bound == 0, 0.0, torch.where(left > 0, bound / left, math.inf))


def output_error(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The relative error of the attention's output N / D from those of N and D, ``[...]``:
    ``(e_N + e_D) / (1 - e_D)``, with the sum of their failure probabilities. Infinite where e_D is 1 or more.

    From ``N^/D^ - N/D = (N^ - N) / D^ - (N/D) (D^ - D) / D^``.
    """
    return torch.where(denominator < 1, (numerator + denominator) / (1 - denominator), math.inf)
