"""``vericache demo`` on the small model: the report of two engines, compared."""

import json
import os
import subprocess
import sys
from pathlib import Path

from vericache.demo.worker import ENVIRONMENT


def test_demo_reports_identity_and_bytes(small_folder: Path, tmp_path: Path) -> None:
    report, picture = tmp_path / "demo.json", tmp_path / "schedule.png"
    names = ["extract_json", "continue_code"]
    command = [sys.executable, "-m", "vericache.cli", "demo", "--model", small_folder, "--tokens", 24]
    command += ["--json", report, "--png", picture, "--vericache-draft-length", 8, "--prompts", *names]
    environment = {**os.environ, **ENVIRONMENT, "COLUMNS": "160"}
    ran = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert all(name in ran.stdout for name in names)
    found = json.loads(report.read_text())
    assert found["identical"] is True
    assert [r["name"] for r in found["requests"]] == names
    for request in found["requests"]:
        assert request["identical"] is True
        assert request["mode"] == "draft"
        assert 1 <= request["acceptance_length"] <= 9
        assert {"P", "C", "D", "V"} <= set(found["schedule"][request["name"]])
    assert found["rounds"] == sum(r["rounds"] for r in found["requests"]) > 0
    assert found["reload_bytes"] > 0
    assert 0 < found["peak_kv_bytes"] < found["peak_kv_bytes_full_kv"]
    assert picture.read_bytes().startswith(b"\x89PNG")
