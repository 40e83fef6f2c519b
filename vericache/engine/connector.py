"""VeriCache as a vLLM KV connector: carries typed operations to the workers and their reports back.

Relies on ``KVConnectorBase_V1``: ``build_connector_meta`` (called for every step, empty ones included),
``start_load_kv`` (before the forward when ``has_sync_kv_loads`` is set), ``wait_for_save``,
``build_connector_worker_meta`` / ``update_connector_output``, ``request_finished``; and on the handshake of workers and
scheduler, which the engine makes once, after it has built the scheduler and before the first request.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from vericache.engine.kv_worker import KVWorker
from vericache.engine.metrics import PromMetrics, Stats
from vericache.engine.ops import StepMetadata, StepReport
from vericache.engine.share import Chosen

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks


@dataclass(frozen=True)
class ArenaShare(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler once, at start."""

    chosen: Chosen


class VeriCacheConnector(KVConnectorBase_V1, SupportsHMA):
    """Both roles. The scheduler stages a step's metadata here and collects the report of a finished step; the
    worker role forwards both to its ``KVWorker``."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # Both set by the VeriCache worker once KV caches exist; there is no KVWorker where there is no arena.
        self.worker: KVWorker | None = None
        self.share: ArenaShare | None = None
        self._staged = StepMetadata()
        self._summaries: dict[str, dict[str, Any]] = {}
        # Both set by the scheduler.
        self.telemetry: Callable[[], Stats | None] | None = None
        self.begin: Callable[[Chosen], None] | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing is handed to another engine; a preempted request may keep its in-flight output."""
        return False

    # -- scheduler role --------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """By rank. All have come to the same share (``worker._least_of_ranks``)."""
        told = {each.chosen for each in metadata.values() if isinstance(each, ArenaShare)}
        assert len(told) == 1, f"workers disagree on the arena's share: {told}"
        assert self.begin is not None
        self.begin(told.pop())

    def stage(self, metadata: StepMetadata) -> None:
        self._staged = metadata

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        staged, self._staged = self._staged, StepMetadata()
        return staged

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Reports are read by the scheduler before vLLM processes the output, see ``report_of``."""

    def summarise(self, request_id: str, summary: dict[str, Any]) -> None:
        """Keep what the response of a finishing request should say about VeriCache."""
        self._summaries[request_id] = summary

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The summary reaches the client as ``kv_transfer_params``."""
        summary = self._summaries.pop(request.request_id, None)
        return False, None if summary is None else {"vericache": summary}

    def get_kv_connector_stats(self) -> Stats | None:
        """What the scheduler counted since the last step; workers report through ``StepReport``."""
        return self.telemetry() if self.telemetry is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> PromMetrics:
        return PromMetrics(*args)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """No prefix is ever loaded from outside."""

    # -- worker role -----------------------------------------------------------------------------------

    def get_handshake_metadata(self) -> ArenaShare | None:
        return self.share

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        if self.worker is not None:
            self.worker.run_before(self._metadata())

    def wait_for_save(self) -> None:
        if self.worker is not None:
            self.worker.run_after(self._metadata())

    def build_connector_worker_meta(self) -> StepReport | None:
        return self.worker.take_report() if self.worker is not None else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before the forward pass starts."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Saves are whole-step operations, see ``wait_for_save``."""

    def _metadata(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata


def report_of(output: KVConnectorOutput | None) -> StepReport:
    """The workers' combined report of one step; empty when there is none."""
    report = output.kv_connector_worker_meta if output is not None else None
    return report if isinstance(report, StepReport) else StepReport()


def kv_worker() -> KVWorker | None:
    """This process's worker; None without an arena and outside an engine."""
    if not has_kv_transfer_group():
        return None
    connector: Any = get_kv_transfer_group()
    return connector.worker if isinstance(connector, VeriCacheConnector) else None
