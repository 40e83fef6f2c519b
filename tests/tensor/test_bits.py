"""Widths of tokens and of layers, against brute force."""

import heapq
import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compressors import MethodError, MethodSpec, create, validate
from compressors.bits import ERRORS, WIDTHS, Pair, bits_of_layers, vector_bits, water_filling
from tests.packings import kept_bits, turboquant
from tests.tensor.compressor_runs import SHAPE, Context, drive, heads_of, quick


def sizes(bits: Sequence[int], dim: int) -> int:
    return sum(b * dim + (16 if 0 < b < 16 else 0) for b in bits)


def greedy(weights: list[float], forced: list[bool], budget: int, dim: int, widths: Sequence[int]) -> list[int]:
    """One step at a time, the one that saves most error per bit; ends at the first one that does not fit."""
    bits = [0] * len(weights)
    heap: list[tuple[float, int]] = []

    def offer(token: int) -> None:
        if bits[token] < widths[-1]:
            width = next(w for w in widths if w > bits[token])
            saved = weights[token] * (ERRORS[bits[token]] - ERRORS[width]) / sizes_between(bits[token], width)
            must = forced[token] and not bits[token]
            heapq.heappush(heap, (-float("inf") if must else -saved, token))

    def sizes_between(low: int, high: int) -> int:
        return sizes([high], dim) - sizes([low], dim)

    for token in range(len(weights)):
        offer(token)
    while heap:
        _, token = heapq.heappop(heap)
        before, bits[token] = bits[token], next(w for w in widths if w > bits[token])
        if sizes(bits, dim) > budget:
            bits[token] = before
            break
        offer(token)
    return bits


@quick
@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.booleans()), min_size=1, max_size=30),
    st.sampled_from([8, 64, 128]),
    st.sampled_from([WIDTHS, (2, 3, 4), (2, 4), (3, 4)]),
    st.integers(0, 10**5),
)
def test_widths_of_tokens(tokens: list[tuple[int, bool]], dim: int, widths: tuple[int, ...], more: int) -> None:
    """Distinct weights: what ties do is told apart."""
    weights = torch.tensor([w for w, _ in tokens], dtype=torch.float64) + torch.arange(len(tokens)) * 1e-3
    forced = [f for _, f in tokens]
    budget = sum(forced) * vector_bits(widths[0], dim) + more
    bits = water_filling(weights, torch.tensor(forced), budget, dim, widths).tolist()
    assert bits == greedy(weights.tolist(), forced, budget, dim, widths)
    assert sizes(bits, dim) <= budget
    assert all(b for b, f in zip(bits, forced, strict=True) if f)


@pytest.mark.parametrize("budget", [1500, 3000, 6000])
def test_no_other_widths_have_less_error(budget: int) -> None:
    """Of all that are no larger than what was spent."""
    weights, dim = torch.tensor([0.5, 1.0, 3.0, 40.0, 1000.0]), 64
    found = water_filling(weights, torch.zeros(5, dtype=torch.bool), budget, dim).tolist()
    best = min(
        (bits for bits in itertools.product((0, *WIDTHS), repeat=5) if sizes(bits, dim) <= sizes(found, dim)),
        key=lambda bits: sum(w * ERRORS[b] for w, b in zip(weights.tolist(), bits, strict=True)),
    )
    assert found == list(best)


def test_ties_go_to_the_smaller_position() -> None:
    bits = water_filling(torch.ones(2, 5), torch.zeros(2, 5, dtype=torch.bool), 7 * vector_bits(2, 64), 64)
    assert bits.tolist() == [[2] * 5, [2, 2, 0, 0, 0]]


@pytest.mark.parametrize("width", [2, 3, 4])
def test_the_errors_are_those_of_the_codes(width: int) -> None:
    x = torch.randn(2000, 128, generator=torch.Generator().manual_seed(width))
    lost = turboquant(width, 1, 0).lose(x, x)[0]
    assert float((lost - x).square().mean()) == pytest.approx(ERRORS[width], rel=0.06)


