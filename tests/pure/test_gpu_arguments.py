"""What VeriCache adds to vLLM's arguments on a GPU."""

import os
from typing import Any

import pytest

from vericache.config import VeriCacheConfig
from vericache.plugin import _gpu_arguments


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")  # restored afterwards


def added(given: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return _gpu_arguments(VeriCacheConfig(**settings), given)


def test_steps_with_verify_rows_get_graphs() -> None:
    assert added({"max_num_seqs": 32}, verify_tokens=100) == {
        "compilation_config": {"max_cudagraph_capture_size": 132, "cudagraph_mode": "FULL"}
    }
    assert added({})["compilation_config"]["max_cudagraph_capture_size"] == 512


@pytest.mark.parametrize(
    "given", [{"enforce_eager": True}, {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}], ids=str
)
def test_what_the_user_has_chosen_stays(given: dict[str, Any]) -> None:
    assert added(given) == {}


def test_other_options_of_the_compilation_are_kept() -> None:
    sizes = {"cudagraph_capture_sizes": [1, 8], "mode": 0}
    assert added({"compilation_config": sizes})["compilation_config"] == {**sizes, "cudagraph_mode": "FULL"}
    level = added({"compilation_config": 3, "cudagraph_capture_sizes": [1, 8]})["compilation_config"]
    assert level == {"mode": 3, "cudagraph_mode": "FULL"}


def test_bitwise_chooses_invariant_kernels() -> None:
    assert added({"enforce_eager": True}, bitwise="on") == {"attention_backend": "TRITON_ATTN"}
    assert os.environ["VLLM_BATCH_INVARIANT"] == "1"
    assert added({"enforce_eager": True, "attention_backend": "FLASH_ATTN"}, bitwise="on") == {}
