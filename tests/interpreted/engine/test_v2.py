"""Draft-and-verify on vLLM's V2 runner gives the tokens of plain rows: in float32, and in bfloat16 on a GPU with
batch-invariant kernels."""

import pytest
import torch

from tests.interpreted.engine.v2_engine import SLOW, V2Engine, params
from vericache.engine.plan import StepPlan

EXACT = not torch.cuda.is_available()  # the drafts too; in bfloat16 draft attention rounds differently


def accepted(summaries: list[dict]) -> float:
    """Share of the drafts."""
    drafting = [s for s in summaries if s["mode"] == "draft"]
    return sum(s["accepted_tokens"] for s in drafting) / max(1, sum(s["draft_tokens"] for s in drafting))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_everything_kept_is_everything_accepted(engine: V2Engine, options: dict) -> None:
    """Positions, tails, noise and rewinding are right when no draft is rejected."""
    prompts = [engine.prompt(60, 1), engine.prompt(75, 2)]
    found = engine.same(prompts, params(2, **options), ratio=1.0)
    assert all(s["mode"] == "draft" for s in found)
    assert accepted(found) == 1.0 if EXACT else accepted(found) > 0.5
    assert [s["drafted_per_round"] for s in found] == [[4, 4, 2]] * 2 or not EXACT


@pytest.mark.parametrize("policy", ["staggered", pytest.param("lockstep", marks=SLOW)])
def test_rejected_drafts_leave_nothing_behind(engine: V2Engine, policy: str) -> None:
    """Half of the context on a random model: nearly every draft is rejected. A short request stays plain."""
    prompts = [engine.prompt(60, 3), engine.prompt(20, 4), engine.prompt(90, 5)]
    found = engine.same(prompts, params(3, 10), ratio=0.5, policy=policy)
    assert [s["mode"] for s in found] == ["draft", "resident", "draft"]
    assert accepted(found) < 1


@pytest.mark.parametrize("options", [pytest.param({"temperature": 0.7}, marks=SLOW)])
def test_reloads_without_what_is_kept(engine: V2Engine, options: dict) -> None:
    """The same tokens, fewer bytes over the link; the arena's part is copied beside the host's."""
    prompts = [engine.prompt(90, 16), engine.prompt(70, 17)]
    cost: dict[str, float] = {}
    for residual in ("on", "off"):
        before = engine.coordinator.stats.moved["Load"]
        found = engine.same(prompts, params(2, **options), ratio=0.5, residual_reload=residual)
        assert all(s["mode"] == "draft" for s in found)
        cost[residual] = (engine.coordinator.stats.moved["Load"] - before) / sum(s["rounds"] for s in found)
    assert cost["on"] < 0.7 * cost["off"]


@pytest.mark.parametrize("ratio", [pytest.param(0.5, marks=SLOW), 1.0])
def test_one_step_in_flight(one_step_engine: V2Engine, ratio: float) -> None:
    """All other tests have two: a verify row follows drafts that the host has not seen, and is followed by drafts."""
    prompts = [one_step_engine.prompt(60, 6), one_step_engine.prompt(50, 7)]
    found = one_step_engine.same(prompts, params(2, temperature=0.7), ratio=ratio)
    assert accepted(found) == 1.0 or ratio < 1 or not EXACT


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_no_step_goes_by_without_the_request(engine: V2Engine, ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify rows do not wait for the host to see the last draft, nor the next round for it to see the result."""
    rows: list[int] = []
    step = engine.coordinator.step

    def recording(*args: object) -> StepPlan:
        plan = step(*args)
        rows.append(len(plan.drafts) + len(plan.verifies))
        return plan

    monkeypatch.setattr(engine.coordinator, "step", recording)
    engine.configure(ratio=ratio)
    engine.generate([engine.prompt(60, 13)], params(1, 24))
    first = rows.index(1)
    assert rows[first : first + 20] == [1] * 20, "four rounds, none of which can be the last"


@pytest.mark.parametrize("compressor", ["snapkv", pytest.param("random", marks=SLOW)])
def test_scoring_rows_and_uneven_heads(engine: V2Engine, compressor: str) -> None:
    options = {"compressor_options": {"window": 8, "kernel": 3}} if compressor == "snapkv" else {}
    found = engine.same(
        [engine.prompt(100, 8), engine.prompt(64, 9)], params(2, 8), ratio=0.6, compressor=compressor,
        counts="per_head", **options,
    )  # fmt: skip
    assert all(s["mode"] == "draft" and s["compressed_fraction"] < 1 for s in found)


def test_compressed_anew_when_the_tail_is_long(engine: V2Engine) -> None:
    found = engine.same([engine.prompt(60, 10)], params(1, 50), ratio=1.0, draft_length=8)
    assert found[0]["mode"] == "draft"
    assert accepted(found) == 1.0 or not EXACT


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}, id="penalties"),
        pytest.param({"logprobs": 3}, id="logprobs"),
        pytest.param({"temperature": 0.9, "min_p": 0.05, "top_k": 20}, marks=SLOW, id="min-p"),
        pytest.param({"logit_bias": {5: 4.0, 9: -3.0}, "min_tokens": 5}, marks=SLOW, id="bias"),
    ],
)
def test_request_features(engine: V2Engine, options: dict) -> None:
    """Verify rows pass through vLLM's own sampler, with the history each token would have had."""
    found = engine.same([engine.prompt(60, 11), engine.prompt(70, 12)], params(2, 12, **options), ratio=1.0)
    assert accepted(found) == 1.0 if EXACT else accepted(found) > 0.3


def test_more_requests_than_seats(engine: V2Engine) -> None:
    """One row state is kept free for scoring rows."""
    prompts = [engine.prompt(45 + 5 * i, 20 + i) for i in range(7)]
    found = engine.same(prompts, params(7, 6), ratio=0.8)
    assert all(s["mode"] == "draft" for s in found)


def test_abort_in_every_state(engine: V2Engine) -> None:
    """What a request held while its reload was under way is used again at once."""
    engine.configure(ratio=0.8, link_bytes_per_second=5e5)  # a reload takes several iterations
    states = set()
    for steps in range(2, 12):
        for i in range(2):
            prompt = {"prompt_token_ids": engine.prompt(60, 40 + i)}
            engine.llm.llm_engine.add_request(f"r{steps}-{i}", prompt, params(1, 30)[0])
        for _ in range(steps):
            engine.llm.llm_engine.step()
        states |= {t.state.name for t in engine.coordinator.planner.tracks.values()}
        engine.llm.llm_engine.abort_request(list(engine.scheduler.requests), internal=True)
        engine.at_rest()
    assert {"DRAFTING", "LOADING"} <= states
    engine.same([engine.prompt(60, 40)], params(1, 8), ratio=0.8)
