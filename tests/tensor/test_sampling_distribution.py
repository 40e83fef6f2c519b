"""Shared-noise sampling draws from the verifier's distribution, and independently at every position and seed."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from tests.tensor.sampling_batch import metadata_of, params_of
from vericache.engine.sampling import PLACEHOLDER, RequestRow, sample

pytestmark = pytest.mark.usefixtures("eager")

DRAWS = 20_000
SMALL = torch.tensor([1.4, -0.3, 0.9, 0.0, 2.0, -1.2, 0.6, 1.1])
SIGNIFICANCE = 1e-3  # seeds are fixed, so a test passes always or never


def probabilities(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """Softmax after temperature, top-k, then the smallest set of likeliest tokens that holds ``top_p``."""
    scaled = logits.double().numpy() / temperature
    order = np.argsort(-scaled)
    if top_k:
        scaled[order[top_k:]] = -math.inf
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    before = np.concatenate([[0], np.cumsum(p[order])[:-1]])
    p[order[before >= top_p]] = 0
    return p / p.sum()


def keyed_draws(params: Sequence[SamplingParams], positions: Sequence[int], logits: Tensor = SMALL) -> np.ndarray:
    """One draw per (params, position), all on the same logits."""
    rows, vocab = [RequestRow(p, (), ()) for p in params], len(logits)
    out = sample(Sampler(), logits.expand(len(rows), -1).clone(), metadata_of(rows, vocab), rows, positions, vocab)
    return out.sampled_token_ids.flatten().numpy()


def fits(draws: np.ndarray, expected: np.ndarray) -> bool:
    counts = np.bincount(draws, minlength=len(expected))
    support = expected > 0
    assert counts[~support].sum() == 0
    return support.sum() == 1 or stats.chisquare(counts[support], expected[support] * len(draws)).pvalue > SIGNIFICANCE


SETTINGS = [
    {"temperature": 0.5}, {"temperature": 1.0}, {"temperature": 2.0}, {"temperature": 0.5, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "top_k": 4},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.8},
]  # fmt: skip


@pytest.mark.parametrize("values", SETTINGS, ids=str)
@pytest.mark.parametrize("vary", ["position", "seed"])
def test_keyed_noise_has_the_right_distribution(values: dict[str, Any], vary: str) -> None:
    """Over the positions of one request (one long output) and over the seeds of many requests at one position."""
    expected = probabilities(SMALL, **values)
    assert 1 < (expected > 0).sum() <= len(SMALL)
    if vary == "position":
        draws = keyed_draws([params_of(seed=1234, **values)] * DRAWS, range(DRAWS))
    else:
        draws = keyed_draws([params_of(seed=seed, **values) for seed in range(DRAWS)], [777] * DRAWS)
    assert fits(draws, expected)


def test_the_chi_square_test_can_fail() -> None:
    """Draws at another temperature are told apart, so agreement above means something."""
    draws = keyed_draws([params_of(seed=1234, temperature=1.0)] * DRAWS, range(DRAWS))
    assert not fits(draws, probabilities(SMALL, 1.07))


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_distribution_is_stock_vllms(temperature: float) -> None:
    """Two samples, the other one from vLLM's unpatched sampler with its own noise."""
    draws = keyed_draws([params_of(seed=99, temperature=temperature, top_p=0.9)] * DRAWS, range(DRAWS))
    torch.manual_seed(0)
    logits = (SMALL / temperature).expand(DRAWS, -1).clone()
    stock, _ = TopKTopPSampler()(logits, {}, None, torch.full((DRAWS,), 0.9))
    table = np.stack([np.bincount(x, minlength=len(SMALL)) for x in (draws, stock.flatten().numpy())])
    support = table.sum(0) > 0
    assert ((table > 0) == support).all()
    assert stats.chi2_contingency(table[:, support]).pvalue > SIGNIFICANCE
    assert fits(stock.flatten().numpy(), probabilities(SMALL, temperature, top_p=0.9))


@pytest.mark.parametrize("across", ["positions", "seeds"])
def test_neighbouring_draws_are_independent(across: str) -> None:
    """Consecutive positions of a request, and the children of one request (seed, seed + 1) at a position."""
    if across == "positions":
        draws = keyed_draws([params_of(seed=5, temperature=1.0)] * DRAWS, range(DRAWS))
        first, second = draws[0::2], draws[1::2]
    else:
        first, second = (
            keyed_draws([params_of(seed=seed, temperature=1.0)] * DRAWS, range(DRAWS)) for seed in (41, 42)
        )
    table = np.zeros((len(SMALL), len(SMALL)))
    np.add.at(table, (first, second), 1)
    assert stats.chi2_contingency(table).pvalue > SIGNIFICANCE


def test_a_verify_block_has_the_verifiers_distribution() -> None:
    """Whatever the drafts are, the emitted token is the verifier's own sample: 20,000 rows with a fixed draft."""
    rows = [RequestRow(params_of(seed=seed, temperature=0.5), (), (), [4]) for seed in range(20_000)]
    metadata = metadata_of(rows, len(SMALL))
    logits = SMALL.expand(2 * len(rows), -1).clone()
    positions = [p for _ in rows for p in (30, 31)]
    tokens = sample(Sampler(), logits, metadata, rows, positions, len(SMALL)).sampled_token_ids.numpy()
    expected = probabilities(SMALL, 0.5)
    assert fits(tokens[:, 0], expected)
    followed = tokens[:, 1] != PLACEHOLDER
    assert (followed == (tokens[:, 0] == 4)).all()
    assert fits(tokens[followed, 1], expected)


def test_seeded_and_unseeded_rows_in_one_batch() -> None:
    """The seeded request is reproduced exactly in any company; the unseeded one still follows its distribution."""
    values = {"temperature": 1.0, "top_p": 0.9}
    seeded, unseeded = params_of(seed=77, **values), params_of(seed=None, **values)
    assert unseeded.seed is None
    count = DRAWS
    alone = keyed_draws([seeded] * count, range(count))
    for mixed in ([seeded, unseeded] * count, [unseeded, seeded] * count):
        draws = keyed_draws(mixed, [p for p in range(count) for _ in range(2)])
        at = mixed.index(seeded)
        assert (draws[at::2] == alone).all()
        assert fits(draws[1 - at :: 2], probabilities(SMALL, **values))
        # Independent of its neighbour, too: a shared stream would repeat the neighbour's tokens.
        table = np.zeros((len(SMALL), len(SMALL)))
        np.add.at(table, (draws[0::2], draws[1::2]), 1)
        used = table[table.sum(1) > 0][:, table.sum(0) > 0]
        assert stats.chi2_contingency(used).pvalue > SIGNIFICANCE
