"""What this machine has: cores, memory, and what this process has used of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """Cores this process may use: its CPU affinity, within the container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        count = min(count, max(1, int(quota) // int(period)))
    return count


def available_memory() -> int:
    """Bytes that can be taken without swapping: what the kernel says is available, within the container's limit."""
    available = _status_bytes(Path("/proc/meminfo"), "MemAvailable") or 4 << 30
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        available = min(available, max(0, int(limit) - int(used)))
    return available


def peak_memory() -> int:
    """Peak resident bytes of this process."""
    peak = _status_bytes(Path("/proc/self/status"), "VmHWM")
    if peak is None:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _status_bytes(path: Path, name: str) -> int | None:
    for line in _read(path).splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return None
