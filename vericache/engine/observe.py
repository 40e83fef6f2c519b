"""What the engine measured: bytes moved, peak KV memory, and the schedule itself."""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scheduler.lifecycle import State
from vericache.engine.ops import StepReport

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
    ".": "waits",
}


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

    def digest(self, report: StepReport) -> None:
        self.arena_bytes = report.arena_bytes
        for transfer in report.transfers:
            self.moved[transfer.op] += transfer.num_bytes
            self.seconds[transfer.op] += transfer.seconds
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
        for verify in plan.verifies:
            letters[verify.record.request_id] = "V"
        self.trace.append(letters)
        while len(self.trace) > coordinator.settings.trace_iterations:
            self.trace.popleft()
