"""Without a draft arena VeriCache is plain vLLM, and says why."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm import SamplingParams

from benchmarks.engine import summaries, tokens
from tests.engine.conftest import OUTPUT_TOKENS, LiveGroup
from tests.engine.harness import Harness
from vericache.engine import worker as worker_module
from vericache.engine.metrics import FALLBACKS
from vericache.engine.observe import gauges, snapshot, step_stats
from vericache.engine.share import Facts, choose
from vericache.store.host import HostStore

GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)


@pytest.fixture
def bare(folder: Path, _live: LiveGroup, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    def refused(*args: object) -> None:
        raise AssertionError("there is no host store without an arena")

    monkeypatch.setattr(HostStore, "__init__", refused)
    engine = _live.engine("small", folder, mode="auto", arena_fraction=0)
    yield engine
    engine.assert_at_rest()


def test_tokens_are_those_of_stock_vllm(
    bare: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]]
) -> None:
    outputs = bare.generate(list(texts.values()), GREEDY)
    assert dict(zip(texts, tokens(outputs), strict=True)) == stock
    for summary in summaries(outputs):
        assert summary["mode"] == "resident"
        assert "there is no memory to draft in" in summary["reason"]


def test_nothing_of_ours_is_there(bare: Harness) -> None:
    assert bare.worker is None
    layers = bare.scheduler.vllm_config.compilation_config.static_forward_context
    assert all(layer.impl.draft is None for layer in layers.values())
    # All of the memory for KV is vLLM's.
    plan, config = bare.coordinator.plan, bare.scheduler.vllm_config.cache_config
    assert (plan.arena_pages, plan.host_pages) == (0, 0)
    assert plan.num_blocks == config.kv_cache_memory_bytes // plan.block_bytes


def test_a_request_that_asks_to_draft_is_a_plain_row(
    bare: Harness, texts: dict[str, list[int]], stock: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[tuple[str, str]] = []
    count = bare.coordinator.stats.telemetry.count

    def counting(name: str, amount: float = 1, label: str = "") -> None:
        counted.append((name, label))
        count(name, amount, label)

    monkeypatch.setattr(bare.coordinator.stats.telemetry, "count", counting)
    params = SamplingParams(
        temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, extra_args={"vericache_mode": "draft"}
    )
    (output,) = bare.generate([texts["summarise"]], params)
    assert tokens([output]) == [stock["summarise"]]
    assert "arena_fraction" in summaries([output])[0]["reason"]
    assert counted == [("vericache_fallbacks", "no_arena")]
    assert "no_arena" in FALLBACKS


def test_the_status_page_shows_the_share(bare: Harness) -> None:
    assert snapshot(bare.coordinator)["arena"] == {"fraction": 0, "why": "set by arena_fraction"}
    assert gauges(bare.coordinator)["vericache_arena_capacity_bytes"][""] == 0


def test_no_figures_are_sent_in_a_step_in_which_nothing_is_new(bare: Harness) -> None:
    assert step_stats(bare.coordinator, wanted=True) is not None  # the first snapshot
    assert step_stats(bare.coordinator, wanted=True) is None
    bare.coordinator.stats.telemetry.count("vericache_fallbacks", label="no_arena")
    assert step_stats(bare.coordinator, wanted=True) is not None


def test_what_the_decision_is_told_of_an_engine(bare: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, of which only the bandwidths are made up."""
    worker = bare.core.model_executor.driver_worker.worker
    told: list[Facts] = []
    monkeypatch.setattr(worker_module, "fixed", lambda *_: None)
    monkeypatch.setattr(type(worker), "_bandwidths", lambda _: (4e12, 5e10))
    monkeypatch.setattr(
        worker_module, "choose", lambda settings, facts: (told.append(facts), choose(settings, facts))[1]
    )
    chosen = worker._choose_share(1 << 30)
    (facts,) = told
    plan, model = bare.coordinator.plan, bare.scheduler.vllm_config.model_config
    assert facts.token == plan.block_bytes / plan.block_tokens
    assert facts.packed == plan.packed_share
    assert facts.weights == sum(p.nbytes for p in bare.runner.get_model().parameters())
    assert (facts.memory, facts.longest) == (1 << 30, model.max_model_len)
    assert (facts.bandwidth, facts.link) == (4e12, 5e10)
    assert 0 <= chosen.fraction < 1
    assert "for requests of 512 tokens" in chosen.why
