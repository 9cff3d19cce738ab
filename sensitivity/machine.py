"""What this machine has: cores, memory, and what this process has used of them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_CGROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_MEMORY, _STATUS = Path("/proc/meminfo"), Path("/proc/self/status")
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
UNKNOWN = "unknown"
_highest = 0


def cores() -> int:
    """Cores this process may use: its CPU affinity, within the container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for quota, period in _quotas():
        if quota.isdigit() and period.isdigit():
            count = min(count, max(1, int(quota) // int(period)))
    return count


def _quotas() -> Iterator[tuple[str, str]]:
    """(microseconds of all cores, period) of each control group, as version 2 and version 1 of them have it."""
    for group in _groups("", "cpu.max"):
        quota, _, period = _read(group / "cpu.max").partition(" ")
        yield quota, period
    for group in _groups("cpu", "cpu.cfs_quota_us"):
        yield _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")


def available_memory() -> int:
    """Bytes that can be taken without swapping: what the kernel says is available, within the container's limits."""
    available = _status_bytes(_MEMORY, "MemAvailable") or 4 << 30
    for limit, used in _limits():
        available = min(available, max(0, limit - used))
    return available


def recently(measure: Callable[[], int]) -> int:
    """What a measurement of this machine gave, where it was taken less than a second ago; else what it gives now.

    Reading the system's files takes as long as computing a few small windows.
    """
    at, value = _measured.get(measure, (-math.inf, 0))
    if time.monotonic() - at > _RECENT_SECONDS:
        at, value = _measured[measure] = time.monotonic(), measure()
    return value


_RECENT_SECONDS = 1.0
_measured: dict[Callable[[], int], tuple[float, int]] = {}


def _limits() -> Iterator[tuple[int, int]]:
    """(limit, used) bytes of each control group that has a limit. Cached files are not in use: they make room."""
    kinds = {"": ("memory.max", "memory.current", "inactive_file"), "memory": _LIMITS_OF_VERSION_1}
    for controller, (limit, used, cached) in kinds.items():
        for group in _groups(controller, limit):
            most, now = _read(group / limit), _read(group / used)
            if most.isdigit() and now.isdigit():
                yield int(most), int(now) - _statistic(group / "memory.stat", cached)


_LIMITS_OF_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _groups(controller: str, file: str) -> tuple[Path, ...]:
    """This process's control group and those around it that have `file`; controller: "" in version 2.

    In a container the names are often the host's: what is not there is passed over, the root is always looked at.
    """
    return _groups_with(_CGROUPS / controller, controller, file, _read(_OWN_GROUPS))


@functools.lru_cache(maxsize=64)
def _groups_with(root: Path, controller: str, file: str, own_groups: str) -> tuple[Path, ...]:
    found: list[Path] = []
    for line in own_groups.splitlines() or ["0::/"]:
        _, controllers, name = line.split(":", 2)
        if controller in controllers.split(","):
            own = root / name.strip("/")
            found += (group for group in (own, *own.parents) if (group / file).exists())
    return tuple(found)


def _statistic(path: Path, name: str) -> int:
    return _counted(path, name) or 0


def out_of_memory_kills() -> int | None:
    """A count that rises whenever the kernel kills a process for want of memory; None where it does not say."""
    counts = [_counted(group / "memory.events", "oom_kill") for group in _groups("", "memory.events")]
    found = [count for count in (*counts, _counted(Path("/proc/vmstat"), "oom_kill")) if count is not None]
    return sum(found) if found else None


def _counted(path: Path, name: str) -> int | None:
    return next((int(line.split()[1]) for line in _read(path).splitlines() if line.startswith(f"{name} ")), None)


def resident_memory() -> int:
    """Resident bytes of this process; 0 where the system does not say."""
    for _ in range(2):
        try:
            file = _own_pages(os.getpid())
            return 0 if file is None else int(os.pread(file, 256, 0).split()[1]) * _PAGE
        except (OSError, ValueError, IndexError):  # somebody closed the file, or has another one of its number
            _own_pages.cache_clear()
    return 0


@functools.lru_cache(maxsize=1)
def _own_pages(pid: int) -> int | None:
    """The file of this process's pages, held open: it is read in 2 µs, and opened and searched in 20."""
    try:
        return os.open(f"/proc/{pid}/statm", os.O_RDONLY)
    except OSError:
        return None


def peak_memory() -> int:
    """Peak resident bytes of this process."""
    return max(_highest, recent_peak())


def recent_peak() -> int:
    """Peak resident bytes of this process since the last `restart_peak` that worked."""
    peak = _status_bytes(_STATUS, "VmHWM")
    if peak is None:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak


@contextlib.contextmanager
def span() -> Iterator[Callable[[], int | None]]:
    """Yields what tells the peak resident bytes since; None where the system does not let it be known."""
    global _highest
    known, before = restart_peak(), peak_memory()
    _highest = 0
    try:
        yield lambda: peak_memory() if known else None
    finally:
        _highest = max(before, peak_memory())


def restart_peak() -> bool:
    """Begin to measure the peak anew; whether the system lets us."""
    global _highest
    _highest = peak_memory()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def trim() -> None:
    """Give the system back what the C library keeps of freed memory, where it is one that can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def processor() -> str:
    """The processor's name."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _read(path: Path) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


def _status_bytes(path: Path, name: str) -> int | None:
    for line in _read(path).splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return None


def this_machine() -> str:
    """What tells machines apart whose process numbers are not the same: the boot, and a container's own numbering."""
    boot = _read(Path("/proc/sys/kernel/random/boot_id")) or platform.node()
    try:
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return boot


def started(pid: int) -> str | None:
    """When a process of this machine started, in the system's own terms; None where there is no such process.

    With its number it names a process for ever: numbers are given out again.
    """
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    if fields:
        return None if fields[0] in "ZX" else fields[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return UNKNOWN
