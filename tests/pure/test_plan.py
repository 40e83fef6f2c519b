"""``vericache plan``: what it prints, and how it fails."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from vericache.cli import main
from vericache.config import VeriCacheConfig
from vericache.errors import ConfigError
from vericache.plan.geometry import geometry
from vericache.plan.gpus import GPUS

CARD = ["--hbm-gb", "96", "--hbm-gbps", "1600", "--link-gbps", "64"]
SIZES = ["--weights-gb", "48", "--kv-gb", "5"]
LLAMA_8B = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def folder(tmp_path: Path, **changes: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | changes))
    return str(tmp_path)


def test_the_worked_example(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(
        capsys, *SIZES, *CARD, "--batch", "6", "--ratio", "0.2", "--draft-length", "25", "--acceptance", "0.85"
    )
    assert found["t_gpu_ms"] == pytest.approx(34.5)
    assert found["t_xfer_ms"] == pytest.approx(18.75)
    assert found["c_star"] == pytest.approx(-0.64)
    assert found["limit"] == "memory"
    assert found["tokens_per_cycle"] == pytest.approx(22.25)
    assert found["link_limit_tokens_per_cycle"] == pytest.approx(12.5)
    staggered = found["modes"]["staggered"]
    assert staggered["tokens_per_s"] == pytest.approx(149, rel=0.005)
    assert staggered["host_memory_gib"] == 28
    assert found["modes"]["plain"]["tokens_per_s"] == pytest.approx(6 / 48.75e-3)
    assert found["break_even_acceptance"] == pytest.approx((123.08 * 26 * 34.5e-3 / 6 - 1) / 25, rel=0.001)


def test_what_is_recommended_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    best = plan(capsys, *SIZES, *CARD, "--acceptance", "0.85")["recommended"]
    assert best["mode"] == "staggered"
    assert best["speedup"] > 1
    config = VeriCacheConfig(**best["settings"])
    assert (config.ratio, config.draft_length, config.policy) == (best["ratio"], best["draft_length"], best["mode"])
    assert plan(capsys, *SIZES, *CARD, "--acceptance", "0.1")["recommended"]["settings"] == {"mode": "off"}


def test_a_model_folder_and_a_known_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = plan(capsys, "--model", folder(tmp_path), "--gpu", "h200", "--context", "32000", "--output-tokens", "384")
    assert found["weights_gb"] == pytest.approx(16.06, rel=0.001)
    assert found["kv_gb"] == pytest.approx(131072 * 32192 / 1e9)
    assert found["c"] == pytest.approx((0.25 * 32000 + 192) / 32192)
    assert found["acceptance_assumed"]
    assert found["recommended"]["mode"] == "plain"  # its memory is far faster than its link
    assert found["modes"]["staggered"]["speedup"] < 0.5


def test_given_figures_replace_those_of_a_known_gpu_and_several_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, *SIZES, "--gpu", "h100", "--link-gbps", "25", "--gpus", "2")
    assert found["link_gbps"] == pytest.approx(50)
    assert found["hbm_gbps"] == pytest.approx(2 * GPUS["h100"].machine.bandwidth / 1e9)


def test_packed_pages_take_fewer_bytes_and_simulated_ones_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    c = {name: plan(capsys, *SIZES, *CARD, "--page-format", name)["c"] for name in ("plain", "turboquant4", "kvquant4")}
    assert 0.06 < c["turboquant4"] < 0.07
    assert c["kvquant4"] == c["plain"] == pytest.approx(0.25)


def test_remote_prefixes(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, *SIZES, *CARD, "--remote-gbps", "2", "--batch", "10")["remote"]
    assert found["start_s"] == pytest.approx(0.25 * 5 / 2)
    assert found["remote_gpus_per_local"] > 0
    assert found["drafting"]["rows"] == 10


def test_the_tables_name_every_mode_and_the_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["plan", *SIZES, *CARD, "--acceptance", "0.85", "--remote-gbps", "2"]) == 0
    printed = capsys.readouterr().out
    for word in (
        "plain",
        "short",
        "lockstep",
        "staggered",
        "--vericache-ratio",
        "--vericache-host-memory-gib",
        "remote",
    ):
        assert word in printed


def test_the_tables_where_drafting_never_pays(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SIZES, "--gpu", "h200"]) == 0
    printed = capsys.readouterr().out
    assert "never at this ratio and draft length" in printed
    assert "recommended  plain vLLM (--vericache-mode off)" in printed


def test_a_machine_without_room_to_draft(capsys: pytest.CaptureFixture[str]) -> None:
    """One full context fits, and nothing besides."""
    found = plan(capsys, *SIZES, *CARD[2:], "--hbm-gb", "54")
    assert set(found["modes"]) == {"plain", "short"}
    assert found["t_gpu_ms"] is None
    assert main(["plan", *SIZES, *CARD[2:], "--hbm-gb", "54"]) == 0


def test_the_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", *SIZES, *CARD, "--png", str(tmp_path / "new" / "plan.png")]) == 0
    assert (tmp_path / "new" / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_picture_is_a_clear_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plan", *SIZES, *CARD, "--png", str(tmp_path / "plan.png")]) == 2
    assert "matplotlib, which draws" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*CARD], "expected --model and --context, or --weights-gb and --kv-gb"),
        ([*SIZES], "expected --gpu, or all of --hbm-gb, --hbm-gbps and --link-gbps"),
        ([*SIZES, *CARD[:4]], "expected --gpu, or all of"),
        ([*SIZES, *CARD, "--context", "9"], "--kv-gb is the KV of a whole context"),
        ([*SIZES, *CARD, "--ratio", "1.5"], "--ratio is 1.5"),
        ([*SIZES, *CARD, "--acceptance", "1.5"], "expected a share in [0, 1]"),
        ([*SIZES, *CARD, "--page-format", "zip"], "unknown --page-format 'zip', expected one of plain"),
        ([*SIZES, *CARD, "--page-format", "kivi4", "--page-tokens", "9"], "multiples of 8"),
        ([*SIZES, *CARD, "--remote-gbps", "2", "--local-share", "2"], "a share in (0, 1]"),
        ([*SIZES, *CARD[2:], "--hbm-gb", "50"], "exceed the memory of 50.0 GB"),
        (["--model", "/nowhere", "--context", "9", *CARD], "cannot read the model config /nowhere"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1


@pytest.mark.parametrize("flag", ["--batch", "--kv-gb", "--draft-length"])
def test_sizes_are_positive(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", *SIZES, *CARD, flag, "0"])
    assert end.value.code == 2
    assert "0 is not positive" in capsys.readouterr().err


def test_context_is_needed_beside_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "--model", folder(tmp_path), *CARD]) == 2
    assert "expected --context" in capsys.readouterr().err


def test_bytes_of_a_model() -> None:
    found = geometry(LLAMA_8B)
    assert (found.weight_bytes, found.kv_per_token) == (16_059_990_016, 131_072)
    assert geometry(LLAMA_8B | {"tie_word_embeddings": True}).weight_bytes == 16_059_990_016 - 2 * 128256 * 4096
    assert geometry(LLAMA_8B | {"head_dim": 64}).kv_per_token == 65_536


@pytest.mark.parametrize("field", [{"num_experts": 64}, {"quantization_config": {"bits": 4}}])
def test_weights_that_a_config_does_not_tell_have_to_be_given(
    field: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--model", folder(tmp_path, **field), "--context", "8000", *CARD]
    assert main(["plan", *arguments]) == 2
    assert "give --weights-gb" in capsys.readouterr().err
    assert plan(capsys, *arguments, "--weights-gb", "9")["weights_gb"] == 9


@pytest.mark.parametrize("field", [{"kv_lora_rank": 512}, {"layer_types": ["full_attention", "sliding_attention"]}])
def test_attention_that_is_not_served_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected full attention"):
        geometry(LLAMA_8B | field)


def test_a_config_of_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no num_hidden_layers, num_attention_heads"):
        geometry({"hidden_size": 4})
