"""The ``vericache`` command without an engine: what it prints, and how it fails."""

from pathlib import Path

import pytest
import yaml

from compressors import METHODS
from vericache.cli import main
from vericache.config import VeriCacheConfig


def test_settings_lists_every_setting(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["settings"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in VeriCacheConfig.model_fields)


def test_settings_with_flags_prints_the_merged_configuration(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("compressor: snapkv\nratio: 0.5\ndraft_length: 7\n")
    monkeypatch.setenv("VERICACHE_RATIO", "0.4")
    assert main(["settings", "--vericache-config", str(file), "--vericache-draft-length", "9"]) == 0
    merged = VeriCacheConfig(**yaml.safe_load(capsys.readouterr().out))
    assert merged == VeriCacheConfig(compressor="snapkv", ratio=0.4, draft_length=9)


def test_methods_lists_every_compressor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["methods"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in METHODS)


@pytest.mark.parametrize("command", ["settings", "serve", "demo"])
def test_a_misspelt_flag_names_the_nearest(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--vericache-draft-lenght", "5"]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"vericache {command}: ")
    assert "--vericache-draft-length" in line


@pytest.mark.parametrize("flags", [["--vericache-ratio", "2"], ["--vericache-draft-length=few"]])
@pytest.mark.parametrize("command", ["settings", "demo"])
def test_a_wrong_value_is_one_line_before_any_work(
    command: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *flags]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert flags[0].partition("=")[0].removeprefix("--vericache-").replace("-", "_") in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "/nowhere/s.safetensors"], "cannot read the surrogate /nowhere/s.safetensors"),
        (["train", "--out", "s", "--strength", "0"], "--strength above 0"),
        (["train", "--out", "s", "--hold-out", "1"], r"--hold-out in [0, 1)"),
        (["train", "--out", "s", "--model", "/nowhere"], "is no model folder"),
    ],
)
def test_surrogate_refuses_before_any_work(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["surrogate", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err


def test_a_value_outside_the_choices_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["settings", "--vericache-policy", "random"])
    assert end.value.code == 2
    assert "staggered" in capsys.readouterr().err


def test_an_unknown_command_names_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["server"])
    assert end.value.code == 2
    assert "serve" in capsys.readouterr().err
