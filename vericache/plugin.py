"""How VeriCache is switched on in vLLM: classes by qualified name, configuration in ``additional_config``."""

import copy
import os
from collections.abc import Mapping
from typing import Any

from vericache.config import KEY, VeriCacheConfig
from vericache.errors import ConfigError, UnsupportedError

CONNECTOR = "VeriCacheConnector"
CONNECTOR_MODULE = "vericache.engine.connector"
SCHEDULER = "vericache.engine.scheduler.VeriCacheScheduler"
WORKERS = {
    "cpu": "vericache.engine.worker_cpu.VeriCacheCPUWorker",
    "cuda": "vericache.engine.worker_cuda.VeriCacheGPUWorker",
}
MOST_GRAPH_TOKENS = 512  # vLLM's own limit when it chooses graph sizes


def register() -> None:
    """The ``vllm.general_plugins`` entry point: makes the connector known by name. Called in every vLLM process,
    possibly several times; changes nothing for servers that do not use VeriCache."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)


def engine_arguments(config: VeriCacheConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM engine arguments that switch VeriCache on, beside the user's ``given`` ones.

    Raises:
        ConfigError: the user has set something VeriCache must set.
        UnsupportedError: neither a CPU nor an NVIDIA GPU.
    """
    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform

    device = current_platform.device_type
    if device not in WORKERS:
        raise UnsupportedError(f"the device is a {device!r}, VeriCache runs on {' and '.join(WORKERS)} devices")
    for name, ours in (
        ("scheduler_cls", SCHEDULER),
        ("worker_cls", WORKERS[device]),
        ("kv_transfer_config", CONNECTOR),
    ):
        value = given.get(name)
        if value not in (None, "auto", ours):
            raise ConfigError(
                f"{name} is set to {value!r}, but VeriCache needs {ours} there; remove it (VeriCache cannot be "
                f"combined with another scheduler, worker or KV connector yet)"
            )
    return {
        "scheduler_cls": SCHEDULER,
        "worker_cls": WORKERS[device],
        "kv_transfer_config": KVTransferConfig(
            kv_connector=CONNECTOR, kv_connector_module_path=CONNECTOR_MODULE, kv_role="kv_both"
        ),
        "additional_config": {**(given.get("additional_config") or {}), KEY: config.model_dump(mode="json")},
        **(_gpu_arguments(config, given) if device == "cuda" else {}),
    }


def _gpu_arguments(config: VeriCacheConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a GPU needs and the user has not chosen: graphs for steps with verify rows, which would otherwise run
    eagerly, and in bitwise mode kernels whose rows do not depend on the batch."""
    found: dict[str, Any] = {}
    graphs = given.get("compilation_config")
    if not given.get("enforce_eager") and _chosen(graphs, "cudagraph_mode") is None:
        sizes = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
        rows = given.get("max_num_seqs") or MOST_GRAPH_TOKENS
        most = min(MOST_GRAPH_TOKENS, rows + config.verify_tokens)
        unset = all(_chosen(graphs, size) is None and given.get(size) is None for size in sizes)
        found["compilation_config"] = _with_full_graphs(graphs, {"max_cudagraph_capture_size": most} if unset else {})
    if config.bitwise == "on":
        os.environ["VLLM_BATCH_INVARIANT"] = "1"  # inherited by the engine's processes, read when they start
        if not given.get("attention_backend") and _chosen(given.get("attention_config"), "backend") is None:
            found["attention_backend"] = "TRITON_ATTN"
    return found


def _chosen(config: Any, name: str) -> Any:
    """A field of one of vLLM's configurations: ``vllm.LLM`` takes a mapping, the command line makes an object whose
    untouched fields are None."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _with_full_graphs(graphs: Any, more: Mapping[str, Any]) -> Any:
    """A ``compilation_config`` (mapping, level, vLLM's object or None) with FULL graphs and ``more``."""
    if graphs is None or isinstance(graphs, Mapping | int):
        chosen = {"mode": graphs} if isinstance(graphs, int) else graphs or {}
        return {**chosen, **more, "cudagraph_mode": "FULL"}
    from vllm.config import CUDAGraphMode

    changed = copy.copy(graphs)  # it may be vLLM's default, shared by all parsers
    for name, value in {**more, "cudagraph_mode": CUDAGraphMode.FULL}.items():
        setattr(changed, name, value)
    return changed
