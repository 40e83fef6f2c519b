"""The V2 model runner on a tiny random model: on a GPU as it is, on the CPU through Triton's interpreter."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tests.tiny_model as tiny_model_folder

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
GPU = torch.cuda.is_available()
REAL_MODEL = os.environ.get("BITWISE_MODEL")  # for test_bitwise.py, on a GPU
if GPU:
    os.environ["VLLM_BATCH_INVARIANT"] = "1"  # read when vLLM is imported
elif os.environ.get("TRITON_INTERPRET") == "1":
    os.environ.update(VLLM_USE_V2_MODEL_RUNNER="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_CPU_KVCACHE_SPACE="1")
    import tests.interpreted.stub.sitecustomize  # noqa: F401  lets vLLM start without a GPU

ENGINE = {
    "max_model_len": 512,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 256,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
    "enable_prefix_caching": True,
}
CPU_ENGINE = {**ENGINE, "dtype": "float32", "enforce_eager": True}
GPU_ENGINE = {
    **ENGINE,
    "dtype": "bfloat16",
    "max_num_seqs": 33,
    "gpu_memory_utilization": 0.3,
    "attention_config": {"backend": "TRITON_ATTN"},
    "kernel_config": {"enable_jit_warmup": False},
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 48, 64, 96],
    },
}
SETTINGS = {
    "min_prompt_tokens": 40,
    "draft_length": 4,
    "window": 16,
    "verify_tokens": 20,
    "compressor": "streaming_llm",
    "counts": "uniform",
    "sinks": 2,
    "recent": 8,
    "page_tokens": 16,
    "tail_tokens": 16,
    "host_memory_gib": 0.1,
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if REAL_MODEL:
        GPU_ENGINE["kv_cache_memory_bytes"], SETTINGS["host_memory_gib"] = 2 << 30, 2.0
        return Path(REAL_MODEL)
    return tiny_model_folder.save(tmp_path_factory.mktemp("tiny"), 64 if GPU else 32)


class Started:
    """One engine at a time; a module with other ``SETTINGS`` gets a new one."""

    def __init__(self) -> None:
        self.settings: dict[str, object] = {}
        self.engine: V2Engine | None = None  # type: ignore[name-defined]  # noqa: F821

    def close(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()


@pytest.fixture(scope="session")
def _started() -> Iterator[Started]:
    started = Started()
    yield started
    started.close()


@pytest.fixture(scope="module")
def one_step_engine(request: pytest.FixtureRequest, tiny_model: Path, _started: Started) -> "V2Engine":  # type: ignore[name-defined]  # noqa: F821
    from tests.interpreted.engine.v2_engine import V2Engine

    if not GPU:
        # vLLM's Triton kernel for these two masks is beyond the interpreter.
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
        from vllm.v1.worker.gpu.sample import sampler, states

        sampler.apply_top_k_top_p = states.apply_top_k_top_p = apply_top_k_top_p_pytorch
    settings = {**SETTINGS, **getattr(request.module, "SETTINGS", {})}
    if _started.engine is None or _started.settings != settings:
        _started.close()
        _started.engine, _started.settings = V2Engine(tiny_model, GPU_ENGINE if GPU else CPU_ENGINE, settings), settings
    return _started.engine


@pytest.fixture
def engine(one_step_engine: "V2Engine") -> Iterator["V2Engine"]:  # type: ignore[name-defined]  # noqa: F821
    """Two steps in flight, as on a GPU."""
    with one_step_engine.run_ahead():
        yield one_step_engine
