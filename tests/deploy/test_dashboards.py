"""The dashboards name every metric of ours, and nothing that is not there (public fault 29)."""

import re

import pytest

from deploy import dashboards
from deploy.helm import CHART
from tests.deploy.promql import DASHBOARDS, Used, exported, labels_named, panels, selectors, shown
from vericache.engine.metrics import METRICS

VARIABLES = ["job", "model_name", "instance", "engine"]


def test_the_files_are_what_the_module_says() -> None:
    assert sorted(DASHBOARDS) == sorted(dashboards.DASHBOARDS)
    for uid in DASHBOARDS:
        file = CHART / "files" / "dashboards" / f"{uid}.json"
        assert file.read_text() == dashboards.text(uid), "run `python -m deploy.dashboards`"


def test_there_is_one_copy() -> None:
    """The chart holds them, since Helm reads no file outside of it."""
    assert (CHART.parents[1] / "grafana" / "dashboards").resolve() == CHART / "files" / "dashboards"
    assert (CHART.parents[1] / "prometheus" / "rules").resolve() == CHART / "files" / "rules"


def test_every_metric_of_ours_is_shown_and_all_that_is_shown_exists() -> None:
    known = exported()
    used = {selector.name for each in shown() for selector in selectors(each.expression)}
    assert used <= set(known)
    ours = {series.metric for name, series in known.items() if name.startswith("vericache_")}
    assert ours >= set(METRICS)
    assert {known[name].metric for name in used} >= ours


def test_vllms_own_names_are_read_from_its_source() -> None:
    """The few renamed ones that broke others' dashboards."""
    known = exported()
    assert {"vllm:kv_cache_usage_perc", "vllm:request_time_per_output_token_seconds_bucket"} <= set(known)
    assert not {"vllm:gpu_cache_usage_perc", "vllm:time_per_output_token_seconds_bucket"} & set(known)
    assert known["vllm:request_success_total"].labels == {"job", "instance", "model_name", "engine", "finished_reason"}


@pytest.mark.parametrize("used", shown(), ids=lambda used: used.where)
def test_labels_exist_and_variables_are_used(used: Used) -> None:
    known = exported()
    found = selectors(used.expression)
    assert found
    for selector in found:
        labels = known[selector.name].labels
        matched = {matcher.name for matcher in selector.matchers.matchers}
        assert matched == labels & set(VARIABLES)
    assert labels_named(used.expression) <= {label for s in found for label in known[s.name].labels}
    for label in re.findall(r"\{\{(\w+)\}\}", used.where):
        assert label in labels_named(used.expression), "the legend names a label that is summed away"


def test_rates_follow_the_zoom() -> None:
    for each in shown():
        assert set(re.findall(r"\[(.+?)\]", each.expression)) <= {"$__rate_interval"}, each


def test_denominators_are_guarded_and_no_traffic_is_said() -> None:
    """Public fault 29: no traffic is not NaN."""
    for each in shown():
        assert ("/" in each.expression) == ("> 0)" in each.expression), each
    for uid in DASHBOARDS:
        for panel in panels(uid):
            assert panel["fieldConfig"]["defaults"]["noValue"] == "No traffic"
            matches = {m["options"]["match"] for m in panel["fieldConfig"]["defaults"]["mappings"]}
            assert matches == {"nan", "null"}
            assert panel["datasource"]["uid"] == "${datasource}"


def test_descriptions_name_the_metrics() -> None:
    known = exported()
    for uid in DASHBOARDS:
        for panel in panels(uid):
            for target in panel["targets"]:
                for selector in selectors(target["expr"]):
                    assert known[selector.name].metric in panel["description"]


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_they_can_be_provisioned(uid: str) -> None:
    dashboard = DASHBOARDS[uid]
    assert dashboard["id"] is None
    assert dashboard["uid"] == uid
    variables = dashboard["templating"]["list"]
    assert [v["name"] for v in variables] == ["datasource", *VARIABLES]
    for variable in variables[1:]:
        (series,) = re.findall(r"label_values\((\w+)", variable["query"])
        assert variable["name"] in exported()[series].labels
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        area = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not area & taken
        assert place["x"] + place["w"] <= 24
        taken |= area
