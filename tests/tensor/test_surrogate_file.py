"""The file of a surrogate: what comes back, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from compressors import Shape
from compressors.surrogate import Surrogate
from tests.tensor.surrogates import gates, perceptron, same
from vericache.errors import ConfigError
from vericache.surrogate import file
from vericache.surrogate.fingerprint import fingerprint, geometry, geometry_of

SHAPE = Shape(3, 2, 4, 8)
MARK = "LlamaForCausalLM-3x2x8-0123456789abcdef"


def stored(method: str = "kvzap", surrogate: Surrogate | None = None) -> file.Stored:
    options = {"fit": "ridge", "strength": 1.0}
    return file.Stored(method, surrogate or perceptron(SHAPE), MARK, options, ("abc", "def"))


@pytest.mark.parametrize(
    "wanted", [stored(), stored(surrogate=perceptron(SHAPE, hidden=4)), stored("fast_kvzip", gates(SHAPE))]
)
def test_what_was_saved_comes_back(wanted: file.Stored, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "s.safetensors"
    file.save(path, wanted)
    file.save(path, wanted)  # in its own place
    found = file.load(path)
    assert replace(found, surrogate=wanted.surrogate) == wanted
    assert type(found.surrogate) is type(wanted.surrogate)
    assert same(found.surrogate, wanted.surrogate)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    file.check_model(path, found, MARK)


def test_another_model_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=f"was trained on model {MARK}, this model is LlamaForCausalLM-9.*surrogate train"
    ):
        file.check_model("s", stored(), "LlamaForCausalLM-9")


@pytest.mark.parametrize("length", [0, 5, 100, -1])
def test_a_truncated_file_is_refused(length: int, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    file.save(path, stored())
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ConfigError, match=r"cannot read the surrogate .*s\.safetensors: .*make one with `vericache"):
        file.load(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ConfigError, match="cannot read the surrogate"):
            file.load(path)


def rewritten(path: Path, **about: Any) -> None:
    """The file of ``stored()`` with other metadata; None removes a name."""
    names = {
        "vericache_surrogate": 1,
        "features": 1,
        "method": "kvzap",
        "fingerprint": MARK,
        "options": {},
        "trained_on": [],
    }
    ((weight, bias),) = stored().surrogate.maps
    save_file(
        {"weight0": weight, "bias0": bias},
        path,
        {n: json.dumps(v) for n, v in (names | about).items() if v is not None},
    )


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"vericache_surrogate": None}, "is no surrogate"),
        ({"vericache_surrogate": 2}, "has vericache_surrogate version 2, this VeriCache reads 1; train it anew"),
        ({"features": 9}, "has features version 9"),
        ({"features": None}, "has features version None"),
        ({"fingerprint": None}, "lacks 'fingerprint'"),
        ({"method": "kvzip"}, "is for compressor 'kvzip', which takes none"),
        ({"method": "gone"}, "is for compressor 'gone', which takes none"),
    ],
)
def test_other_files_and_versions_are_refused(about: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    rewritten(path)
    assert file.load(path).fingerprint == MARK
    rewritten(path, **about)
    with pytest.raises(ConfigError, match=message):
        file.load(path)


def test_a_model_file_is_no_surrogate(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(3)}, path, {"format": "pt"})
    with pytest.raises(ConfigError, match="is no surrogate"):
        file.load(path)


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    path, bad = tmp_path / "s.safetensors", stored()
    bad.surrogate.tensors["weight0"][1, 2, 1] = torch.nan
    file.save(path, bad)
    with pytest.raises(ConfigError, match="not finite"):
        file.load(path)


# -- fingerprints ---------------------------------------------------------------------------------------------


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)) for _ in range(2))
    for parameter in layers.parameters():
        nn.init.normal_(parameter)
    return layers.to(torch.bfloat16).float()


def mark(module: nn.Module) -> str:
    return fingerprint(geometry("LlamaForCausalLM", 3, 2, 8), module.named_parameters())


def test_a_fingerprint_is_the_models_in_every_dtype_and_with_packed_matrices() -> None:
    wanted = mark(model())
    assert geometry_of(wanted) == "LlamaForCausalLM-3x2x8"
    assert mark(model().to(torch.bfloat16)) == mark(model().to(torch.float16)) == wanted
    for nothing in (torch.empty(0, 0), torch.empty(0)):
        packed = model()
        packed[0][1].weight = nn.Parameter(nothing)
        assert mark(packed) == wanted


def test_a_fingerprint_is_another_models_not() -> None:
    other = model()
    other[1][0].weight.data[3] += 0.5
    assert mark(other) != mark(model()) != mark(model(1))
