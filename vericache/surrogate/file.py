"""The file of a surrogate: safetensors, with what must be known of it as metadata."""

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes

from compressors import METHODS, Surrogate
from compressors.surrogate import FEATURES
from vericache.errors import ConfigError

VERSION = 1  # of this file's layout
_KEY = "vericache_surrogate"


@dataclass(frozen=True)
class Stored:
    """A surrogate, the compressor (``method``) and the model (``fingerprint``) it was trained for, how, and on which
    texts (``Text.mark``)."""

    method: str
    surrogate: Surrogate
    fingerprint: str
    options: dict[str, Any] = field(default_factory=dict)
    trained_on: tuple[str, ...] = ()


def save(path: Path, stored: Stored) -> None:
    """Written beside its place and renamed: a file that exists is complete."""
    about = {
        _KEY: VERSION,
        "features": FEATURES,
        "method": stored.method,
        "fingerprint": stored.fingerprint,
        "options": stored.options,
        "trained_on": stored.trained_on,
    }
    tensors = {name: tensor.cpu().contiguous() for name, tensor in stored.surrogate.tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        build = Path(folder) / path.name
        build.write_bytes(to_bytes(tensors, {name: json.dumps(value) for name, value in about.items()}))
        os.replace(build, path)


def load(path: str | Path) -> Stored:
    """Raises ConfigError for a file that is missing, damaged, of another version, or no surrogate."""
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a mapping
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"cannot read the surrogate {path}: {error}; make one with `vericache surrogate train --out {path}`"
        ) from None
    if _KEY not in metadata:
        raise ConfigError(f"{path} is no surrogate: it lacks the mark {_KEY!r} that `vericache surrogate train` writes")
    about = {name: json.loads(value) for name, value in metadata.items()}
    for name, ours in ((_KEY, VERSION), ("features", FEATURES)):
        if about.get(name) != ours:
            raise ConfigError(
                f"the surrogate {path} has {name} version {about.get(name)}, this VeriCache reads {ours}; train it anew"
            )
    if not all(t.isfinite().all() for t in tensors.values()):
        raise ConfigError(f"the surrogate {path} holds numbers that are not finite; train it anew")
    try:
        method, fingerprint, options = about["method"], about["fingerprint"], about["options"]
        network = METHODS[method].network if method in METHODS else None
        if network is None:
            raise ConfigError(f"the surrogate {path} is for compressor {method!r}, which takes none; train it anew")
        return Stored(method, network(tensors), fingerprint, options, tuple(about["trained_on"]))
    except KeyError as error:
        raise ConfigError(f"the surrogate {path} lacks {error}; train it anew") from None


def check_model(path: str | Path, stored: Stored, fingerprint: str) -> None:
    """Raises ConfigError when the surrogate was trained on another model."""
    if stored.fingerprint != fingerprint:
        raise mismatch(path, stored, fingerprint)


def mismatch(path: str | Path, stored: Stored, model: str) -> ConfigError:
    return ConfigError(
        f"the surrogate {path} was trained on model {stored.fingerprint}, this model is {model}; train one for it with "
        f"`vericache surrogate train --model ...`"
    )
