"""Every registered method over shapes, lengths and ratios, in every count mode and selector it allows. A new method
joins by registering."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from compressors import METHODS, Compressor, Kept, MethodError, MethodSpec, Scorer, Shape, create
from compressors.budget import forced_mask
from tests.tensor.compressor_runs import Context, check_structure, drive, equipped, heads_of, rotary

WINDOW = MethodSpec("").recent
LENGTHS = [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 512]
RATIOS = [1.0, 0.9, 0.5, 0.25, 0.1, 0.05, 0.02]
HEADS = {"GQA": (2, 6), "MHA": (3, 3), "MQA": (1, 4)}
ROW_TOKENS = 100  # scoring rows so short that a method which splits the context has to split it


def shape_of(heads: str) -> Shape:
    return equipped(Shape(2, *HEADS[heads], 16, rotary(16, positions=2048)))


def modes(method: type[Scorer]) -> list[tuple[str, str]]:
    """Every count mode with the best tokens, every other selector with the method's own counts."""
    return [(counts, "top") for counts in method.counts] + [
        (method.default_counts, selector) for selector in method.selectors if selector != "top"
    ]


def scored(name: str, heads: str, n: int, alike: bool = False) -> Scorer:
    """The method's scorer after its scoring pass over a random context, or one whose tokens are all alike."""
    method, shape = METHODS[name], shape_of(heads)
    context = Context.random(shape, n, seed=n)
    if alike:
        for tensor in (context.queries, context.keys, context.values):
            tensor[:] = tensor[:, :, :1]
    spec = method.fit(MethodSpec(name, method.default_counts, 0.5), ROW_TOKENS)
    compressor = create(spec, shape, n)
    drive(compressor, context)
    return compressor.scorer


def check(scorer: Scorer, counts: str, selector: str, ratio: float) -> None:
    spec, shape, n = (
        replace(scorer.spec, counts=counts, selector=selector, ratio=ratio),
        scorer.shape,
        scorer.num_tokens,
    )
    compressor = Compressor(scorer, spec)
    kept, again = compressor.select(), compressor.select()
    check_structure(kept, spec, shape, n)
    assert kept.counts.min() >= 1
    assert torch.equal(kept.counts, again.counts)
    assert torch.equal(kept.positions, again.positions)
    assert min(n, spec.least) <= compressor.budget <= n
    if spec.least < compressor.budget < n:
        assert abs(compressor.budget - ratio * n) <= 0.5
    if selector == "top" and n > spec.forced:
        best_are_kept(scorer, kept)
    if selector != "top":
        assert kept.inclusion is not None
        assert ((kept.inclusion > 0) & (kept.inclusion <= 1)).all()


def best_are_kept(scorer: Scorer, kept: Kept) -> None:
    """No token that is left goes before one that is kept: by score, and of equal ones by position."""
    spec, n = scorer.spec, scorer.num_tokens
    scores = scorer.scores()
    assert torch.isfinite(scores).all()
    scores = scores.masked_fill(forced_mask(n, spec.sinks, spec.recent), float("inf"))
    mask = torch.zeros_like(scores, dtype=torch.bool)
    for layer, heads in enumerate(heads_of(kept)):
        for head, positions in enumerate(heads):
            mask[layer, head, positions] = True
    last = scores.masked_fill(~mask, float("inf")).amin(-1, keepdim=True)
    assert not (~mask & (scores > last)).any()
    tie, position = scores == last, torch.arange(n)
    behind = torch.where(tie & mask, position, -1).amax(-1)
    before = torch.where(tie & ~mask, position, n).amin(-1)
    assert (behind < before).all()


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", METHODS)
def test_every_ratio_count_mode_and_selector(name: str, heads: str, n: int) -> None:
    scorer = scored(name, heads, n)
    for counts, selector in modes(METHODS[name]):
        for ratio in RATIOS:
            check(scorer, counts, selector, ratio)


@pytest.mark.parametrize("name", METHODS)
def test_tokens_that_are_all_alike(name: str) -> None:
    """Nearly every decision is a tie."""
    scorer = scored(name, "GQA", 80, alike=True)
    for counts, selector in modes(METHODS[name]):
        for ratio in (0.9, 0.6):
            check(scorer, counts, selector, ratio)


@pytest.mark.parametrize("name", METHODS)
def test_a_context_of_nothing_is_an_error(name: str) -> None:
    with pytest.raises(MethodError, match=f"{name} was given a context of 0 tokens, expected at least 1"):
        create(MethodSpec(name, METHODS[name].default_counts), shape_of("GQA"), 0)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if "uniform" in method.counts])
def test_a_larger_ratio_keeps_what_a_smaller_one_keeps(name: str) -> None:
    scorer = scored(name, "GQA", 512)
    found = []
    for ratio in sorted(RATIOS):
        kept = Compressor(scorer, replace(scorer.spec, counts="uniform", ratio=ratio)).select()
        found.append([set(head) for layer in heads_of(kept) for head in layer])
    for less, more in pairwise(found):
        assert all(a <= b for a, b in zip(less, more, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_parts_of_scores_that_hold_for_other_contexts(name: str) -> None:
    """They cover the context in order, one for each probe, and can be handed on; none depends on a question."""
    method, n = METHODS[name], 250
    spec = method.fit(MethodSpec(name, method.default_counts, 0.5), ROW_TOKENS)
    texts = {key: [1, 2] for key in [*method.texts, "turn"]}
    found = [method.own_part(spec, i, n) for i in range(len(method.probes(range(n), spec, texts)))]
    parts = [part for part in found if part is not None]
    if not parts:
        return
    assert not method.query_aware
    assert [*parts] == found
    assert [start for start, _ in parts] == [0, *(end for _, end in parts[:-1])]
    assert parts[-1][1] == n
    first, second = scored(name, "GQA", n), create(spec, shape_of("GQA"), n).scorer
    for start, end in parts:
        second.adopt(start, end, first.part(start, end))
    assert torch.equal(second.scores(), first.scores())
