"""The classic case end to end: 38,265 steps, 4 inputs, window 20, LSTM(120, relu) → 100 → 50 → 1.

    python tests/benchmarks/classic.py

Prints, from one process tree: the kernel's own speed in two processes of one thread each; the runs' speed, on Ray from
the first shard's start to the last commit and once all workers are up, and serial; and the largest difference from
`tape.batch_jacobian`.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pandas as pd
import xarray as xr

STEPS, FEATURES, LENGTH = 38_265, 4, 20
JOB = 'model.path = "model.keras"\nseries = {path = "series.csv", time = "time"}\nrun.path = "run"\n'


def build(folder: Path, steps: int = STEPS) -> None:
    from keras import Input, Sequential, layers, utils

    utils.set_random_seed(0)
    stack = [layers.LSTM(120, activation="relu"), layers.Dense(100, "relu"), layers.Dense(50, "relu"), layers.Dense(1)]
    Sequential([Input((LENGTH, FEATURES)), *stack]).save(folder / "model.keras")
    table = pd.DataFrame(np.random.default_rng(0).standard_normal((steps, FEATURES)), columns=list("abcd"))
    table.insert(0, "time", pd.date_range("2000-01-01", periods=steps, freq="h"))
    table.to_csv(folder / "series.csv", index=False)
    (folder / "job.toml").write_text(JOB)


def run(folder: Path, serial: bool) -> tuple[float, float]:
    """Windows/s from the first shard's start to the last commit, and the sum of the workers' own rates."""
    from jobs.driver import How, run_job
    from sensitivity import Job
    from sensitivity.commits import Commit, read_commits

    for old in folder.glob("run*"):
        old.rename(old.with_name(f"old-{time.time_ns()}"))
    summary = run_job(Job.load(folder / "job.toml"), How(serial=serial))
    assert summary.complete
    workers: dict[int, list[Commit]] = {}
    for record in read_commits(summary.run).values():
        workers.setdefault(record.pid, []).append(record)
    own = [
        sum(c.computed for c in some) / (max(c.finished for c in some) - min(c.started for c in some))
        for some in workers.values()
    ]
    return summary.rate, sum(own)


def kernel_alone(folder: Path, seconds: float, begin: float) -> float:
    """Windows/s of the run's kernel in this process, called over and over from `begin` on for `seconds`."""
    from sensitivity.device import use_threads

    use_threads(1, gpu=False)
    from sensitivity.worker import Worker

    worker = Worker(folder / "run")
    size = worker.kernel.setting.windows_per_call
    windows = np.random.default_rng(0).standard_normal((size, LENGTH, FEATURES)).astype("float32")
    worker.warm_up()
    time.sleep(max(0.0, begin - time.time()))
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        worker.kernel(windows)
        calls += 1
    return calls * size / (time.perf_counter() - start)


def worst(folder: Path) -> float:
    """Largest difference from the eager tape, relative to the largest entry, over all windows."""
    import keras
    import tensorflow as tf

    model = keras.models.load_model(folder / "model.keras")
    values = pd.read_csv(folder / "series.csv").drop(columns="time").to_numpy("float32")
    windows = np.lib.stride_tricks.sliding_window_view(values, LENGTH, axis=0).swapaxes(1, 2)
    stored = xr.open_zarr(folder / "run" / "results.zarr")["jacobian"].values[:, 0]
    difference = largest = 0.0
    for start in range(0, len(windows), 4096):
        source = tf.constant(np.ascontiguousarray(windows[start : start + 4096]))
        with tf.GradientTape() as tape:
            tape.watch(source)
            prediction = model(source)
        expected = tape.batch_jacobian(prediction, source).numpy()
        difference = max(difference, float(np.abs(stored[start : start + 4096] - expected).max()))
        largest = max(largest, float(np.abs(expected).max()))
    return difference / largest


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder)
        serial = run(folder, serial=True)
        on_ray = [run(folder, serial=False) for _ in range(3)]
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            begin = time.time() + 12
            alone = sum(pool.starmap(kernel_alone, [(folder, 5.0, begin)] * 2))
        print(f"kernel alone, two processes of one thread  {alone:10,.0f} windows/s")
        print(f"run on Ray, first start to last commit     {', '.join(f'{rate:,.0f}' for rate, _ in on_ray)} windows/s")
        print(f"run on Ray, sum of workers' own rates      {', '.join(f'{rate:,.0f}' for _, rate in on_ray)} windows/s")
        print(f"run --serial                               {serial[0]:10,.0f} windows/s")
        print(f"largest difference from the eager tape     {worst(folder):10.1e} of the largest entry")


if __name__ == "__main__":
    main()
