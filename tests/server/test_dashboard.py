"""The Grafana dashboard names every metric of ours, and nothing that is not there."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from server.audit import CHECKS, MISMATCHES, SKIPPED
from vericache.engine.metrics import METRICS

DASHBOARD = json.loads((Path(__file__).parents[2] / "deploy" / "grafana" / "vericache.json").read_text())
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_sum", "_count", "_bucket")}


def series() -> dict[str, tuple[str, set[str]]]:
    """Series name on the wire -> metric, labels."""
    found = {}
    for name, metric in METRICS.items():
        for suffix in SUFFIXES[metric.kind]:
            extra = {"le"} if suffix == "_bucket" else set()
            found[name + suffix] = (
                name,
                {"model_name", "engine"} | extra | ({metric.label} if metric.label else set()),
            )
    for counter in (CHECKS, MISMATCHES, SKIPPED):
        found[f"{counter._name}_total"] = (counter._name, set(counter._labelnames))
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def filled_in(expression: str) -> str:
    """As Grafana sends it."""
    for variable, value in (("$__rate_interval", "1m"), ("$model_name", ".*"), ("$engine", ".*")):
        expression = expression.replace(variable, value)
    assert "$" not in expression
    return expression


def nodes(node: Any) -> Iterator[Any]:
    yield node
    for name in ("expr", "lhs", "rhs", "args", "vector_selector"):
        child = getattr(node, name, None)
        for each in child if isinstance(child, list) else [child] if child is not None else []:
            yield from nodes(each)


def selectors(expression: str) -> list[Any]:
    tree = promql_parser.parse(filled_in(expression))
    return [node for node in nodes(tree) if isinstance(node, promql_parser.VectorSelector)]


def test_every_metric_is_shown_and_exists() -> None:
    known = series()
    used = {selector.name for expression in expressions() for selector in selectors(expression)}
    assert used <= set(known)
    assert {known[name][0] for name in used} == {metric for metric, _ in known.values()}


@pytest.mark.parametrize("expression", expressions())
def test_labels_exist_and_variables_are_used(expression: str) -> None:
    known = series()
    tree = promql_parser.parse(filled_in(expression))
    grouped = {
        label
        for node in nodes(tree)
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None
        for label in node.modifier.labels
    }
    for selector in selectors(expression):
        _, labels = known[selector.name]
        matched = {matcher.name for matcher in selector.matchers.matchers}
        assert matched == labels & {"model_name", "engine"}
    assert grouped <= {label for selector in selectors(expression) for label in known[selector.name][1]}


def test_denominators_are_guarded_and_no_traffic_is_said() -> None:
    for expression in expressions():
        assert ("/" in expression) == ("> 0)" in expression), expression
    for panel in panels():
        assert panel["fieldConfig"]["defaults"]["noValue"] == "No traffic"
        assert panel["datasource"]["uid"] == "${datasource}"


def test_descriptions_name_the_metrics() -> None:
    known = series()
    for panel in panels():
        for target in panel["targets"]:
            for selector in selectors(target["expr"]):
                assert known[selector.name][0] in panel["description"]


def test_it_can_be_provisioned() -> None:
    assert DASHBOARD["id"] is None
    assert DASHBOARD["uid"] == "vericache"
    assert [v["name"] for v in DASHBOARD["templating"]["list"]] == ["datasource", "model_name", "engine"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    places = [tuple(panel["gridPos"].values()) for panel in DASHBOARD["panels"]]
    assert len(places) == len(set(places))
    assert all(x + w <= 24 for _, w, x, _ in places)
