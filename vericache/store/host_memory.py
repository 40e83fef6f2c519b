"""How much host memory can be had: what the machine has left, or the container this process runs in."""

from pathlib import Path

ROOT = Path("/")


def available_bytes(root: Path = ROOT) -> int:
    """The smaller of MemAvailable and what the memory limit of this process's control group (Docker, Kubernetes)
    leaves. Beyond the first an allocation fails or swaps; beyond the second the kernel kills who touches it."""
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    machine = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    groups = [left for left in (_group_v2(root), _group_v1(root)) if left is not None]
    return min([machine, *groups])


def _group_v2(root: Path) -> int | None:
    folder = root / "sys/fs/cgroup"
    return _left(folder / "memory.max", folder / "memory.current", folder / "memory.stat", "inactive_file")


def _group_v1(root: Path) -> int | None:
    folder = root / "sys/fs/cgroup/memory"
    used = folder / "memory.usage_in_bytes"
    return _left(folder / "memory.limit_in_bytes", used, folder / "memory.stat", "total_inactive_file")


def _left(limit: Path, used: Path, stat: Path, cache: str) -> int | None:
    """Bytes below a limit; None where there is none. Cached files that nobody uses count as used, but give way."""
    try:
        most = limit.read_text(encoding="ascii").strip()
        if not most.isdecimal():  # "max"
            return None
        idle = dict(line.split() for line in stat.read_text(encoding="ascii").splitlines()).get(cache, "0")
        return max(0, int(most) - int(used.read_text(encoding="ascii")) + int(idle))
    except FileNotFoundError:
        return None
