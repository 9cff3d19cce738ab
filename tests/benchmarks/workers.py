"""What a second worker is worth: the same compute-bound job with one worker and with two, in turns.

    python -m tests.benchmarks.workers [--windows 240000] [--turns 3]

LSTM(128) on 60 steps of 2 features, one output, the same setting for all. Printed: windows/s of each run, from its
first shard's start to its last commit, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("RAY_worker_niceness", "0")

import numpy as np

LENGTH, FEATURES, UNITS = 60, 2, 128

JOB = """
model.path = "model.keras"
series.path = "series.npy"
run = {{path = "{folder}/run", workers = {workers}}}
sensitivity = {{kernel = "gradient", windows_per_call = 256}}
"""
MODEL = f"""
import keras
keras.utils.set_random_seed(0)
layers = [keras.Input(({LENGTH}, {FEATURES})), keras.layers.LSTM({UNITS}), keras.layers.Dense(1)]
keras.Sequential(layers).save("model.keras")
"""
RUN = """
import sys
from jobs.driver import How, run_job
from sensitivity import Job
summary = run_job(Job.load(sys.argv[1]), How())
print(summary.rate if summary.complete else 0.0)
"""


def rate(folder: Path, workers: int) -> float:
    """Windows/s of a run in a fresh process and a fresh directory below `folder`."""
    home = Path(tempfile.mkdtemp(dir=folder))
    job = folder / f"{home.name}.toml"
    job.write_text(JOB.format(folder=home.name, workers=workers))
    done = subprocess.run([sys.executable, "-c", RUN, job], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--windows", type=int, default=240_000)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-c", MODEL], cwd=folder, check=True, capture_output=True)
        values = np.random.default_rng(0).standard_normal((given.windows + LENGTH - 1, FEATURES))
        np.save(folder / "series.npy", values)
        rates: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(given.turns):
            for workers, found in rates.items():
                found.append(rate(folder, workers))
                print(f"{workers} worker{'s' if workers > 1 else ''}: {found[-1]:,.0f} windows/s", flush=True)
        one, two = (statistics.median(found) for found in rates.values())
        print(f"two workers give {two / one:.2f} times what one gives")


if __name__ == "__main__":
    main()
