"""Expressions of dashboards and rules, taken apart; and the series that a server exports."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser
import yaml
from vllm.v1.metrics import loggers

from benchmarks.prometheus import filled_in
from deploy.helm import CHART
from server.audit import CHECKS, MISMATCHES, SKIPPED
from vericache.engine.metrics import METRICS

RULES = CHART / "files" / "rules" / "vericache.yaml"
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((CHART / "files/dashboards").glob("*.json"))}
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_sum", "_count", "_bucket")}
ENGINE = {"model_name", "engine"}
TARGET = {"job", "instance"}  # Prometheus adds these


class Series(NamedTuple):
    metric: str
    labels: set[str]


def _series(metric: str, kind: str, labels: set[str]) -> dict[str, Series]:
    extra = {"_bucket": {"le"}}
    return {metric + s: Series(metric, labels | TARGET | extra.get(s, set())) for s in SUFFIXES[kind]}


def exported() -> dict[str, Series]:
    """Series name on the wire -> metric and labels: ours from their definitions, vLLM's from its source."""
    found: dict[str, Series] = {}
    for name, metric in METRICS.items():
        found |= _series(name, metric.kind, ENGINE | ({metric.label} if metric.label else set()))
    for counter in (CHECKS, MISMATCHES, SKIPPED):
        found |= _series(counter._name, "counter", set(counter._labelnames))
    source = Path(loggers.__file__).read_text()
    for made in re.finditer(r'_(counter|gauge|histogram)_cls\(\s*name="(vllm:\w+)"((?:[^()]|\([^()]*\))*)\)', source):
        kind, name, rest = made.groups()
        found |= _series(name, kind, ENGINE | set(re.findall(r'labelnames \+ \["(\w+)"\]', rest)))
    return found


class Used(NamedTuple):
    where: str
    expression: str  # as Prometheus gets it


def panels(uid: str) -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARDS[uid]["panels"] if panel["type"] != "row"]


def shown() -> list[Used]:
    """Every expression of every dashboard."""
    return [
        Used(f"{panel['title']}: {target['legendFormat']}", target["expr"])
        for uid in DASHBOARDS
        for panel in panels(uid)
        for target in panel["targets"]
    ]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def nodes(node: Any) -> Iterator[Any]:
    yield node
    for name in ("expr", "lhs", "rhs", "args", "vector_selector"):
        child = getattr(node, name, None)
        for each in child if isinstance(child, list) else [child] if child is not None else []:
            yield from nodes(each)


def parsed(expression: str) -> list[Any]:
    return list(nodes(promql_parser.parse(filled_in(expression))))


def selectors(expression: str) -> list[Any]:
    return [node for node in parsed(expression) if isinstance(node, promql_parser.VectorSelector)]


def labels_named(expression: str) -> set[str]:
    """In aggregations and in the matching of two sides."""
    found: set[str] = set()
    for node in parsed(expression):
        modifier = getattr(node, "modifier", None)
        if isinstance(node, promql_parser.AggregateExpr) and modifier is not None:
            found |= set(modifier.labels)
        if isinstance(node, promql_parser.BinaryExpr) and modifier is not None and modifier.matching is not None:
            found |= set(modifier.matching.labels)
    return found
