"""A real Prometheus scrapes a live server under load: every expression of every dashboard, rule and alert has data
(public fault 29)."""

import math
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from benchmarks.prometheus import LivePrometheus, filled_in
from benchmarks.server import LiveServer
from tests.deploy.promql import RULES, labels_named, rules, selectors, shown
from tests.engine.commands.asking import CERTIFIED, OFF, PERFECT, completion

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus")
INTERVAL = "5m"  # longer than the load: nothing that happened is forgotten


@pytest.fixture(scope="module")
def prometheus(
    server: LiveServer, client: OpenAI, texts: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LivePrometheus]:
    """After load: drafting requests, plain ones, sampled ones, certified ones, a repeated prompt; then the rules were
    evaluated."""
    watching = LivePrometheus(server, tmp_path_factory.mktemp("prometheus"), RULES)
    try:
        watching.wait_for('up{job="vericache"}', 1)  # a rate needs a sample from before the load
        with ThreadPoolExecutor() as pool:
            for _ in range(2):
                asked = [
                    pool.submit(completion, client, prompt, more, options)
                    for prompt in (texts["summarise"], texts["extract_json"])
                    for more, options in (
                        ({}, PERFECT),
                        ({"temperature": 0.8}, {}),
                        ({}, OFF),
                        ({"max_tokens": 4}, CERTIFIED),
                        ({"max_tokens": 4}, {**CERTIFIED, "vericache_bound": "output"}),
                    )
                ]
                for each in asked:
                    each.result()
        rounds = server.series()["vericache_rounds_total"]
        watching.wait_for("sum(vericache_rounds_total)", rounds)
        deadline = time.monotonic() + 30
        while not watching.query("engine:vericache_acceptance_length:rate5m") and time.monotonic() < deadline:
            time.sleep(0.5)
        yield watching
    finally:
        watching.close()


def test_every_expression_of_the_dashboards_has_data(prometheus: LivePrometheus) -> None:
    found = {each: prometheus.query(filled_in(each.expression, INTERVAL)) for each in shown()}
    assert [each for each, series in found.items() if not series] == []
    for each, series in found.items():
        assert all(math.isfinite(value) for _, value in series), each
        for labels, _ in series:
            assert set(labels) == labels_by(each.expression), each


def labels_by(expression: str) -> set[str]:
    """What is left after the outermost aggregation; the buckets' label goes into the quantile."""
    return labels_named(expression) - {"le"}


def test_every_rule_is_evaluated_and_recorded(prometheus: LivePrometheus) -> None:
    groups = prometheus.ask("rules")["groups"]
    health = {rule["name"]: (rule["health"], rule.get("lastError", "")) for g in groups for rule in g["rules"]}
    assert health == {rule.get("record") or rule["alert"]: ("ok", "") for rule in rules()}
    for rule in rules():
        if "record" in rule:
            series = prometheus.query(rule["record"])
            assert series, rule["record"]
            assert all({"instance", "model_name", "engine"} <= set(labels) for labels, _ in series)
            assert all(math.isfinite(value) for _, value in series)


@pytest.mark.parametrize("alert", [rule for rule in rules() if "alert" in rule], ids=lambda rule: rule["alert"])
def test_every_alert_looks_at_data(prometheus: LivePrometheus, alert: Mapping[str, str]) -> None:
    """What it compares is there, with the labels it selects and tells. Those about time depend on the machine."""
    fires = prometheus.query(alert["expr"])
    if alert["alert"] in ("VeriCacheAuditMismatch", "VeriCacheCopiesFail"):
        assert fires == []
    for selector in selectors(alert["expr"]):
        matchers = selector.matchers.matchers
        chosen = ", ".join(f'{m.name}{"=~" if "Re" in str(m.op) else "="}"{m.value}"' for m in matchers)
        series = prometheus.query(f"{selector.name}{{{chosen}}}")
        assert series, selector.name
        assert all({"instance", "model_name"} <= set(labels) for labels, _ in series)


def test_acceptance_length_is_vllms(prometheus: LivePrometheus, server: LiveServer) -> None:
    """1 + accepted / rounds, the verifier's token counted."""
    counted = server.series()
    accepted = counted["vericache_accepted_tokens_per_verify_sum"]
    expected = 1 + accepted / counted["vericache_accepted_tokens_per_verify_count"]
    name = "vericache_accepted_tokens_per_verify"
    ((_, value),) = prometheus.query(f"1 + sum({name}_sum) / sum({name}_count)")
    assert value == pytest.approx(expected)
    assert value > 1
