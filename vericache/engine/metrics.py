"""Prometheus metrics of VeriCache, on vLLM's own endpoint.

The scheduler counts into a ``Telemetry``; what is new travels with every step's ``SchedulerStats`` to the API process
as KV connector stats (``KVConnectorBase_V1.get_kv_connector_stats`` -> ``build_prom_metrics``), where ``PromMetrics``
feeds prometheus-client through vLLM's registry and labels.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from vericache.certified.certificate import Bound
from vericache.certified.decided import Decided

TOKENS = (0, 1, 2, 4, 8, 12, 16, 20, 25, 32, 48, 64, 128)
ERRORS = (0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


DIRECTIONS = ("to_device", "to_host")
PROMOTIONS = (
    "cache_reset", "compression_failed", "host_store_full", "no_scratch_blocks", "offload_failed", "reload_failed",
    "room", "scoring_too_long", "tail_full", "write_back_failed",
)  # fmt: skip
BOUNDS: tuple[Bound, ...] = get_args(Bound)
FALLBACKS = (
    "bad_option", "failures", "method", "no_arena", "no_pay", "off", "pools_full", "room", "short_output",
    "short_prompt", "unsupported",
)  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """``label``: one label beside vLLM's model_name and engine; ``values``: of the label of a counter or a histogram,
    which all exist from the start, so that a rate or an alert sees the first event."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label: str | None = None
    buckets: tuple[float, ...] = ()
    values: tuple[str, ...] = ("",)


METRICS: dict[str, Metric] = {
    "vericache_rounds": Metric("counter", "Draft-and-verify rounds finished."),
    "vericache_rejected_rounds": Metric("counter", "Rounds in which the verifier rejected a draft."),
    "vericache_accepted_tokens_per_verify": Metric(
        "histogram", "Draft tokens accepted by one verify row (without the token it adds itself).", buckets=TOKENS
    ),
    "vericache_draft_length": Metric("histogram", "Draft tokens carried by one verify row.", buckets=TOKENS),
    "vericache_verify_wait_seconds": Metric(
        "histogram", "From the last draft of a round to its verify row.", buckets=SECONDS
    ),
    "vericache_reload_seconds": Metric("histogram", "Duration of the reloads of one step.", buckets=SECONDS),
    "vericache_link_bytes": Metric(
        "counter", "KV bytes copied between host and device.", "direction", values=DIRECTIONS
    ),
    "vericache_shared_reload_bytes": Metric(
        "counter", "KV bytes that reloads found on the device, because others with the same prefix had brought them."
    ),
    "vericache_kept_reload_bytes": Metric(
        "counter", "KV bytes that reloads took from the draft arena instead of the host (residual_reload)."
    ),
    "vericache_link_busy_seconds": Metric("counter", "Time copies took.", "direction", values=DIRECTIONS),
    "vericache_link_capacity_bytes_per_second": Metric("gauge", "Link bandwidth the planner works with."),
    "vericache_iteration_seconds": Metric("gauge", "Iteration time the planner works with."),
    "vericache_demotions": Metric("counter", "Requests that left the device to draft."),
    "vericache_recompressions": Metric("counter", "Contexts compressed anew because their tail had grown long."),
    "vericache_reused_score_tokens": Metric(
        "counter", "Context tokens whose scores were held already, so that no scoring row was computed for them."
    ),
    "vericache_promotions": Metric(
        "counter",
        "Drafting requests that became plain rows again: `room` in mode auto, else what failed.",
        "reason",
        values=PROMOTIONS,
    ),
    "vericache_fallbacks": Metric("counter", "Requests that never drafted.", "reason", values=FALLBACKS),
    "vericache_certified_tokens": Metric(
        "counter", "Tokens decoded by certified rows, by what is certified.", "bound", values=BOUNDS
    ),
    "vericache_certified_decisions": Metric(
        "counter",
        "Decisions of certified rows (one per layer and KV head): nothing fetched, some tokens, or all.",
        "fetched",
        values=("none", "some", "all"),
    ),
    "vericache_certified_fetched_tokens": Metric("counter", "Tokens that decisions fetched, of one KV head each."),
    "vericache_certified_fetched_bytes": Metric("counter", "Bytes that decisions fetched from host memory."),
    "vericache_certificate": Metric(
        "histogram",
        "Largest certificate of a certified row, of all its layers and queries, by what is certified.",
        "bound",
        ERRORS,
        BOUNDS,
    ),
    "vericache_certified_error": Metric(
        "histogram",
        "True relative error of what is certified (denominators or attention outputs), of decisions drawn for that.",
        "bound",
        ERRORS,
        BOUNDS,
    ),
    "vericache_requests": Metric("gauge", "Detached requests by state; `held`: their drafts would not pay.", "state"),
    "vericache_link_ring_ratio": Metric("gauge", "Share of the window's link time that is promised to reloads."),
    "vericache_page_ring_pages": Metric("gauge", "Transient pages promised in the window's fullest iteration."),
    "vericache_host_store_bytes": Metric("gauge", "Host memory that holds full KV."),
    "vericache_host_store_capacity_bytes": Metric("gauge", "Host memory for full KV."),
    "vericache_arena_bytes": Metric("gauge", "Draft arena in use: real bytes, also where page_format is simulated."),
    "vericache_arena_capacity_bytes": Metric("gauge", "Draft arena."),
}


