"""The measurements of ``benchmarks.certified`` over a small random model's cache."""

import pytest
import torch
from torch import Tensor

from benchmarks.batched_reference import Attend
from benchmarks.certified import _decision_lines, combined
from benchmarks.certified_model import Context, Recorded, thinned
from benchmarks.certified_quality import Methods
from benchmarks.certified_run import budget_errors, decisions
from tests.reference import Past, Row
from vericache.certified.attention import Policy
from vericache.certified.certificate import Bound, Target

LAYERS, HEADS, GROUP, DIM, TOKENS, STEPS = 2, 2, 2, 16, 160, 3


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def prompt() -> Recorded:
    keys, values = numbers(LAYERS, HEADS, TOKENS, DIM), numbers(LAYERS, HEADS, TOKENS, DIM, seed=1)
    queries = 2 * numbers(STEPS, LAYERS, HEADS, GROUP, DIM, seed=2)
    scores = torch.einsum("slhgd,lhnd->lhn", queries, keys).div(8).softmax(-1)
    context = Context(list(range(TOKENS)), Past(list(keys), list(values)), scores)
    tail = numbers(2, LAYERS, HEADS, STEPS, DIM, seed=3)
    return Recorded(context, queries, tail[0], tail[1])


def test_decisions_of_a_perfect_sketch_keep_their_promise(prompt: Recorded) -> None:
    row = decisions({"p": prompt}, 0.4, "perfect", 0.0, 0.2, count=STEPS, draws=20)
    assert row["queries"] == STEPS * LAYERS * HEADS * GROUP
    assert row["decisions"] == 20 * row["queries"]
    assert row["failed"] <= row["worst_layer"] <= 0.1
    assert 0 < row["fetched"] <= row["fetched_when_fetching"] <= 1


def test_decisions_about_the_output_keep_theirs(prompt: Recorded) -> None:
    rows = [decisions({"p": prompt}, 0.6, "perfect", 0.0, eps, STEPS, draws=6, bound="output") for eps in (0.5, 0.9)]
    for row in rows:
        assert row["queries"] == STEPS * LAYERS * HEADS * GROUP
        assert row["decisions"] == 6 * row["queries"]
        assert row["failed"] <= 0.1
    assert rows[0]["fetched"] > rows[1]["fetched"]


def test_a_stricter_epsilon_fetches_more(prompt: Recorded) -> None:
    strict, loose = (decisions({"p": prompt}, 0.4, "per_channel2", 1.0, e, STEPS, 1) for e in (0.01, 0.3))
    assert strict["fetched"] > loose["fetched"]
    assert strict["output"] < loose["output"]


def test_errors_shrink_with_the_budget(prompt: Recorded) -> None:
    """A Poisson sample stays a little below its budget, so only top-k keeps all of the whole one."""
    small, large, whole = (budget_errors({"p": prompt}, ratio, STEPS, draws=2) for ratio in (0.4, 0.8, 1.0))
    assert whole["top-k"]["p95"] < 1e-5
    for method in small:
        assert large[method]["mean"] < small[method]["mean"]


def test_a_prompt_can_be_thinned(prompt: Recorded) -> None:
    part = thinned(prompt, 2)
    assert part.context.scores.shape == (1, HEADS, TOKENS)
    torch.testing.assert_close(part.context.past.keys[0], prompt.context.past.keys[1])
    torch.testing.assert_close(part.queries[:, 0], prompt.queries[:, 1])


LENGTHS = [2, 3]  # of two rows behind tails of different lengths


def owns() -> list[Past]:
    return [
        Past(list(numbers(LAYERS, HEADS, n, DIM, seed=n)), list(numbers(LAYERS, HEADS, n, DIM, seed=9 + n)))
        for n in (3, 5)
    ]


def attended(attend: Attend) -> Tensor:
    count = sum(LENGTHS)
    query, key, value = numbers(HEADS * GROUP, count, DIM, seed=5), *numbers(2, HEADS, count, DIM, seed=6)
    return torch.stack([attend(layer, query, key, value, DIM**-0.5) for layer in range(LAYERS)])


def dense(context: Context) -> Attend:
    """Row by row."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        parts = zip(owns(), *(x.split(LENGTHS, 1) for x in (query, key, value)), strict=True)
        return torch.cat([_LayerRow(context, own, layer).attend(0, q, k, v, scale) for own, q, k, v in parts], 1)

    return attend


class _LayerRow(Row):
    def __init__(self, context: Context, own: Past, layer: int) -> None:
        pasts = [Past([past.keys[layer]], [past.values[layer]]) for past in (context.past, own)]
        super().__init__([0], context.past.length + own.length, pasts)


def test_certified_attention_is_dense_where_no_error_is_allowed(prompt: Recorded) -> None:
    methods = Methods(prompt.context, 0.4, Policy(Target(0.0), max_fetch=1.0), 0)
    exact = attended(dense(prompt.context))
    certified = attended(methods.attend(owns(), LENGTHS, fetching=True))
    torch.testing.assert_close(certified, exact, rtol=1e-4, atol=1e-5)
    assert 0 < methods.fetched_share() < 1
    alone = attended(methods.attend(owns(), LENGTHS, fetching=False))
    assert (alone - exact).norm() > 0.01 * exact.norm()


@pytest.mark.parametrize(("bound", "eps"), [("denominator", 0.3), ("output", 0.9)])
def test_steps_decided_together_are_those_decided_alone(prompt: Recorded, bound: Bound, eps: float) -> None:
    """Where none is excessive: a longer tail makes half of all tokens a little more."""
    alone, batched = (
        decisions({"p": prompt}, 0.5, "per_channel2", 0.3, eps, STEPS, 1, batch, bound) for batch in (1, STEPS)
    )
    assert batched == pytest.approx(alone)
    assert 0 < batched["fetched"] < 0.6


def test_a_table_says_what_failed() -> None:
    row = {
        "bound": "output", "sketch": "perfect", "z": 0.0, "eps": 0.1, "compression": 16, "prompts": ["p"], "layers": 3,
        "queries": 9, "decisions": 9, "failed": 0.0, "worst_layer": 0.0, "fetching": 1.0, "fetched": 0.5,
        "fetched_when_fetching": 0.5, "fallback": 0.1, "output": 0.01,
    }  # fmt: skip
    assert "a query's output is off by more than epsilon" in "\n".join(_decision_lines({"": row}))
    assert "a query's denominator is off" in "\n".join(_decision_lines({"": {**row, "bound": "denominator"}}))


def test_results_of_several_runs_become_one() -> None:
    first = {"machine": "a", "date": "1", "quality": {"needle": {"2048": {"questions": 1}}}}
    second = {"machine": "a", "date": "2", "quality": {"needle": {"4096": {"questions": 2}}}, "budget": {"8": {}}}
    merged = combined([first, second])
    assert merged["quality"]["needle"] == {"2048": {"questions": 1}, "4096": {"questions": 2}}
    assert (merged["machine"], merged["date"], merged["budget"]) == ("a", "2", {"8": {}})
