"""What tests of jobs share: commands and runs, a small job, and the bytes that it gives when nothing happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner, Result

from jobs import driver
from jobs.cli import main
from jobs.driver import How, run_job
from sensitivity.job import Job
from tests.conftest import frame, job_writer

SENSITIVITY = [sys.executable, "-c", "from jobs.cli import main; main()"]
PATIENCE = 300.0  # seconds, with a busy machine
RUNNERS = pytest.mark.parametrize("how", [How(serial=True), How()], ids=["serial", "ray"])
KNOBS = {"kernel": "gradient", "windows_per_call": 2}  # timed, another might be taken, that rounds otherwise


def rerouted(file: Path, name: str, old: str = "run") -> Path:
    """The same job into another run directory."""
    other = file.with_name(f"{name}.toml")
    other.write_text(file.read_text().replace(f'path = "{old}"', f'path = "{name}"'))
    return other


def contents(run: Path) -> dict[str, bytes]:
    """Every byte of the store."""
    store = run / "results.zarr"
    return {str(file.relative_to(store)): file.read_bytes() for file in sorted(store.rglob("*")) if file.is_file()}


def start(*arguments: str, cwd: Path) -> subprocess.Popen:
    pipe = subprocess.PIPE
    return subprocess.Popen([*SENSITIVITY, *arguments], cwd=cwd, stdout=pipe, stderr=pipe, text=True)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def small_job(write_job, **run) -> Path:
    """20 shards of 50 windows."""
    return write_job(series=frame(1005), sensitivity=KNOBS, run={"shard_windows": 50, **run})


@contextmanager
def after(commits: int, act: Callable[[], object]) -> Iterator[None]:
    """Do something in the driver once it has heard of so many commits."""
    add, heard = driver._Tally.add, []

    def adding(tally, outcome):
        add(tally, outcome)
        heard.append(outcome)
        if len(heard) == commits:
            act()

    with mock.patch.object(driver._Tally, "add", adding):
        yield


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> dict[str, bytes]:
    """What the store of `small_job` holds when nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run_job(Job.load(small_job(job_writer(folder))), How(serial=True)).complete
    return contents(folder / "run")
