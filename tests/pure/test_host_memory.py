"""Memory that is left on a machine, and in a container."""

from pathlib import Path

import pytest

from vericache.store.host_memory import available_bytes

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:   {8 << 20} kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(most: str, used: int, idle: int = 0) -> dict[str, str]:
    folder = "sys/fs/cgroup/"
    stat = f"anon 5\ninactive_file {idle}\n"
    return {folder + "memory.max": f"{most}\n", folder + "memory.current": f"{used}\n", folder + "memory.stat": stat}


def v1(most: int, used: int, idle: int) -> dict[str, str]:
    folder = "sys/fs/cgroup/memory/memory."
    numbers = {"limit_in_bytes": f"{most}", "usage_in_bytes": f"{used}", "stat": f"total_inactive_file {idle}\n"}
    return {folder + name: text for name, text in numbers.items()}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * GIB),
        (v2("max", GIB), 8 * GIB),
        (v2(str(4 * GIB), GIB), 3 * GIB),
        (v2(str(4 * GIB), 3 * GIB, idle=2 * GIB), 3 * GIB),
        (v2(str(64 * GIB), GIB), 8 * GIB),
        (v2(str(GIB), 2 * GIB), 0),
        (v1(4 * GIB, 3 * GIB, GIB), 2 * GIB),
        (v1(2**63 - 4096, GIB, 0), 8 * GIB),
    ],
    ids=["machine", "no limit", "limit", "idle files give way", "large limit", "over it", "v1", "v1 without limit"],
)
def test_the_smaller_of_machine_and_container(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert available_bytes(write(tmp_path, files)) == expected


def test_here() -> None:
    assert available_bytes() > 0
