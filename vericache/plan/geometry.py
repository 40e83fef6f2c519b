"""Bytes of a model, from its config.json: weights, and the KV of one token."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vericache.errors import ConfigError

WIDTH = 2  # bytes of a number in bfloat16, weights and KV
_MISSING = "give --weights-gb and --kv-gb instead of --model"


@dataclass(frozen=True)
class Geometry:
    """``weights``: numbers in the weights of a dense model; None where the config does not tell."""

    weights: int | None
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def weight_bytes(self) -> int:
        """In bfloat16. Raises ConfigError."""
        if self.weights is None:
            raise ConfigError(
                "the config has experts or quantised weights, whose bytes it does not tell; give --weights-gb"
            )
        return WIDTH * self.weights

    @property
    def kv_per_token(self) -> int:
        """Bytes in bfloat16."""
        return 2 * WIDTH * self.layers * self.kv_heads * self.head_dim


def read_geometry(folder: Path) -> Geometry:
    """Of the model in ``folder`` (or of a config.json itself). Raises ConfigError."""
    file = folder / "config.json" if folder.is_dir() else folder
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the model config {file}: {error}; {_MISSING}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds a {type(config).__name__}, expected a model config; {_MISSING}")
    return geometry(config.get("text_config") or config)


def geometry(config: Mapping[str, Any]) -> Geometry:
    """Raises ConfigError for a config without these fields, and for layers that are not full attention."""
    missing = [k for k in ("hidden_size", "num_hidden_layers", "num_attention_heads") if k not in config]
    if missing:
        raise ConfigError(f"the model config has no {', '.join(missing)}; {_MISSING}")
    _check_attention(config)
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    kv_heads, dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    return Geometry(_weights(config, hidden, layers, heads, kv_heads, dim), layers, kv_heads, dim)


def _weights(config: Mapping[str, Any], hidden: int, layers: int, heads: int, kv_heads: int, dim: int) -> int | None:
    """A gated MLP and grouped-query attention; norms and biases do not matter."""
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    known = "intermediate_size" in config and "vocab_size" in config
    if not known or any(config.get(k) for k in experts) or config.get("quantization_config"):
        return None
    per_layer = hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * config["intermediate_size"]
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return int(layers * per_layer + embeddings)


def _check_attention(config: Mapping[str, Any]) -> None:
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if config.get("kv_lora_rank"):
        kinds.add("MLA")
    if kinds:
        raise ConfigError(
            f"the model has layers of {', '.join(sorted(kinds))}, expected full attention in all of them; "
            f"VeriCache does not serve this model"
        )
