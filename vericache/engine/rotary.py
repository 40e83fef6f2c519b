"""The rotary embedding of a vLLM model, for compression methods that turn keys and queries to other positions."""

from collections.abc import Sequence

from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.fope import FourierRotaryEmbedding

from compressors import Rotary


def shared_rotary(model: nn.Module, layers: Sequence[Attention]) -> Rotary | None:
    """The one embedding that all of ``layers`` apply, None where they differ or it is not a plain rotation.

    vLLM's models hold ``attn`` and ``rotary_emb`` side by side in a layer's attention module, and ``get_rope`` makes
    one object for all layers that rotate alike.
    """
    found: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        children = list(module.children())
        for child in children:
            if isinstance(child, Attention):
                found[id(child)] = [c for c in children if hasattr(c, "rotary_dim")]
    beside = [found.get(id(layer), []) for layer in layers]
    if not beside or any(len(modules) != 1 for modules in beside) or len({id(modules[0]) for modules in beside}) > 1:
        return None
    rope = beside[0][0]
    # Not plain: MRotaryEmbedding (several positions a token), Phi-3's long and short tables, FoPE's learned matrices.
    if not isinstance(rope, RotaryEmbedding) or isinstance(rope, FourierRotaryEmbedding):
        return None
    table = rope.cos_sin_cache
    return Rotary(table, rope.is_neox_style) if table.shape[-1] == rope.rotary_dim else None
