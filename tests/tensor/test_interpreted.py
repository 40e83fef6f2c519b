"""Triton kernels, and vLLM's V2 model runner, on the CPU. The interpreter must be chosen before Triton is imported,
hence processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1] / "interpreted"
ENGINE = TESTS / "engine"
PARTS = {
    "kernels": [TESTS, "--ignore", ENGINE],
    "engine": [ENGINE / "test_v2.py", ENGINE / "test_bitwise.py"],
    "semantics": [ENGINE / "test_v2_semantics.py", ENGINE / "test_v2_packed.py"],
    "certified": [ENGINE / "test_v2_certified.py", ENGINE / "test_v2_shared.py"],
    "elastic": [ENGINE / "test_v2_elastic.py", ENGINE / "test_v2_no_arena.py"],
}


@pytest.mark.parametrize("part", PARTS)
def test_through_the_interpreter(part: str, pytestconfig: pytest.Config) -> None:
    chosen = ["-n", "0", "-m", pytestconfig.option.markexpr, *map(str, PARTS[part])]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=1700,
        cwd=TESTS.parents[1],
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "[100%]" in done.stdout  # not the whole module was skipped