@quick
@given(st.data())
def test_widths_of_layers(data: st.DataObject) -> None:
    layers, pairs = data.draw(st.integers(1, 4)), [(2, 2), (4, 2), (3, 3), (4, 4)]
    errors = [dict(zip(pairs, data.draw(st.permutations(range(layer, layer + 4))), strict=True))
              for layer in range(layers)]  # fmt: skip
    mean = data.draw(st.sampled_from([2, 2.5, 3, 10 / 3, 4, 16]))
    found = bits_of_layers(errors, mean)

    def total(chosen: Sequence[Pair]) -> float:
        return sum(errors[layer][pair] for layer, pair in enumerate(chosen))

    fitting = [c for c in itertools.product(pairs, repeat=layers) if sum(map(sum, c)) <= 2 * mean * layers + 1e-9]
    assert tuple(found) in fitting
    assert total(found) == min(map(total, fitting))


def test_too_few_bits_for_the_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mean bits are 2.4, the least widths of all layers have a mean of 2.5"):
        bits_of_layers([{(2, 2): 1.0, (4, 4): 0.0}, {(2, 4): 1.0}], 2.4)


# -- RDKV ----------------------------------------------------------------------------------------------------


def expected(scores: Tensor, spec: MethodSpec, dim: int, widths: Sequence[int]) -> list[list[list[int]]]:
    """Bits of all tokens by layer and head."""
    n = scores.shape[-1]
    forced = [i < spec.sinks or i >= n - spec.recent for i in range(n)]
    budget = scores[..., 0].numel() * spec.budget(n) * (2 * dim + 16)
    flat = [(s, f) for head in scores.flatten(0, 1).tolist() for s, f in zip(head, forced, strict=True)]
    best = max(s for s, f in flat if not f)
    weights = [(best if f else s) ** 2 for s, f in flat]
    bits = greedy(weights, [f for _, f in flat], budget, dim, widths)
    return torch.tensor(bits).view(scores.shape).tolist()


@pytest.mark.parametrize("ratio", [0.05, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("widest", [4, 16])
def test_rdkv_spreads_the_bits_of_the_ratio(ratio: float, widest: int) -> None:
    options = (("chunk", 64), ("widest", widest))
    spec, context = MethodSpec("rdkv", "per_head", ratio, 2, 9, options), Context.random(SHAPE, 150)
    compressor = create(spec, SHAPE, 150)
    drive(compressor, context)
    kept, dim = compressor.select(), SHAPE.head_dim
    assert kept.bits is not None
    assert kept.bits.dtype == torch.uint8
    assert kept_bits(kept, 150).tolist() == expected(
        compressor.scorer.scores(), spec, dim, [w for w in WIDTHS if w <= widest]
    )
    spent = sum(vector_bits(b, dim) for b in kept.bits.tolist())
    most = SHAPE.layers * SHAPE.kv_heads * spec.budget(150) * vector_bits(2, dim)
    assert most - vector_bits(widest, dim) < spent <= most
    for layer in range(SHAPE.layers):
        bits = kept.layer_bits(layer)
        assert bits is not None
        assert bits.tolist() == [b for head in kept_bits(kept, 150)[layer].tolist() for b in head if b]


@pytest.mark.parametrize("widest", [0, 5, 32])
def test_widths_that_do_not_exist_are_refused(widest: int) -> None:
    with pytest.raises(MethodError, match=f"'widest' must be one of 2, 3, 4, 16, got {widest}"):
        validate(MethodSpec("rdkv", "per_head", options=(("widest", widest),)))


def test_a_context_within_the_forced_tokens_gets_no_widths() -> None:
    """No score was seen; the page format decides."""
    kept = create(MethodSpec("rdkv", "per_head"), SHAPE, 30).select()
    assert kept.bits is None
    assert kept.layer_bits(0) is None
    assert heads_of(kept) == [[list(range(30))] * SHAPE.kv_heads] * SHAPE.layers
