"""``vericache surrogate``: trained on two texts, measured on a third, served, and refused by another model."""

import json
import os
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from vllm import EngineArgs

from tests.engine.conftest import OUTPUT_TOKENS, SMALL_LAYERS
from tests.engine.harness import ENGINE, SETTINGS
from vericache.config import load
from vericache.demo.worker import ENVIRONMENT, Job, Result, run_in_process
from vericache.engine.support import check_supported
from vericache.errors import ConfigError, UnsupportedError
from vericache.plugin import engine_arguments
from vericache.surrogate import file

NAMES = ("sotu_1791", "loomings", "mpl2")


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vericache.cli", "surrogate", *map(str, arguments)],
        env={**os.environ, **ENVIRONMENT, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for name in NAMES:
        text = files("vericache.demo").joinpath("prompts", f"{name}.txt").read_text(encoding="utf-8")
        (folder / f"{name}.txt").write_text(text[:2500], encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def trained(small_folder: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file, made by the command."""
    path = tmp_path_factory.mktemp("surrogate") / "kvzap.safetensors"
    done = command("train", "--out", path, "--model", small_folder, "--texts", corpus, "--kv-gib", "0.5")
    assert done.returncode == 0, done.stderr
    assert "1 texts held out" in done.stdout
    assert "one threshold" in done.stdout
    return path


def serve(model: Path, surrogate: Path, texts: dict[str, list[int]]) -> Result:
    settings = {**SETTINGS, "compressor": "kvzap", "counts": "per_head", "surrogate": str(surrogate)}
    return run_in_process(Job(str(model), texts, OUTPUT_TOKENS, ENGINE, settings, ignore_eos=True))


def test_it_predicts_and_the_output_is_exact(
    small_folder: Path, trained: Path, texts: dict[str, list[int]], stock: dict[str, list[int]]
) -> None:
    figures = json.loads(trained.with_suffix(".json").read_text())
    assert [len(figures[part]) for part in ("trained_on", "held_out", "layers")] == [2, 1, SMALL_LAYERS]
    assert figures["mean"]["spearman"] > 0.3
    assert figures["one_threshold"]["overlap_0.25"] > 0.4
    some = dict(list(texts.items())[:3])
    result = serve(small_folder, trained, some)
    assert result.tokens == {name: stock[name] for name in some}
    for summary in result.summaries.values():
        assert (summary["mode"], summary["compressor"]) == ("draft", "kvzap")
        assert summary["rounds"] > 0
        assert summary["compressed_fraction"] < 0.5


@pytest.mark.slow
def test_texts_it_was_trained_on_are_left_out(small_folder: Path, corpus: Path, trained: Path) -> None:
    source = ("--model", small_folder, "--texts", corpus, "--kv-gib", "0.5")
    done = command("eval", trained, *source)
    assert done.returncode == 0, done.stderr
    train, evaluated = (json.loads(trained.with_suffix(s).read_text()) for s in (".json", ".eval.json"))
    assert evaluated["held_out"] == train["held_out"]
    assert evaluated["mean"] == pytest.approx(train["mean"], abs=2e-4)
    held = train["held_out"][0]["name"]
    others = [corpus / f"{n}.txt" for n in NAMES if n not in held]
    done = command("eval", trained, "--model", small_folder, "--texts", *others)
    assert done.returncode == 2
    assert "was trained on all of these texts; give others with --texts" in done.stderr


def test_another_model_is_refused(
    full_folder: Path, small_folder: Path, trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One of another size before its weights are loaded, one with other weights before it serves."""
    mark = file.load(trained).fingerprint
    with pytest.raises(
        ConfigError, match=f"was trained on model {mark}, this model is LlamaForCausalLM-30x3x64; train"
    ):
        check(full_folder, trained)
    with pytest.raises(UnsupportedError, match="tensor_parallel_size is 3"):
        check(small_folder, trained, tensor_parallel_size=3)
    other = tmp_path / "other"
    shutil.copytree(small_folder, other)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.3.input_layernorm.weight"] *= 1.5
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(subprocess.CalledProcessError):
        serve(other, trained, {"a": [1] * 200})
    printed = capfd.readouterr().err
    assert f"was trained on model {mark}, this model is LlamaForCausalLM-{SMALL_LAYERS}x3x64-" in printed


def test_a_missing_file_is_refused_before_anything_starts(small_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the surrogate"):
        check(small_folder, tmp_path / "nothing")


def check(model: Path, surrogate: Path, **arguments: int) -> None:
    config = load({"compressor": "kvzap", "surrogate": str(surrogate)}, {})
    given = {"max_model_len": 512, **arguments}
    check_supported(EngineArgs(model=str(model), **given, **engine_arguments(config, given)).create_engine_config())
