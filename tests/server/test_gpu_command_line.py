"""What VeriCache adds on a GPU to arguments that vLLM's own command line has parsed: objects, not mappings."""

from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vericache.config import VeriCacheConfig
from vericache.plugin import _gpu_arguments

PARSER = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())


def parsed(*arguments: str, bitwise: str = "off") -> Any:
    args = PARSER.parse_args(list(arguments))
    found: dict[str, Any] = _gpu_arguments(VeriCacheConfig(verify_tokens=100, bitwise=bitwise), vars(args))
    for name, value in found.items():
        setattr(args, name, value)
    return args


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")  # restored afterwards


def test_steps_with_verify_rows_get_graphs() -> None:
    graphs = parsed("--max-num-seqs", "32").compilation_config
    assert (graphs.cudagraph_mode, graphs.max_cudagraph_capture_size) == (CUDAGraphMode.FULL, 132)
    assert PARSER.get_default("compilation_config").cudagraph_mode is None, "vLLM's default is not ours to change"


def test_sizes_of_graphs_that_the_user_has_chosen_stay() -> None:
    graphs = parsed("-cc", '{"cudagraph_capture_sizes": [1, 2], "mode": 0}').compilation_config
    assert (graphs.cudagraph_mode, graphs.max_cudagraph_capture_size) == (CUDAGraphMode.FULL, None)
    assert (graphs.cudagraph_capture_sizes, graphs.mode) == ([1, 2], 0)
    assert parsed("--max-cudagraph-capture-size", "64").compilation_config.max_cudagraph_capture_size is None


@pytest.mark.parametrize("flags", [["--enforce-eager"], ["-cc.cudagraph_mode", "NONE"]], ids=str)
def test_a_user_who_wants_no_full_graphs_gets_none(flags: list[str]) -> None:
    assert parsed(*flags).compilation_config.cudagraph_mode in (None, CUDAGraphMode.NONE)


def test_bitwise_chooses_invariant_kernels_unless_a_backend_is_named() -> None:
    assert parsed(bitwise="on").attention_backend == "TRITON_ATTN"
    assert str(parsed("--attention-backend", "FLASH_ATTN", bitwise="on").attention_backend).endswith("FLASH_ATTN")
    named = parsed("--attention-config.backend", "FLASH_ATTN", bitwise="on")
    assert named.attention_backend is None
