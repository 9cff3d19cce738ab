"""What it costs that nothing is lost: the classic case with fsync, checksums and lease, and without.

    python tests/benchmarks/durability.py

Two processes of one thread each compute shards of two runs in turn, one as always, one that writes without fsync,
without a checksum in the codecs and in the record, and looks at no lease. Printed: windows/s of each way, both
processes together, and the ratio; per process the ratio of each pair of shards gives the spread.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from tests.benchmarks.classic import build

if TYPE_CHECKING:
    from sensitivity.store import Run

STEPS, ROUNDS = 300_000, 4


@contextlib.contextmanager
def careless() -> Iterator[None]:
    """Without what this benchmark is about."""
    from sensitivity import commits, folders

    with (
        mock.patch.object(folders, "sync", return_value=None),
        mock.patch.object(os, "fsync", return_value=None),
        mock.patch.object(commits, "_end", return_value=""),
        mock.patch.object(commits, "seal", return_value=""),
    ):
        yield


def make_runs(folder: Path) -> None:
    """The same job in two run directories, of which one has a template without checksums."""
    from jobs.prepare import prepare
    from sensitivity import template
    from sensitivity.job import Job
    from sensitivity.placement import Node

    prepared = prepare(Job.load(folder / "job.toml"), [Node(2, 0, 8 * 10**9)])
    for name, checked in (("careful", template.CHECKED), ("careless", ())):
        job = prepared.job.model_copy(update={"run": prepared.job.run.model_copy(update={"path": str(folder / name)})})
        with mock.patch.object(template, "CHECKED", checked):
            replace(prepared, job=job).open_or_create()


def compute(runs: list[Run], which: int, begin: float) -> tuple[np.ndarray, int]:
    """Seconds of every shard of this process, `(shard, way)` in the order of `runs`, and windows a way.

    runs: the careful one, under a lease, and the other.
    """
    from sensitivity.device import use_threads

    use_threads(1, gpu=False)
    from sensitivity.commits import forget
    from sensitivity.worker import Worker

    workers = [Worker(run) for run in runs]
    for worker in workers:
        worker.warm_up()
    seconds, windows = [], 0
    time.sleep(max(0.0, begin - time.time()))
    for turn, shard in enumerate(ROUNDS * list(runs[0].layout.shards())[which::2]):
        spent = [0.0, 0.0]
        for way in (0, 1) if turn % 2 else (1, 0):
            forget(runs[way], shard.index)
            with careless() if way else contextlib.nullcontext():
                start = time.perf_counter()
                record = workers[way].compute(shard)
                spent[way] = time.perf_counter() - start
        seconds.append(spent)
        windows += record.computed
    return np.array(seconds), windows


def main() -> None:
    from sensitivity.lease import owned
    from sensitivity.store import Run

    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        build(folder, STEPS)
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            pool.apply(make_runs, (folder,))
            careful, other = Run.open(folder / "careful"), Run.open(folder / "careless")
            with owned(careful.place) as lease:
                runs = [careful.held(lease), other]
                found = pool.starmap(compute, [(runs, which, time.time() + 20) for which in (0, 1)])
    rates = [sum(windows / seconds[:, way].sum() for seconds, windows in found) for way in (0, 1)]
    ratios = np.concatenate([seconds[:, 1] / seconds[:, 0] for seconds, _ in found])
    print(f"as always  {rates[0]:10,.0f} windows/s")
    print(f"careless   {rates[1]:10,.0f} windows/s")
    print(f"ratio      {rates[0] / rates[1]:10.3f}")
    print(f"by pair of shards: median {np.median(ratios):.3f}, quartiles {np.quantile(ratios, [0.25, 0.75]).round(3)}")


if __name__ == "__main__":
    main()
