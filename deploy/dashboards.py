"""The Grafana dashboards: their panels, and what all panels have in common.

``python -m deploy.dashboards`` writes them as JSON into the chart, where ``deploy/grafana`` points to. An expression
holds ``$S`` where the template variables select series.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deploy.helm import CHART

FOLDER = CHART / "files" / "dashboards"
VARIABLES = {"job": "Job", "model_name": "Model", "instance": "Instance", "engine": "Engine"}
PRESENT = "vericache_rounds_total"  # there from the start, with all of the variables' labels
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24  # of Grafana's grid
HEIGHT = 8


@dataclass(frozen=True)
class Panel:
    """``queries``: legend -> expression. ``about``: the metrics' names are added to it."""

    title: str
    unit: str
    about: str
    queries: dict[str, str]
    kind: str = "timeseries"
    width: int = 8
    most: float | None = None


Rows = dict[str, list[Panel]]


def rate(metric: str, by: str = "") -> str:
    over = f" by ({by}) " if by else ""
    return f"sum{over}(rate({metric}{{$S}}[$__rate_interval]))"


def ratio(above: str, below: str) -> str:
    """No series rather than a division by zero: Grafana says "No traffic"."""
    return f"{above} / ({below} > 0)"


def mean(histogram: str) -> str:
    return ratio(rate(f"{histogram}_sum"), rate(f"{histogram}_count"))


def quantiles(histogram: str, *wanted: float) -> dict[str, str]:
    return quantiles_by(histogram, "", *wanted)


def quantiles_by(histogram: str, label: str, *wanted: float) -> dict[str, str]:
    buckets = rate(f"{histogram}_bucket", f"le, {label}" if label else "le")
    return {f"p{round(q * 100)}": f"histogram_quantile({q}, {buckets})" for q in wanted}


def used(what: str) -> dict[str, str]:
    return {"in use": ratio(f"sum({what}_bytes{{$S}})", f"sum({what}_capacity_bytes{{$S}})")}


