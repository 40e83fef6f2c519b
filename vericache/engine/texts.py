"""Token ids of the texts a scoring pass appends to a prompt (KVzip's instructions)."""

from collections.abc import Mapping, Sequence

from vllm.config import ModelConfig
from vllm.tokenizers import cached_tokenizer_from_config

from compressors import METHODS
from vericache.config import VeriCacheConfig
from vericache.errors import ConfigError

_MARK = "vericache"  # stands for a user's message


def probe_texts(model_config: ModelConfig, settings: VeriCacheConfig) -> Mapping[str, Sequence[int]]:
    """The texts of every compressor in use (all of them when clients may choose), and ``"turn"``: what the chat
    template puts between a message and the answer (a newline when there is no template)."""
    compressors = list(METHODS) if "compressor" in settings.request_options else [settings.compressor]
    wanted = {key: text for name in compressors for key, text in METHODS[name].texts.items()}
    if not wanted:
        return {"turn": ()}
    if model_config.skip_tokenizer_init:
        needing = ", ".join(name for name in compressors if METHODS[name].texts)
        raise ConfigError(
            f"compressor {needing} asks the model to repeat the context and needs a tokenizer for that, but "
            f"skip_tokenizer_init is set; unset it, or choose another compressor and let no client choose one"
        )
    tokenizer = cached_tokenizer_from_config(model_config)

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    turn = "\n"
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": _MARK}]
        rendered = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        turn = rendered.rpartition(_MARK)[2]
    return {key: encode(text) for key, text in wanted.items()} | {"turn": encode(turn)}
