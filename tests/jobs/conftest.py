"""What tests of jobs share: commands and runs, a small job, and the bytes that it gives when nothing happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner, Result

from jobs import driver
from jobs.cli import main
from jobs.driver import How, run_job
from sensitivity.job import Job
from tests.chaos.harness import HOOKS, ROOT
from tests.conftest import frame, job_writer

# Ctrl-C reaches it even where the tests run in the background, which would leave it ignored.
SENSITIVITY = [
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from jobs.cli import main; main()",
]
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


def until(is_so: Callable[[], bool], process: subprocess.Popen) -> None:
    """Wait for what a process that goes on brings about."""
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@dataclass(frozen=True)
class Held:
    """Shards that processes wait at before they begin them; only those processes that were started since."""

    folder: Path

    def hold(self, shard: int) -> None:
        (self.folder / f"held shard {shard}").touch()

    def is_reached(self, shard: int) -> bool:
        return (self.folder / f"reached shard {shard}").exists()

    def release(self) -> None:
        for file in self.folder.glob("held *"):
            file.unlink()


@pytest.fixture
def held(tmp_path, monkeypatch) -> Iterator[Held]:
    """Keeps runs at work for as long as a test needs them to be, on machines of any speed."""
    folder = tmp_path / "held"
    folder.mkdir()
    paths = [str(HOOKS), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("CHAOS_DIR", str(folder))
    found = Held(folder)
    yield found
    found.release()  # a test that failed leaves nobody waiting


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
