"""What the engine measured: bytes moved, peak KV memory, and the schedule itself."""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from scheduler.lifecycle import State
from vericache.engine.metrics import Stats, Telemetry
from vericache.engine.ops import MEASURED, Load, StepReport

if TYPE_CHECKING:
    from vericache.engine.coordinator import Coordinator
    from vericache.engine.plan import StepPlan

# One letter per request and iteration in a schedule picture.
LEGEND = {
    "P": "prefill",
    "R": "plain row",
    "S": "scoring row",
    "C": "offload and compress",
    "D": "draft",
    "L": "draft while the full KV is loaded",
    "V": "verify",
    "B": "certified row",
    ".": "waits",
}

SNAPSHOT_SECONDS = 0.5  # between two snapshots for the status page


@dataclass
class EngineStats:
    """Counters since the engine started (or ``clear``). Bytes; ``moved`` is keyed by operation name."""

    moved: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    failures: Counter[str] = field(default_factory=Counter)
    iterations: int = 0
    peak_kv_bytes: int = 0  # vLLM blocks in use and the arena's pages in use, at the same time
    arena_bytes: int = 0
    trace: deque[dict[str, str]] = field(default_factory=deque)  # request -> letter of LEGEND, per iteration
    telemetry: Telemetry = field(default_factory=Telemetry)
    snapshot_at: float = 0.0  # monotonic seconds
    snapshot_at_rest: bool = False  # it showed no request, and nothing held

    def digest(self, report: StepReport) -> None:
        self.arena_bytes = report.arena_bytes
        for transfer in report.transfers:
            if transfer.op == MEASURED:
                continue
            self.moved[transfer.op] += transfer.num_bytes
            self.seconds[transfer.op] += transfer.seconds
            direction = "to_device" if transfer.op == Load.__name__ else "to_host"
            self.telemetry.count("vericache_link_bytes", transfer.num_bytes, direction)
            self.telemetry.count("vericache_link_busy_seconds", transfer.seconds, direction)
            if transfer.op == Load.__name__:
                self.telemetry.sample("vericache_reload_seconds", transfer.seconds)
                self.telemetry.count("vericache_kept_reload_bytes", transfer.kept)
        for failure in report.failures:
            self.failures[failure.op] += 1

    def holds(self, block_bytes: int) -> None:
        """Bytes of vLLM's blocks in use now."""
        self.peak_kv_bytes = max(self.peak_kv_bytes, block_bytes + self.arena_bytes)

    def remember(self, plan: "StepPlan", coordinator: "Coordinator", scheduled: Mapping[str, int]) -> None:
        """Add one iteration to the trace: a letter per request that exists."""
        internal = {d.row.row_id for d in plan.drafts} | {p.row.row_id for p in plan.probes}
        letters = {r: "P" if n > 1 else "R" for r, n in scheduled.items() if r not in internal}
        for request_id, track in coordinator.planner.tracks.items():
            letters[request_id] = "."
            if track.state is State.DEMOTING and coordinator.records[request_id].settling:
                letters[request_id] = "C"
        for probe in plan.probes:
            letters[probe.record.request_id] = "S"
        for draft in plan.drafts:
            loading = coordinator.planner.tracks[draft.record.request_id].state is State.LOADING
            letters[draft.record.request_id] = "L" if loading else "D"
        for row in plan.certified:
            letters[row.record.request_id] = "B"
        for verify in plan.verifies:
            letters[verify.record.request_id] = "V"
        self.trace.append(letters)
        while len(self.trace) > coordinator.settings.trace_iterations:
            self.trace.popleft()


def step_stats(coordinator: "Coordinator", wanted: bool) -> Stats | None:
    """What is new for the metrics and, now and then, for the status page. Not ``wanted`` (vLLM's log_stats is off):
    None, and what was counted is dropped."""
    stats, now = coordinator.stats, monotonic()
    if not wanted:
        stats.telemetry.clear()
        return None
    at_rest = not coordinator.records and coordinator.reserved.nothing_held
    # The page must not go on showing the last request as running when no further step follows.
    due = now - stats.snapshot_at >= SNAPSHOT_SECONDS or (at_rest and not stats.snapshot_at_rest)
    if not coordinator.plan.drafts and not due and stats.telemetry.empty:
        return None  # without an arena no gauge changes
    state, status = gauges(coordinator), None
    if due:
        stats.snapshot_at, stats.snapshot_at_rest = now, at_rest
        status = {**snapshot(coordinator), "gauges": state}
    return stats.telemetry.take(state, status)


def gauges(coordinator: "Coordinator") -> dict[str, dict[str, float]]:
    """The state right now, by metric and label value."""
    rings, plan, throughput = coordinator.planner.rings, coordinator.plan, coordinator.throughput
    host, arena = coordinator.reserved.host, coordinator.reserved.arena
    states = dict.fromkeys((s.name.lower() for s in State if s not in (State.RESIDENT, State.FINISHED)), 0)
    states["held"] = 0  # waiting, because their drafts would not pay
    for track in coordinator.planner.tracks.values():
        states["held" if track.held else track.state.name.lower()] += 1
    single = {
        "vericache_link_capacity_bytes_per_second": throughput.bandwidth.value,
        "vericache_iteration_seconds": throughput.iteration.value,
        "vericache_link_ring_ratio": sum(rings.link.cells) / (rings.window * throughput.iteration_ns),
        "vericache_page_ring_pages": max(rings.pages.cells),
        "vericache_host_store_bytes": (host.size - host.free) * plan.block_bytes,
        "vericache_host_store_capacity_bytes": host.size * plan.block_bytes,
        "vericache_arena_bytes": arena.used * plan.page_format.page_bytes,
        "vericache_arena_capacity_bytes": plan.arena_pages * plan.page_format.page_bytes,
    }
    return {"vericache_requests": dict(states), **{name: {"": value} for name, value in single.items()}}


def snapshot(coordinator: "Coordinator") -> dict[str, Any]:
    """The status page's data without the gauges (JSON types only): rings by iteration, requests, the schedule of
    late."""
    planner, throughput = coordinator.planner, coordinator.throughput
    requests = []
    for request_id, track in planner.tracks.items():
        record = coordinator.records[request_id]
        booking = track.round.booking if track.round is not None else None
        requests.append(
            {
                "id": request_id,
                "state": "held" if track.held else track.state.name.lower(),
                "prompt_tokens": record.request.num_prompt_tokens,
                "output_tokens": record.request.num_output_tokens,
                "verify_in": None if booking is None else booking.verify_at - planner.rings.now,
                **record.summary(),
            }
        )
    return {
        "iteration": coordinator.stats.iterations,
        "settings": {**coordinator.settings.model_dump(mode="json"), "counts": coordinator.settings.method.counts},
        "arena": {"fraction": coordinator.plan.share.fraction, "why": coordinator.plan.share.why},
        "link_ring": [round(ns / throughput.iteration_ns, 4) for ns in planner.rings.link.cells],
        "page_ring": list(planner.rings.pages.cells),
        "moved_bytes": dict(coordinator.stats.moved),
        "failures": dict(coordinator.stats.failures),
        "requests": requests,
        "timeline": timeline(coordinator.stats.trace),
    }


def timeline(trace: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """One string per request, one letter of LEGEND per remembered iteration (blank: not there)."""
    names = {name: None for step in trace for name in step}
    return {name: "".join(step.get(name, " ") for step in trace) for name in names}
