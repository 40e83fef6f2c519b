"""The V2 model runner on a tiny random model: on a GPU as it is, on the CPU through Triton's interpreter."""

import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
GPU = torch.cuda.is_available()
if GPU:
    os.environ["VLLM_BATCH_INVARIANT"] = "1"  # read when vLLM is imported
elif os.environ.get("TRITON_INTERPRET") == "1":
    os.environ.update(VLLM_USE_V2_MODEL_RUNNER="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_CPU_KVCACHE_SPACE="1")
    import triton.backends

    class AlwaysActive:
        """vLLM asks whether Triton has a driver for the platform; the interpreter needs none."""

        @staticmethod
        def is_active() -> bool:
            return True

    triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=AlwaysActive)

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


VOCABULARY = 512


def train_tokenizer(folder: Path) -> None:
    """A byte-pair vocabulary of ``VOCABULARY`` tokens, from a text that ships with the project."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([files("vericache.demo").joinpath("prompts/loomings.txt").read_text()], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, random weights, and a tokenizer to match."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64 if GPU else 32, max_position_embeddings=1024, initializer_range=0.3,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    train_tokenizer(folder)
    return folder


def store_with_any_mask() -> None:
    """The interpreter takes boolean masks only; vLLM's grammar kernel comes to an integer one."""
    from triton.runtime.interpreter import InterpreterBuilder

    store = InterpreterBuilder.create_masked_store

    def patched(self: Any, ptrs: Any, value: Any, mask: Any, policy: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return store(self, ptrs, value, mask, policy)

    InterpreterBuilder.create_masked_store = patched


@pytest.fixture(scope="session")
def engine(tiny_model: Path) -> Iterator["V2Engine"]:  # type: ignore[name-defined]  # noqa: F821
    from tests.interpreted.engine.v2_engine import V2Engine

    if not GPU:
        # vLLM's Triton kernel for these two masks is beyond the interpreter.
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
        from vllm.v1.worker.gpu.sample import sampler, states

        sampler.apply_top_k_top_p = states.apply_top_k_top_p = apply_top_k_top_p_pytorch
        store_with_any_mask()
    found = V2Engine(tiny_model, GPU_ENGINE if GPU else CPU_ENGINE, SETTINGS)
    yield found
    found.close()