ENGINE: Rows = {
    "Acceptance": [
        Panel(
            "Acceptance length", "short", "Tokens a round yields, the verifier's own token counted (as in vLLM).",
            {"tokens": "1 + " + mean("vericache_accepted_tokens_per_verify")}, "stat",
        ),
        Panel(
            "Accepted drafts per verify", "short", "Against the drafts a verify carried.",
            {
                **quantiles("vericache_accepted_tokens_per_verify", 0.5, 0.9),
                "drafted, mean": mean("vericache_draft_length"),
            },
        ),
        Panel(
            "Rounds", "ops", "Draft-and-verify rounds, and those in which a draft was rejected.",
            {"rounds": rate("vericache_rounds_total"), "with a rejection": rate("vericache_rejected_rounds_total")},
        ),
    ],
    "Host link": [
        Panel(
            "PCIe utilisation, busy time", "percentunit",
            "Share of the time in which copies run, as measured: mean of the links, and the busiest one.",
            {
                "{{direction}}": "avg by (direction) (rate(vericache_link_busy_seconds_total{$S}[$__rate_interval]))",
                "{{direction}}, busiest":
                    "max by (direction) (rate(vericache_link_busy_seconds_total{$S}[$__rate_interval]))",
            },
        ),
        Panel(
            "PCIe utilisation, bytes", "percentunit", "Bytes moved against the bandwidth the planner works with.",
            {
                "{{direction}}": rate("vericache_link_bytes_total", "direction")
                + " / on () group_left () (sum(vericache_link_capacity_bytes_per_second{$S}) > 0)"
            },
        ),
        Panel(
            "Rings", "short", "Link time promised to reloads, as a share of the window; transient pages promised.",
            {"link time": "max(vericache_link_ring_ratio{$S})", "pages": "max(vericache_page_ring_pages{$S})"},
        ),
        Panel(
            "Link bytes", "Bps", "KV bytes between host and device; saved: reloads of a prefix that others brought; "
            "kept: what reloads took from the arena.",
            {
                "{{direction}}": rate("vericache_link_bytes_total", "direction"),
                "saved": rate("vericache_shared_reload_bytes_total"),
                "kept": rate("vericache_kept_reload_bytes_total"),
            },
        ),
        Panel("Reload time", "s", "Reloads of one step.", quantiles("vericache_reload_seconds", 0.5, 0.99)),
        Panel(
            "Verify wait and iteration time", "s", "From the last draft to the verify; iterations as planned.",
            {
                **{f"wait, {k}": v for k, v in quantiles("vericache_verify_wait_seconds", 0.5, 0.99).items()},
                "iteration": "max(vericache_iteration_seconds{$S})",
            },
        ),
    ],
    "Residency": [
        Panel(
            "Requests by state", "short", "Requests whose full KV is in host memory.",
            {"{{state}}": "sum by (state) (vericache_requests{$S})"},
        ),
        Panel(
            "Moves", "ops", "Requests that left the device, contexts compressed anew, requests that came back.",
            {
                "demotions": rate("vericache_demotions_total"),
                "compressed anew": rate("vericache_recompressions_total"),
                "back: {{reason}}": rate("vericache_promotions_total", "reason"),
            },
        ),
        Panel(
            "Scores taken over", "short", "Context tokens a second that needed no scoring row: their scores were held.",
            {"tokens/s": rate("vericache_reused_score_tokens_total")},
        ),
        Panel(
            "Requests that never drafted", "ops", "By reason.",
            {"{{reason}}": rate("vericache_fallbacks_total", "reason")},
        ),
        Panel(
            "Host store", "percentunit", "Full KV in host memory, against its capacity.",
            used("vericache_host_store"), width=12, most=1,
        ),
        Panel(
            "Draft arena", "percentunit", "Compressed KV on the device, against the arena's size.",
            used("vericache_arena"), width=12, most=1,
        ),
    ],
    "Audit": [
        Panel(
            "Mismatches", "short", "Replays on full KV that differ outside a near tie: expected to stay 0.",
            {"mismatches": "sum(vericache_audit_mismatches_total{$S})"}, "stat", 12,
        ),
        Panel(
            "Checks", "ops", "Requests replayed, and those drawn but not replayed.",
            {
                "checks": rate("vericache_audit_checks_total"),
                "skipped: {{reason}}": rate("vericache_audit_skipped_total", "reason"),
            },
            width=12,
        ),
    ],
    "Certified decode": [
        Panel(
            "Certified tokens and decisions", "ops", "Tokens, and decisions by what they read of the full KV.",
            {
                "tokens, {{bound}}": rate("vericache_certified_tokens_total", "bound"),
                "read {{fetched}}": rate("vericache_certified_decisions_total", "fetched"),
            },
        ),
        Panel(
            "Fetched", "short", "From host memory, per second.",
            {
                "tokens of one KV head": rate("vericache_certified_fetched_tokens_total"),
                "bytes": rate("vericache_certified_fetched_bytes_total"),
            },
        ),
        Panel(
            "Promised and measured error", "percentunit", "Of what is certified: largest of a token, true ones.",
            {
                "{{bound}}, promised, p95": quantiles_by("vericache_certificate", "bound", 0.95)["p95"],
                "{{bound}}, measured, p95": quantiles_by("vericache_certified_error", "bound", 0.95)["p95"],
            },
        ),
    ],
}  # fmt: skip

SERVING: Rows = {
    "Latency": [
        Panel(
            "Time to first token", "s", "From a request's arrival.",
            quantiles("vllm:time_to_first_token_seconds", 0.5, 0.95),
        ),
        Panel(
            "Time per output token", "s", "Mean of a request, so that tokens which come in blocks count alike.",
            quantiles("vllm:request_time_per_output_token_seconds", 0.5, 0.95),
        ),
        Panel(
            "Whole requests", "s", "From arrival to the last token.",
            quantiles("vllm:e2e_request_latency_seconds", 0.5, 0.95),
        ),
        Panel(
            "Between two outputs", "s", "A round delivers several tokens at once: few gaps, but longer ones.",
            quantiles("vllm:inter_token_latency_seconds", 0.5, 0.95),
        ),
        Panel("Time in the queue", "s", "Before a request first ran.", {
            **quantiles("vllm:request_queue_time_seconds", 0.5, 0.95),
        }),
        Panel("Time in prefill", "s", "Mean per request.", {"mean": mean("vllm:request_prefill_time_seconds")}),
    ],
    "Throughput": [
        Panel(
            "Tokens", "short", "Per second.",
            {"output": rate("vllm:generation_tokens_total"), "prompt": rate("vllm:prompt_tokens_total")},
        ),
        Panel(
            "Finished requests", "ops", "By reason.",
            {"{{finished_reason}}": rate("vllm:request_success_total", "finished_reason")},
        ),
        Panel(
            "Requests", "short", "Drafting ones count as running.",
            {
                "running": "sum(vllm:num_requests_running{$S})",
                "waiting": "sum(vllm:num_requests_waiting{$S})",
            },
        ),
        Panel(
            "KV blocks of plain rows", "percentunit", "Of vLLM's own pool, beside the draft arena.",
            {"in use": "avg(vllm:kv_cache_usage_perc{$S})"}, most=1,
        ),
        Panel(
            "Prefix cache", "percentunit", "Prompt tokens whose KV was there already.",
            {"hits": ratio(rate("vllm:prefix_cache_hits_total"), rate("vllm:prefix_cache_queries_total"))}, most=1,
        ),
        Panel("Preemptions", "ops", "Requests that lost their blocks.", {"": rate("vllm:num_preemptions_total")}),
    ],
}  # fmt: skip

