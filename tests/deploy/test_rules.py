"""Recording rules and alerts: Prometheus' own checks and unit tests, and that they name what there is."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.helm import CHART
from tests.deploy.charting import one, rendered
from tests.deploy.features import FEATURES
from tests.deploy.promql import RULES, exported, labels_named, rules, selectors

ROOT = Path(__file__).parents[2]
UNIT_TESTS = ROOT / "deploy" / "prometheus" / "tests" / "vericache.yaml"
RECORDED = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}
ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")


def promtool(*arguments: object) -> str:
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_promtool_takes_the_rules() -> None:
    assert f"{len(RECORDED) + len(ALERTS)} rules found" in promtool("check", "rules", RULES)


@needs_promtool
def test_promtool_unit_tests() -> None:
    assert "SUCCESS" in promtool("test", "rules", UNIT_TESTS)


@needs_promtool
def test_promtool_takes_the_configuration() -> None:
    promtool("check", "config", "--syntax-only", ROOT / "deploy" / "prometheus" / "prometheus.yml")


def test_every_rule_has_unit_tests() -> None:
    """Each alert once fires and once does not; each recorded series has a value, and none without traffic."""
    text = UNIT_TESTS.read_text()
    tests = yaml.safe_load(text)["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", ())]
    for name in ALERTS:
        fired = {bool(case["exp_alerts"]) for case in cases if case["alertname"] == name}
        assert fired == {True, False}, name
    asked = {re.split(r"\{", case["expr"])[0] for test in tests for case in test.get("promql_expr_test", ())}
    assert asked == {*RECORDED, "ALERTS"}


def test_rules_name_series_and_labels_that_exist() -> None:
    """Public fault 29, for alerts: one on a metric that is gone never fires."""
    known = exported()
    labels = {name: set.union(*(known[s.name].labels for s in selectors(text))) for name, text in RECORDED.items()}
    for rule in rules():
        everywhere: set[str] = set()
        for selector in selectors(rule["expr"]):
            assert selector.name in known or selector.name in RECORDED
            available = labels.get(selector.name) or known[selector.name].labels
            assert {matcher.name for matcher in selector.matchers.matchers} <= available
            everywhere |= available
        assert labels_named(rule["expr"]) <= everywhere


def test_divisions_are_guarded() -> None:
    for text in RECORDED.values():
        assert ("/" in text) == ("> 0)" in text), text


@pytest.mark.parametrize("name", ALERTS)
def test_alerts_are_explained(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("critical", "warning")
    document, _, anchor = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / document).read_text(), re.MULTILINE)
    assert anchor in [heading.lower() for heading in headings]
    used = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
    assert used <= {"instance", "model_name"}  # every series of ours has them


def test_operations_explains_no_other_alert() -> None:
    found = re.findall(r"^### (VeriCache\w+)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    assert sorted(found) == sorted(ALERTS)


def test_the_chart_ships_them_unchanged() -> None:
    """Also what Helm would take for its own templates: {{ $labels.instance }}."""
    spec = one(rendered(FEATURES["rules"]), "PrometheusRule")["spec"]
    assert spec == yaml.safe_load((CHART / "files" / "rules" / "vericache.yaml").read_text())


def test_the_chart_ships_the_dashboards_unchanged() -> None:
    maps = [each for each in rendered(FEATURES["dashboards"]) if "grafana_dashboard" in each["metadata"]["labels"]]
    shipped = {name: text for each in maps for name, text in each["data"].items()}
    files = sorted((CHART / "files" / "dashboards").glob("*.json"))
    assert shipped == {path.name: path.read_text() for path in files}
    assert len(maps) == len(files)
