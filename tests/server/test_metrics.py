"""The metrics' own arithmetic, and that the docs name what there is."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

import vericache
from server.audit import CHECKS, MISMATCHES, SKIPPED
from vericache.certified.decided import Decided
from vericache.engine.metrics import FALLBACKS, METRICS, PROMOTIONS, PromMetrics, Stats, Telemetry

AUDIT = (CHECKS, MISMATCHES, SKIPPED)
DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def step(drafted: int, accepted: int, gauge: float) -> Stats:
    telemetry = Telemetry()
    telemetry.verified(drafted, accepted)
    telemetry.count("vericache_link_bytes", 100, "to_device")
    return telemetry.take({"vericache_arena_bytes": {"": gauge}})


def test_what_was_taken_is_not_taken_again() -> None:
    telemetry = Telemetry()
    telemetry.verified(4, 4)
    assert telemetry.take({}).data["counts"]["vericache_rejected_rounds"] == {"": 0}
    assert telemetry.take({}).data == {"counts": {}, "samples": {}, "gauges": {}, "status": None}


def test_steps_add_up() -> None:
    total = Stats().aggregate(step(5, 5, 1)).aggregate(step(5, 2, 7))
    assert total.data["counts"]["vericache_rounds"] == {"": 2}
    assert total.data["counts"]["vericache_rejected_rounds"] == {"": 1}
    assert total.data["counts"]["vericache_link_bytes"] == {"to_device": 200}
    assert total.data["samples"]["vericache_accepted_tokens_per_verify"] == {"": [5, 2]}
    assert total.data["gauges"] == {"vericache_arena_bytes": {"": 7}}
    assert total.reduce() == {"rounds": 2, "acceptance length": 4.5, "link MB": 0.0}
    assert Stats().is_empty()
    assert Telemetry().take({}).reduce() == {"rounds": 0}


def test_errors_are_told_apart_by_what_is_certified() -> None:
    telemetry = Telemetry()
    telemetry.certified(Decided(2, certificates=(0.1,), measured=(0.01, 0.02)), "output")
    first = telemetry.take({})
    telemetry.certified(Decided(2, certificates=(0.2,)), "denominator")
    total = Stats().aggregate(first).aggregate(telemetry.take({}))
    assert total.data["counts"]["vericache_certified_tokens"] == {"output": 1, "denominator": 1}
    assert total.data["samples"]["vericache_certificate"] == {"output": [0.1], "denominator": [0.2]}
    assert total.data["samples"]["vericache_certified_error"] == {"output": [0.01, 0.02]}


def test_the_docs_name_every_metric_and_no_other() -> None:
    rows = re.findall(r"^\| `(vericache_\w+)` \| (\w+) \| (?:`(\w+)`)? *\| (.+) \|$", DOCS.read_text(), re.MULTILINE)
    assert {name: (kind, label or None, text) for name, kind, label, text in rows} == {
        **{name: (m.kind, m.label, m.help) for name, m in METRICS.items()},
        **{c._name: ("counter", next(iter(c._labelnames[1:]), None), c._documentation) for c in AUDIT},
    }


def test_names_follow_prometheus_conventions() -> None:
    for name, metric in METRICS.items():
        assert re.fullmatch(r"vericache_[a-z_]+", name)
        assert not name.endswith(("_total", "_count", "_sum", "_bucket"))
        assert (metric.kind == "histogram") == bool(metric.buckets)
        assert metric.help.endswith(".")
        assert metric.kind != "counter" or metric.label is None or "" not in metric.values, "a label of nothing"


def test_reasons_are_those_in_the_code() -> None:
    """Where a request is given up or never drafts, the reason is a word in the source."""
    folder = Path(vericache.__file__).parent / "engine"
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    given = re.findall(r'(?:abandon|_leave)\(\w+, "(\w+)"\)', source)
    given += re.findall(r'return "(\w+)"', (folder / "demotion.py").read_text())
    assert set(PROMOTIONS) == set(given), "list it in PROMOTIONS, so that the counter is there before the first one"
    assert set(FALLBACKS) == set(re.findall(r'Reason\("(\w+)"', source)), "list it in FALLBACKS, for the same reason"


def test_counters_are_there_before_anything_happened() -> None:
    """A counter that appears with its first event shows no increase."""
    registry = CollectorRegistry()

    def gauge(multiprocess_mode: str, **rest: Any) -> Gauge:
        return Gauge(registry=registry, **rest)

    types = {Counter: partial(Counter, registry=registry), Histogram: partial(Histogram, registry=registry)}
    vllm: Any = SimpleNamespace(kv_transfer_config=None)
    PromMetrics(vllm, {**types, Gauge: gauge}, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    text = generate_latest(registry).decode()
    for engine in "01":
        ours = f'engine="{engine}",model_name="m"'
        assert f"vericache_rounds_total{{{ours}}} 0.0" in text
        assert f"vericache_reload_seconds_count{{{ours}}} 0.0" in text
        assert f'vericache_certificate_count{{bound="output",{ours}}} 0.0' in text
        assert f'vericache_promotions_total{{{ours},reason="reload_failed"}} 0.0' in text
        assert f"vericache_arena_bytes{{{ours}}}" not in text
