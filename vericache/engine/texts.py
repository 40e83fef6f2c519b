"""Token ids of the texts that scoring passes append to a prompt (KVzip's instructions)."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.config import ModelConfig
from vllm.tokenizers import cached_tokenizer_from_config

from compressors import METHODS
from vericache.config import VeriCacheConfig
from vericache.errors import ConfigError

_MARK = "vericache"  # stands for a user's message


def probe_texts(model_config: ModelConfig, settings: VeriCacheConfig) -> Mapping[str, Mapping[str, Sequence[int]]]:
    """The texts of every compressor in use (all of them when clients may choose), by its name, and among them
    ``"turn"``: what the chat template puts between a message and the answer (a newline when there is no template)."""
    compressors = list(METHODS) if "compressor" in settings.request_options else [settings.compressor]
    needing = [name for name in compressors if METHODS[name].texts]
    if not needing:
        return {name: {"turn": ()} for name in compressors}
    if model_config.skip_tokenizer_init:
        raise ConfigError(
            f"compressor {', '.join(needing)} appends a text to the context and needs a tokenizer for that, but "
            f"skip_tokenizer_init is set; unset it, or choose another compressor and let no client choose one"
        )
    tokenizer = cached_tokenizer_from_config(model_config)

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    turn = turn_text(tokenizer)
    return {
        name: {key: encode(text) for key, text in {**METHODS[name].texts, "turn": turn}.items()} for name in compressors
    }


def turn_text(tokenizer: Any) -> str:
    """What the chat template puts between a message and the answer; a newline when there is no template."""
    if not getattr(tokenizer, "chat_template", None):
        return "\n"
    message = [{"role": "user", "content": _MARK}]
    rendered: str = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return rendered.rpartition(_MARK)[2]
