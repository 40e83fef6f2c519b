"""Which model a surrogate belongs to, from what a worker has in memory on every device."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def geometry(architecture: str, layers: int, kv_heads: int, head_dim: int) -> str:
    """The part of a fingerprint that is known before the weights are."""
    return f"{architecture}-{layers}x{kv_heads}x{head_dim}"


def fingerprint(known: str, parameters: Iterable[tuple[str, Tensor]]) -> str:
    """``known`` (see ``geometry``) and a hash of the model's vectors (norms, biases, scales) of all layers.

    Matrices are left out: a CPU packs them away when it loads a model, or not, by dtype and instruction set
    (``vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm`` leaves an empty vector in their place);
    quantisation replaces them. Vectors are hashed as bfloat16, so that a model has one fingerprint in every dtype.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(parameters, key=lambda p: p[0]):
        if parameter.ndim == 1 and parameter.numel():
            digest.update(name.encode())
            digest.update(parameter.detach().cpu().to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    return f"{known}-{digest.hexdigest()[:16]}"


def geometry_of(mark: str) -> str:
    """The geometry in a fingerprint."""
    return mark.rpartition("-")[0]
