"""Random selections: their probabilities against a bisection, their frequencies against their probabilities, and that
no sample outgrows its budget."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compressors import Compressor, Kept, MethodError, MethodSpec, Scorer, Shape, poisson
from compressors.budget import COUNTS, allocate, forced_mask
from compressors.poisson import fitting, inclusion, philox, sample, uniforms
from tests.tensor.compressor_runs import heads_of, quick

SINKS, RECENT = 1, 2
N = 40
FORCED = forced_mask(N, SINKS, RECENT)
SEEDS = 400


def scores_of(layers: int, heads: int, n: int = N, seed: int = 0) -> Tensor:
    """Spread over several decades, as scores of attention are."""
    return torch.randn(layers, heads, n, generator=torch.Generator().manual_seed(seed)).mul(2).exp()


def draw(scores: Tensor, counts: Tensor, design: str, seed: int, power: float = 1.0, floor: float = 1e-3) -> Kept:
    return sample(scores.masked_fill(FORCED, math.inf), counts, FORCED, design, power, floor, seed)


def kept_mask(kept: Kept) -> Tensor:
    assert kept.inclusion is not None
    mask = torch.zeros_like(kept.inclusion, dtype=torch.bool)
    for layer, heads in enumerate(heads_of(kept)):
        for head, positions in enumerate(heads):
            assert positions == sorted(set(positions))
            mask[layer, head, positions] = True
    return mask


# -- numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0), 0, (0xFF1DAE59, 0x6CD10DF2)),
        ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ],
)
def test_philox_gives_the_known_answers(counter: tuple[int, int], key: int, expected: tuple[int, int]) -> None:
    """Of Random123, the authors' library."""
    low, high = philox(*(torch.tensor([word]) for word in counter), key)
    assert (int(low), int(high)) == expected


def test_a_number_depends_on_seed_layer_head_and_position_only() -> None:
    everything = uniforms(5, 3, 4, 100)
    assert torch.equal(uniforms(5, 3, 2, 60), everything[:2, :60])
    others = [uniforms(6, 3, 4, 100), uniforms(5, 2, 4, 100)]
    assert all((everything != other).any() for other in others)
    assert len(everything.flatten().unique()) == 400


def test_numbers_are_uniform() -> None:
    u = uniforms(1, 0, 8, 4096).flatten().sort().values
    assert u[0] > 0
    assert u[-1] < 1
    steps = torch.arange(1, len(u) + 1) / len(u)
    assert float((u - steps).abs().max()) < 1.63 / len(u) ** 0.5  # Kolmogorov and Smirnov at 1 %


# -- probabilities -------------------------------------------------------------------------------------------


def by_bisection(scores: list[float], size: float, power: float, floor: float) -> list[float]:
    """``min(1, c w)`` with sum ``size``."""
    top = max(scores)
    weights = [max((s / top) ** power if top else 0.0, floor) for s in scores]
    low, high = 0.0, 1 / min(weights)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(min(1.0, middle * w) for w in weights) < size else (low, middle)
    return [min(1.0, high * w) for w in weights]


@quick
@given(data=st.data())
def test_probabilities_are_those_of_a_bisection(data: st.DataObject) -> None:
    n = data.draw(st.integers(4, 30))
    values = st.one_of(st.just(0.0), st.floats(1e-30, 1e30), st.sampled_from([0.5, 1.0]))
    scores = data.draw(st.lists(values, min_size=n, max_size=n))
    size = data.draw(st.floats(0.01, n - 3.0))
    power, floor = data.draw(st.sampled_from([0.5, 1.0, 2.0])), data.draw(st.sampled_from([1e-3, 0.1, 1.0]))
    forced = forced_mask(n, SINKS, RECENT)
    row = torch.tensor([scores], dtype=torch.float64).masked_fill(forced, math.inf)
    r = inclusion(row, torch.tensor([size + 3.0]).double(), forced, power, floor)[0]
    assert (r[forced] == 1).all()
    wanted = by_bisection([s for s, f in zip(scores, forced.tolist(), strict=True) if not f], size, power, floor)
    torch.testing.assert_close(r[~forced], torch.tensor(wanted).double(), rtol=1e-5, atol=1e-7)
    assert float(r.sum()) == pytest.approx(size + 3, abs=1e-5)
    assert (r > 0).all()
    assert (r <= 1).all()


def test_equal_scores_are_equally_likely_and_zeros_too() -> None:
    for scores in (torch.ones(1, N), torch.zeros(1, N)):
        r = inclusion(scores.masked_fill(FORCED, math.inf), torch.tensor([10.0]).double(), FORCED, 1.0, 1e-3)
        torch.testing.assert_close(r[0, ~FORCED], torch.full((N - 3,), 7 / (N - 3)).double())


def test_a_head_that_keeps_everything() -> None:
    r = inclusion(torch.rand(1, N).masked_fill(FORCED, math.inf), torch.tensor([float(N)]).double(), FORCED, 1.0, 1e-3)
    assert (r == 1).all()


# -- samples -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [0.5, 1.0])
@pytest.mark.parametrize("design", ["poisson", "pareto"])
def test_tokens_are_kept_as_often_as_their_probability_says(design: str, power: float) -> None:
    scores, counts = scores_of(2, 3), torch.tensor([[12, 20, 9], [15, 12, 30]])
    kept = [draw(scores, counts, design, seed, power) for seed in range(SEEDS)]
    often = torch.stack([kept_mask(k) for k in kept]).double().mean(0)
    r = kept[0].inclusion
    assert r is not None
    deviation = (often - r).abs()
    assert (deviation[r == 1] == 0).all()
    # Four standard deviations, and what the fixed size adds: O(1 / count).
    assert (deviation <= 4 * (r * (1 - r) / SEEDS).sqrt() + (0.03 if design == "pareto" else 0.003)).all()


