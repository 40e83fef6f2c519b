"""How VeriCache is switched on in vLLM: classes by qualified name, configuration in ``additional_config``."""

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
    worker = _worker()
    for name, ours in (("scheduler_cls", SCHEDULER), ("worker_cls", worker), ("kv_transfer_config", CONNECTOR)):
        value = given.get(name)
        if value not in (None, "auto", ours):
            raise ConfigError(
                f"{name} is set to {value!r}, but VeriCache needs {ours} there; remove it (VeriCache cannot be "
                f"combined with another scheduler, worker or KV connector yet)"
            )
    from vllm.config import KVTransferConfig

    return {
        "scheduler_cls": SCHEDULER,
        "worker_cls": worker,
        "kv_transfer_config": KVTransferConfig(
            kv_connector=CONNECTOR, kv_connector_module_path=CONNECTOR_MODULE, kv_role="kv_both"
        ),
        "additional_config": {**(given.get("additional_config") or {}), KEY: config.model_dump(mode="json")},
    }


def _worker() -> str:
    from vllm.platforms import current_platform

    kind = current_platform.device_type
    if kind not in WORKERS:
        raise UnsupportedError(f"the device is a {kind!r}, VeriCache runs on {' and '.join(WORKERS)} devices")
    return WORKERS[kind]
