"""What a machine has, within the limits of its control groups, as either version of them writes it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sensitivity import machine

GB = 10**9


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Write a tree of control groups: the process's own lines, and files by path."""

    def write(own: str, files: dict[str, object]) -> None:
        for name, content in files.items():
            file = tmp_path / "cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{content}\n")
        (tmp_path / "own").write_text(own)
        (tmp_path / "meminfo").write_text("MemAvailable: 90000000 kB\n")

    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: range(16), raising=False)
    return write


def test_a_container_sees_its_limits_at_the_root(groups):
    files = {"memory.max": 8 * GB, "memory.current": 6 * GB, "memory.stat": f"anon 5\ninactive_file {3 * GB}"}
    groups("0::/a/name/of/the/host\n", {**files, "cpu.max": "250000 100000"})
    assert machine.available_memory() == 5 * GB
    assert machine.cores() == 2


def test_the_tightest_of_nested_groups_counts(groups):
    tight = {"slurm/job/memory.max": 4 * GB, "slurm/job/memory.current": GB, "slurm/job/cpu.max": "max 100000"}
    wide = {"slurm/memory.max": 64 * GB, "slurm/memory.current": 8 * GB, "slurm/cpu.max": "800000 100000"}
    groups("0::/slurm/job/step\n", {**tight, **wide, "slurm/job/step/memory.max": "max"})
    assert machine.available_memory() == 3 * GB
    assert machine.cores() == 8


def test_groups_of_version_one(groups):
    own = "4:memory:/job\n2:cpu,cpuacct:/job\n1:name=systemd:/\n0::/\n"
    memory = {"memory.limit_in_bytes": 8 * GB, "memory.usage_in_bytes": 2 * GB, "memory.stat": "inactive_file 1"}
    files = {f"memory/job/{name}": value for name, value in memory.items()}
    unlimited = {"memory/memory.limit_in_bytes": 9223372036854771712, "memory/memory.usage_in_bytes": 5}
    quota = {"cpu/job/cpu.cfs_quota_us": 300000, "cpu/job/cpu.cfs_period_us": 100000, "cpu/cpu.cfs_quota_us": -1}
    groups(own, {**files, **unlimited, **quota, "cpu/cpu.cfs_period_us": 100000})
    assert machine.available_memory() == 6 * GB
    assert machine.cores() == 3


def test_without_groups_the_kernel_tells(groups, monkeypatch):
    groups("", {})
    assert machine.available_memory() == 90_000_000 * 1024
    assert machine.cores() == 16
    monkeypatch.setattr(machine, "_MEMORY", Path("/nowhere"))
    assert machine.available_memory() == 4 << 30


def test_what_was_measured_a_moment_ago_is_not_measured_again(monkeypatch):
    found, now = [5, 7], [100.0]
    monkeypatch.setattr(machine.time, "monotonic", lambda: now[0])

    def measure():
        return found.pop(0)

    assert [machine.recently(measure), machine.recently(measure)] == [5, 5]
    now[0] += 1.5
    assert machine.recently(measure) == 7


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not tell a process's memory")
def test_resident_memory_is_told_after_its_file_was_closed_or_replaced(tmp_path):
    status = Path("/proc/self/status").read_text()
    known = int(status.partition("VmRSS:")[2].split()[0]) * 1024
    assert 0.8 * known < machine.resident_memory() < 1.2 * known
    file = machine._own_pages(os.getpid())
    os.close(file)
    assert 0.8 * known < machine.resident_memory() < 1.2 * known
    (tmp_path / "empty").touch()
    other = os.open(tmp_path / "empty", os.O_RDONLY)
    os.dup2(other, machine._own_pages(os.getpid()))
    os.close(other)
    assert 0.8 * known < machine.resident_memory() < 1.2 * known