# File name -> uid, title, description, rows.
DASHBOARDS: dict[str, tuple[str, str, Rows]] = {
    "vericache": (
        "VeriCache", "Drafts on compressed KV, verifies on full KV: acceptance, host link, residency, audit.", ENGINE
    ),
    "vericache-serving": ("VeriCache: latency and throughput", "What users see, from vLLM's own metrics.", SERVING),
}  # fmt: skip


def selector(metric: str) -> str:
    """The audit runs in the API process, which knows no engine."""
    labels = [v for v in VARIABLES if v != "engine" or "_audit_" not in metric]
    return ", ".join(f'{label}=~"${label}"' for label in labels)


def expression(text: str) -> str:
    return re.sub(r"([a-z_:0-9]+)\{\$S\}", lambda found: f"{found[1]}{{{selector(found[1])}}}", text)


def names(panel: Panel) -> list[str]:
    """The panel's metrics, as docs/metrics.md names them."""
    found = re.findall(r"([a-z_:0-9]+)\{\$S\}", " ".join(panel.queries.values()))
    return list(dict.fromkeys(re.sub("_(total|sum|count|bucket)$", "", name) for name in found))


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    silent = [
        {"type": "special", "options": {"match": match, "result": {"text": "No traffic", "index": 0}}}
        for match in ("nan", "null")
    ]
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "mappings": silent, "noValue": "No traffic"}
    stat = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
    }
    series = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": f"{panel.about} {', '.join(names(panel))}.",
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": panel.width, "x": x, "y": y},
        "fieldConfig": {"defaults": defaults | ({} if panel.most is None else {"max": panel.most}), "overrides": []},
        "options": stat if panel.kind == "stat" else series,
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expression(text), "legendFormat": legend}
            for i, (legend, text) in enumerate(panel.queries.items())
        ],
    }


def _panels(rows: Rows) -> Iterator[dict[str, Any]]:
    number, y = 0, 0
    for title, panels in rows.items():
        number += 1
        place = {"h": 1, "w": WIDTH, "x": 0, "y": y}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        x, y = 0, y + 1
        for panel in panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + HEIGHT
            number += 1
            yield _panel(panel, number, x, y)
            x += panel.width
        y += HEIGHT


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {},
           "options": [], "refresh": 1}  # fmt: skip
    before: list[str] = []
    for name, label in VARIABLES.items():
        chosen = ", ".join(f'{each}=~"${each}"' for each in before)
        query = f"label_values({PRESENT}{f'{{{chosen}}}' if chosen else ''}, {name})"
        yield {"name": name, "label": label, "type": "query", "datasource": SOURCE, "query": query,
               "definition": query, "refresh": 2, "multi": True, "includeAll": True, "allValue": ".*",
               "current": {"text": "All", "value": "$__all"}, "options": [], "sort": 1}  # fmt: skip
        before.append(name)


def dashboard(uid: str) -> dict[str, Any]:
    title, description, rows = DASHBOARDS[uid]
    others = {"type": "dashboards", "title": "VeriCache", "tags": ["vericache"], "includeVars": True, "keepTime": True}
    return {
        "id": None,
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["vllm", "vericache"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "",
        "annotations": {"list": []},
        "links": [
            others | {"asDropdown": False, "icon": "external link", "targetBlank": False, "tooltip": "", "url": ""}
        ],
        "templating": {"list": list(_variables())},
        "panels": list(_panels(rows)),
    }


def text(uid: str) -> str:
    return json.dumps(dashboard(uid), indent=1) + "\n"


def main() -> None:
    for uid in DASHBOARDS:
        (FOLDER / f"{uid}.json").write_text(text(uid), encoding="utf-8")


if __name__ == "__main__":
    main()