class Telemetry:
    """What happened since it was last asked."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._samples: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def count(self, name: str, amount: float = 1, label: str = "") -> None:
        self._counts[name][label] += amount

    def sample(self, name: str, value: float, label: str = "") -> None:
        self._samples[name][label].append(value)

    def verified(self, drafted: int, accepted: int) -> None:
        self.count("vericache_rounds")
        self.count("vericache_rejected_rounds", int(accepted < drafted))
        self.sample("vericache_draft_length", drafted)
        self.sample("vericache_accepted_tokens_per_verify", accepted)

    def certified(self, found: Decided, bound: Bound) -> None:
        """One certified row."""
        self.count("vericache_certified_tokens", label=bound)
        some = found.fetching - found.fallbacks
        for label, number in (("none", found.decisions - found.fetching), ("some", some), ("all", found.fallbacks)):
            self.count("vericache_certified_decisions", number, label)
        self.count("vericache_certified_fetched_tokens", found.tokens)
        self.count("vericache_certified_fetched_bytes", found.num_bytes)
        for name, values in (("certificate", found.certificates), ("certified_error", found.measured)):
            for value in values:
                self.sample(f"vericache_{name}", value, bound)

    @property
    def empty(self) -> bool:
        return not self._counts and not self._samples

    def take(self, gauges: dict[str, dict[str, float]], status: dict[str, Any] | None = None) -> "Stats":
        counts = {name: dict(values) for name, values in self._counts.items()}
        samples = {name: dict(values) for name, values in self._samples.items()}
        stats = Stats({"counts": counts, "samples": samples, "gauges": gauges, "status": status})
        self.clear()
        return stats

    def clear(self) -> None:
        self._counts.clear()
        self._samples.clear()


class Stats(KVConnectorStats):
    """``counts`` and ``gauges``: name -> label value -> number; ``samples``: name -> label value -> observations;
    ``status``: the page's latest snapshot, or None."""

    def is_empty(self) -> bool:
        return not self.data

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> "Stats":
        if not self.data:
            return Stats(other.data)
        counts = {name: dict(values) for name, values in self.data["counts"].items()}
        for name, values in other.data["counts"].items():
            mine = counts.setdefault(name, {})
            for label, amount in values.items():
                mine[label] = mine.get(label, 0) + amount
        samples = {name: {k: list(v) for k, v in values.items()} for name, values in self.data["samples"].items()}
        for name, observed in other.data["samples"].items():
            for label, values in observed.items():
                samples.setdefault(name, {}).setdefault(label, []).extend(values)
        gauges = self.data["gauges"] | other.data["gauges"]
        status = other.data["status"] or self.data["status"]
        return Stats({"counts": counts, "samples": samples, "gauges": gauges, "status": status})

    def reduce(self) -> dict[str, int | float]:
        """vLLM's periodic log line. Acceptance length counts the token the verifier adds, as vLLM does."""
        counts = {name: sum(values.values()) for name, values in self.data["counts"].items()}
        rounds = counts.get("vericache_rounds", 0)
        if not rounds:
            return {"rounds": 0}
        accepted = sum(self.data["samples"]["vericache_accepted_tokens_per_verify"][""])
        megabytes = counts.get("vericache_link_bytes", 0) / 1e6
        return {"rounds": rounds, "acceptance length": round(1 + accepted / rounds, 2), "link MB": round(megabytes, 1)}


class PromMetrics(KVConnectorPromMetrics):
    """One prometheus-client metric per entry of ``METRICS``."""

    latest_status: ClassVar[dict[int, dict[str, Any]]] = {}  # by engine index; what the status page shows

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {name: self._create(name, metric) for name, metric in METRICS.items()}
        for name, metric in METRICS.items():
            for engine in per_engine_labelvalues:
                for label in metric.values if metric.kind != "gauge" else ():
                    self._child(name, engine, label)

    def _create(self, name: str, metric: Metric) -> Any:
        labels = [*self._labelnames, *([metric.label] if metric.label else [])]
        if metric.kind == "counter":
            return self._counter_cls(name=name, documentation=metric.help, labelnames=labels)
        if metric.kind == "histogram":
            return self._histogram_cls(name=name, documentation=metric.help, labelnames=labels, buckets=metric.buckets)
        # With several API processes each has its own copy; the latest is right.
        return self._gauge_cls(name=name, documentation=metric.help, labelnames=labels, multiprocess_mode="mostrecent")

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, values in transfer_stats_data["counts"].items():
            for label, amount in values.items():
                self._child(name, engine_idx, label).inc(amount)
        for name, samples in transfer_stats_data["samples"].items():
            for label, observed in samples.items():
                child = self._child(name, engine_idx, label)
                for value in observed:
                    child.observe(value)
        for name, values in transfer_stats_data["gauges"].items():
            for label, value in values.items():
                self._child(name, engine_idx, label).set(value)
        if transfer_stats_data["status"] is not None:
            self.latest_status[engine_idx] = transfer_stats_data["status"]

    def _child(self, name: str, engine_idx: int, label: str) -> Any:
        values = self.per_engine_labelvalues[engine_idx]
        return self._metrics[name].labels(*values, *([label] if METRICS[name].label else []))
