"""What a run costs its driver, and readers, when it has very many shards of trivial work.

    python tests/benchmarks/scale.py [--shards 100000] [--simulated 1000000]

A run of one window a shard goes through as always: series, model, template, two workers on Ray, chunks, records, all on
the disk (TMPDIR says which). Printed: what the driver's process takes a shard (all its threads, Ray's among them), and
the thread that hears of shards alone; how much its memory grows; how long `status` and planning a resumption take then.
The same for more shards by simulation: workers that compute nothing, and leave empty chunks and a record behind.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("RAY_worker_niceness", "0")

import numpy as np

from jobs import roster
from jobs.deaths import Origin
from sensitivity.commits import Commit, _sealed, chunk_keys, record_name

if TYPE_CHECKING:
    from sensitivity.plan import Shard
    from sensitivity.store import Run

JOB = """
model.path = "model.keras"
series.path = "series.npy"
sensitivity = {kernel = "gradient", windows_per_call = 1}
run = {path = "run", shard_windows = 1, workers = 2}
"""
MODEL = """
import keras
keras.Sequential([keras.Input((4, 1)), keras.layers.Flatten(), keras.layers.Dense(1)]).save("model.keras")
"""


def make_job(folder: Path, shards: int) -> Path:
    subprocess.run([sys.executable, "-c", MODEL], cwd=folder, check=True, capture_output=True)
    np.save(folder / "series.npy", np.random.default_rng(0).standard_normal((shards + 3, 1)))
    (folder / "job.toml").write_text(JOB)
    return folder / "job.toml"


class Watch:
    """The driver's time and memory from the first shard it hears of to the last."""

    def __init__(self) -> None:
        self.heard = 0

    def hear(self) -> None:
        self.heard += 1
        if self.heard == 100:  # by then everything is imported and every worker known
            self._began = time.process_time(), time.thread_time(), time.perf_counter(), resident()
        if self.heard >= 100:
            self._now = time.process_time(), time.thread_time(), time.perf_counter()

    def report(self) -> str:
        shards = self.heard - 100
        own, loop, wall = (1e3 * (now - began) / shards for now, began in zip(self._now, self._began, strict=False))
        grown = (resident() - self._began[3]) / 1e6
        return (
            f"{shards:,} shards at {1e3 / wall:,.0f} a second; driver {own:.3f} ms a shard, its loop {loop:.3f} ms; "
            f"memory grown by {grown:.0f} MB"
        )


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def watched() -> Iterator[Watch]:
    from jobs import driver

    watch, add = Watch(), driver._Tally.add

    def adding(tally: driver._Tally, outcome: object) -> None:
        add(tally, outcome)
        watch.hear()

    with mock.patch.object(driver._Tally, "add", adding):
        yield watch


class Trivial:
    """In place of `ShardWorker`: leaves the files of a shard behind and computes nothing."""

    def __init__(self, run: Run, *_: object) -> None:
        self._run = run

    def origin(self) -> Origin:
        return Origin.here()

    def set_up(self, _: object) -> None: ...

    def finish(self) -> list[tuple[int, Commit]]:
        return []

    def compute(self, call: int, shard: Shard, attempt: int, held: bool) -> list[tuple[int, Commit]]:
        run, now = self._run, time.time()
        chunks = dict.fromkeys(chunk_keys(run, shard), "00000000")
        for key in chunks:
            (run.place.path / "results.zarr" / key).touch()
        setting = run.choice.setting.to_json()
        record = Commit(
            shard.index,
            shard.start,
            shard.stop,
            run.fingerprint,
            chunks,
            1,
            0,
            0,
            attempt,
            "here",
            os.getpid(),
            now,
            now,
            1,
            setting,
            token=run.token,
        )
        (run.place.path / "commits" / record_name(shard.index)).write_bytes(_sealed(record))
        return [(call, record)]


def measure(file: Path, what: str) -> None:
    from jobs.driver import How, run_job
    from sensitivity.job import Job

    with watched() as watch:
        summary = run_job(Job.load(file), How())
    print(f"{what}: complete: {summary.complete}: {watch.report()}")
    readers(summary.run)


def readers(run: Run) -> None:
    from jobs.driver import _to_compute
    from jobs.status import look
    from sensitivity.standing import stand
    from sensitivity.store import Run

    fresh = Run.open(run.place)
    print(
        f"status {seconds(lambda: look(fresh)):.2f} s, planning a resumption "
        f"{seconds(lambda: _to_compute(fresh, stand(fresh), [])):.2f} s, store listing of "
        f"{run.layout.shard_count:,} shards included"
    )


def seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--simulated", type=int, default=1_000_000)
    given = parser.parse_args()
    if given.shards:
        with tempfile.TemporaryDirectory() as folder:
            measure(make_job(Path(folder), given.shards), "a run")
    if given.simulated:
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(roster, "ShardWorker", Trivial):
            measure(make_job(Path(folder), given.simulated), "simulated")


if __name__ == "__main__":
    main()
