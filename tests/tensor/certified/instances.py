"""Random queries over random caches: heavy-tailed weights, and probabilities that follow them with some error."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from compressors.poisson import inclusion
from vericache.certified.certificate import Weights


def instances(count: int, n: int, share: float = 1 / 16, seed: int = 0, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """Logits and probabilities, float64 ``[count, n]``: the first and the last tokens are certain, and scores are the
    weights up to a factor of e or so, as scores from other queries are."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, n, generator=rng, dtype=torch.float64) * spread
    scores = (logits + torch.randn(count, n, generator=rng, dtype=torch.float64)).exp()
    forced = torch.zeros(n, dtype=torch.bool)
    forced[:2] = forced[-2:] = True
    sizes = torch.full((count,), 4 + share * (n - 4), dtype=torch.float64)
    return logits, inclusion(scores, sizes, forced, 1.0, 1e-3)


def perfect(logits: Tensor, r: Tensor) -> Weights:
    """As of a sketch without an error."""
    return Weights.of(logits, r)


def drawn(r: Tensor, draws: int, seed: int = 1) -> Tensor:
    """bool ``[draws, ..., n]``: independent samples."""
    return torch.rand(draws, *r.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) < r


def all_samples(r: Tensor) -> tuple[Tensor, Tensor]:
    """Every possible sample of few tokens ``[n]``, bool ``[S, n]``, and its probability: expectations are exact."""
    z = (torch.arange(2 ** len(r))[:, None] >> torch.arange(len(r)) & 1).bool()
    z = z[(z | (r < 1)).all(-1)]
    return z, torch.where(z, r, 1 - r).prod(-1)


@st.composite
def small_queries(draw: st.DrawFn, most: int = 12) -> tuple[Tensor, Tensor]:
    """Weights and probabilities ``[n]`` of a few tokens: zeros, ties, certain ones, probabilities next to 0 and 1."""
    n = draw(st.integers(1, most))
    weight = st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-8, 1.0))
    chance = st.one_of(st.just(1.0), st.just(0.5), st.floats(1e-4, 1.0), st.sampled_from([1e-6, 1 - 1e-6, 1 - 1e-12]))
    lists = (draw(st.lists(kind, min_size=n, max_size=n)) for kind in (weight, chance))
    w, r = (torch.tensor(x, dtype=torch.float64) for x in lists)
    return w, r
