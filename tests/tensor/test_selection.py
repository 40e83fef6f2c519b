"""Which tokens are kept for given scores, and how many: ties, broken scores, budgets and forced tokens."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compressors import Compressor, Kept, MethodError, MethodSpec, Scorer, Shape
from compressors.budget import COUNTS, allocate, forced_mask, kept_count, pyramid
from compressors.select import top_positions
from tests.tensor.compressor_runs import brute_force, check_structure, heads_of, quick


class Fixed(Scorer):
    """Scores handed in by a test."""

    name = "fixed"
    summary = "for tests"
    query_aware = False

    def __init__(self, values: Tensor, spec: MethodSpec) -> None:
        layers, heads, n = values.shape
        super().__init__(Shape(layers, heads, heads, 8), n, spec)
        self.values = values

    def scores(self) -> Tensor:
        return self.values


def select(values: Tensor, counts: str, ratio: float, sinks: int = 1, recent: int = 2, beta: float = 20.0) -> Kept:
    spec = MethodSpec("fixed", counts, ratio, sinks, recent, beta=beta)
    return Compressor(Fixed(values, spec), spec).select()


@pytest.mark.parametrize("mode", COUNTS)
@quick
@given(data=st.data())
def test_ties_go_to_the_smaller_index(mode: str, data: st.DataObject) -> None:
    """Few distinct scores, so that nearly every decision is a tie."""
    layers, heads, n = (data.draw(st.integers(1, high)) for high in (4, 3, 14))
    sinks, recent = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 4))
    levels = st.sampled_from([0.0, 0.0, 0.25, 0.5, -1.0])
    flat = data.draw(st.lists(levels, min_size=layers * heads * n, max_size=layers * heads * n))
    ratio = data.draw(st.floats(0.01, 1.0))
    beta = data.draw(st.sampled_from([1.0, 1.5, 20.0]))
    scores = torch.tensor(flat).view(layers, heads, n)
    kept = select(scores, mode, ratio, sinks, recent, beta)
    spec = MethodSpec("fixed", mode, ratio, sinks, recent, beta=beta)
    check_structure(kept, spec, Shape(layers, heads, heads, 8), n)
    assert heads_of(kept) == brute_force(scores, spec)


@pytest.mark.parametrize("mode", COUNTS)
def test_equal_scores_keep_the_first_tokens(mode: str) -> None:
    kept = select(torch.zeros(1, 2, 20), mode, 0.4, sinks=1, recent=2)
    rest = 10 if mode in ("per_head", "within_layer") else 5  # one order: the first head takes all that is not forced
    assert heads_of(kept)[0][0] == [0, *range(1, 1 + rest), 18, 19]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 7, 19])
@pytest.mark.parametrize("mode", COUNTS)
def test_scores_that_are_not_finite_are_rejected(bad: float, position: int, mode: str) -> None:
    """Also at a forced position, whose score would never be read: it shows a broken scorer."""
    scores = torch.rand(2, 2, 20)
    scores[1, 0, position] = bad
    with pytest.raises(MethodError, match=r"fixed returned scores .* some not finite"):
        select(scores, mode, 0.4)


def test_scores_of_a_wrong_shape_are_rejected() -> None:
    scorer = Fixed(torch.rand(2, 2, 20), MethodSpec("fixed", ratio=0.5, sinks=1, recent=2))
    scorer.values = torch.rand(2, 1, 20)
    with pytest.raises(MethodError, match=r"shape \(2, 1, 20\), all finite; expected finite \(2, 2, 20\)"):
        Compressor(scorer, scorer.spec).select()


def test_kept_layer_is_the_layers_part() -> None:
    kept = select(torch.rand(3, 2, 30, generator=torch.Generator().manual_seed(0)), "per_head", 0.4)
    for layer, heads in enumerate(heads_of(kept)):
        assert kept.layer(layer).tolist() == [position for head in heads for position in head]


def test_top_positions_accepts_empty_heads() -> None:
    scores = torch.tensor([[[1.0, 3.0, 2.0], [3.0, 1.0, 2.0]]])
    assert top_positions(scores, torch.tensor([[0, 2]])).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("ratio", "n", "sinks", "recent", "expected"),
    [
        (0.25, 100, 4, 8, 25),
        (0.25, 102, 4, 8, 26),  # 25.5 rounds up
        (0.25, 101, 4, 8, 25),  # 25.25
        (0.25, 103, 4, 8, 26),  # 25.75
        (0.5, 5, 0, 1, 3),  # 2.5: half up, not to even
        (0.5, 7, 0, 1, 4),
        (0.01, 1000, 4, 32, 36),  # never fewer than the forced tokens
        (0.036, 1000, 4, 32, 36),
        (0.25, 20, 4, 32, 20),  # never more than there are
        (0.9, 36, 4, 32, 36),
        (1.0, 77, 4, 32, 77),
        (0.99, 37, 4, 32, 37),
        (0.25, 1, 4, 32, 1),
        (0.25, 0, 4, 32, 0),
    ],
)
def test_kept_count(ratio: float, n: int, sinks: int, recent: int, expected: int) -> None:
    assert kept_count(ratio, n, sinks, recent) == expected


@quick
@given(ratio=st.floats(0.001, 1), n=st.integers(0, 5000), sinks=st.integers(0, 40), recent=st.integers(1, 80))
def test_kept_count_is_the_rounded_share_within_its_limits(ratio: float, n: int, sinks: int, recent: int) -> None:
    kept = kept_count(ratio, n, sinks, recent)
    assert min(n, sinks + recent) <= kept <= n
    if sinks + recent < kept < n:
        assert abs(kept - ratio * n) <= 0.5
    assert kept <= kept_count(ratio, n + 1, sinks, recent) <= kept + 1
    assert kept <= kept_count(min(ratio * 1.1, 1.0), n, sinks, recent)


@quick
@given(n=st.integers(0, 20), sinks=st.integers(0, 25), recent=st.integers(1, 25))
def test_forced_mask(n: int, sinks: int, recent: int) -> None:
    assert forced_mask(n, sinks, recent).tolist() == [i < sinks or i >= n - recent for i in range(n)]


def test_adakv_lets_heads_of_a_layer_compete_and_leaves_each_a_fifth() -> None:
    scores = torch.rand(2, 3, 100, generator=torch.Generator().manual_seed(0))
    scores[0, 1] += 1  # takes what it can of its layer, and nothing of the other
    counts = select(scores, "within_layer", 0.3, sinks=1, recent=2).counts
    assert counts[0].tolist() == [6, 78, 6]
    assert int(counts[1].sum()) == 90
    assert select(scores, "within_layer", 0.03, sinks=1, recent=2).counts.tolist() == [[3] * 3] * 2


@pytest.mark.parametrize(
    ("layers", "budget", "n", "beta", "expected"),
    [
        (5, 100, 1000, 20.0, [195.0, 147.5, 100.0, 52.5, 5.0]),
        (5, 100, 1000, 1.0, [100.0] * 5),
        (3, 100, 150, 20.0, [150.0, 100.0, 50.0]),  # the first layer keeps all there is
        (1, 100, 1000, 20.0, [100.0]),
        (2, 100, 1000, 4.0, [175.0, 25.0]),
    ],
)
def test_pyramid(layers: int, budget: int, n: int, beta: float, expected: list[float]) -> None:
    assert pyramid(layers, budget, n, beta) == pytest.approx(expected)


def test_a_pyramid_leaves_every_layer_its_forced_tokens() -> None:
    counts = allocate(torch.rand(4, 2, 400), 50, "pyramid", 36, beta=20.0)
    assert counts.tolist() == [[80, 80], [48, 48], [36, 36], [36, 36]]  # 97.5, 65.8, 34.2, 2.5 before the floor


@pytest.mark.parametrize("mode", COUNTS)
@quick
@given(data=st.data())
def test_every_head_can_be_promised_more_than_its_forced_tokens(mode: str, data: st.DataObject) -> None:
    layers, heads, n = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)), data.draw(st.integers(5, 20))
    budget = data.draw(st.integers(4, n))
    scores = torch.rand(layers, heads, n, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    scores[0, 0] += 10
    scores = scores.masked_fill(forced_mask(n, 1, 2), math.inf)
    counts = allocate(scores, budget, mode, 3, more=1)
    assert counts.dtype == torch.int64
    assert int(counts.sum()) == layers * heads * budget
    assert 4 <= int(counts.min()) <= int(counts.max()) <= n


@quick
@given(data=st.data())
def test_per_layer_counts_fill_up_a_saturated_layer(data: st.DataObject) -> None:
    """One layer wants everything; its share is bounded by n and the rest still sums up exactly."""
    layers, heads, n = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 3)), data.draw(st.integers(4, 12))
    budget = data.draw(st.integers(2, n))
    scores = torch.rand(layers, heads, n, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    scores[0] += 10
    scores = scores.masked_fill(forced_mask(n, 1, 1), math.inf)
    counts = allocate(scores, budget, "per_layer", 2)
    assert int(counts.sum()) == layers * heads * budget
    assert int(counts.min()) >= 2
    assert int(counts.max()) <= n