def test_a_pareto_sample_has_the_counts_that_were_asked_for() -> None:
    scores, counts = scores_of(2, 3), torch.tensor([[12, 20, 4], [15, 12, N]])
    for seed in range(20):
        kept = draw(scores, counts, "pareto", seed)
        assert torch.equal(kept.counts, counts)
        assert torch.equal(kept_mask(kept).sum(-1), counts)
        assert kept_mask(kept)[..., FORCED].all()
        assert kept.inclusion is not None
        torch.testing.assert_close(kept.inclusion.sum(-1), counts.float())


@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_a_poisson_sample_never_outgrows_the_budget(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it does not aim lower, and every other sample has to lose tokens: none that is certain."""
    monkeypatch.setattr(poisson, "SPREAD", spread)
    scores, counts = scores_of(3, 2), torch.full((3, 2), 14)
    scores[0, 0, 5] = 1e6
    sizes = []
    for seed in range(SEEDS):
        kept = draw(scores, counts, "poisson", seed)
        assert kept.inclusion is not None
        mask = kept_mask(kept)
        sizes.append(int(mask.sum()))
        assert mask[kept.inclusion == 1].all()
    full = sum(size == int(counts.sum()) for size in sizes) / SEEDS
    assert max(sizes) <= int(counts.sum())
    assert full > 0.4 if spread == 0 else full < 0.02


def test_sizes_of_poisson_samples_differ_from_head_to_head() -> None:
    kept = draw(scores_of(3, 4), torch.full((3, 4), 20), "poisson", 0)
    assert len(set(kept.counts.flatten().tolist())) > 1


@quick
@given(budget=st.floats(1, 1e6))
def test_the_mean_of_a_sample_lies_three_deviations_below_its_budget(budget: float) -> None:
    mean = fitting(budget)
    assert mean + 3 * mean**0.5 == pytest.approx(budget)


@pytest.mark.parametrize("design", ["poisson", "pareto"])
def test_sums_over_all_tokens_can_be_estimated(design: str) -> None:
    """Horvitz and Thompson: kept tokens weighed by 1 / r."""
    scores, counts = scores_of(1, 1), torch.tensor([[20]])
    values = torch.rand(N, generator=torch.Generator().manual_seed(3)) * scores[0, 0]
    estimates = []
    for seed in range(SEEDS):
        kept = draw(scores, counts, design, seed)
        assert kept.inclusion is not None
        estimates.append(float((values / kept.inclusion[0, 0])[kept.positions].sum()))
    found = torch.tensor(estimates)
    error = abs(float(found.mean()) - float(values.sum()))
    assert error < 4 * float(found.std()) / SEEDS**0.5 + 0.01 * float(values.sum())


@pytest.mark.parametrize("design", ["poisson", "pareto"])
def test_a_seed_gives_the_same_sample_again(design: str) -> None:
    scores, counts = scores_of(2, 2), torch.full((2, 2), 15)
    first, again, other = (draw(scores, counts, design, seed) for seed in (3, 3, 4))
    assert torch.equal(first.positions, again.positions)
    assert first.positions.tolist() != other.positions.tolist()


def test_negative_scores_are_refused() -> None:
    with pytest.raises(MethodError, match=r"selector 'pareto' takes scores for weights, .* -0\.5.* Use selector 'top'"):
        draw(torch.full((1, 1, N), -0.5), torch.tensor([[9]]), "pareto", 0)


# -- as a part of a method -------------------------------------------------------------------------------------


class Spread(Scorer):
    """Scores over several decades."""

    name = "spread"
    summary = "for tests"
    query_aware = False

    def scores(self) -> Tensor:
        return scores_of(self.shape.layers, self.shape.kv_heads, self.num_tokens)


def select(selector: str, counts: str, n: int = N, ratio: float = 0.4) -> Kept:
    spec = MethodSpec("spread", counts, ratio, SINKS, RECENT, selector=selector)
    return Compressor(Spread(Shape(3, 2, 2, 8), n, spec), spec).select()


@pytest.mark.parametrize("counts", COUNTS)
def test_samples_keep_the_counts_of_every_mode(counts: str) -> None:
    scores = scores_of(3, 2).masked_fill(FORCED, math.inf)
    wanted = allocate(scores, 16, counts, 3, 1)
    assert torch.equal(select("pareto", counts).counts, wanted)
    assert int(select("poisson", counts).counts.sum()) <= 3 * 2 * 16


@pytest.mark.parametrize("selector", ["poisson", "pareto"])
def test_a_sample_keeps_a_token_that_is_not_forced(selector: str) -> None:
    spec = MethodSpec("spread", "uniform", 0.01, SINKS, RECENT, selector=selector)
    assert spec.least == spec.budget(N) == 4
    assert int(select("pareto", "per_head", ratio=0.01).counts.min()) == 4
    inclusion = select(selector, "uniform", ratio=0.01).inclusion
    assert inclusion is not None
    assert (inclusion > 0).all()


@pytest.mark.parametrize("selector", ["poisson", "pareto"])
@pytest.mark.parametrize("n", [0, 1, 3, 4])
def test_a_context_that_is_kept_whole_is_certain(selector: str, n: int) -> None:
    kept = select(selector, "uniform", n)
    assert kept.inclusion is not None
    assert kept.inclusion.shape == (3, 2, n)
    assert (kept.inclusion == 1).all()
    assert select("top", "uniform", n).inclusion is None
