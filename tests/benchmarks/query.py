"""Questions to a large store: against merely reading and summing it with Dask, and in what memory.

    python tests/benchmarks/query.py [--gigabytes 20] [--lags 20] [--features 5] [--turns 3]

The store is laid out and encoded like a run's, with chunks of 32 MB of correlated random numbers. A few of them are
written and linked under all names, so that a store of any size is read from memory and takes no room on the disk: what
is timed is decoding and reducing. Each question runs in a process of its own, with as many threads as there are cores;
the fastest of some turns counts, in which all take part in turn. Printed: seconds, MB/s, the share of the speed of
summing, and the process's peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

DISTINCT = 4
CHUNK_BYTES, LABELS = 32 << 20, 1 << 20
PLAIN = (
    "importance",
    "mean",
    "mean-abs",
    "rms",
    "std",
    "min",
    "max",
    "share-positive",
    "lag-profile",
    "effective-memory",
)
SERIES = ("gradient-input", "elasticity")
ALL = (*PLAIN, "quantiles", *SERIES, "dgsm", "active-subspace")
SETS = {
    "sum": (),
    "importance": ("importance",),
    "ten statistics": PLAIN,
    "and quantiles": (*PLAIN, "quantiles"),
    "and gradient × input, elasticity": (*PLAIN, "quantiles", *SERIES),
    "all": ALL,
}


def make_store(folder: Path, windows: int, lags: int, features: int) -> None:
    import xarray as xr
    import zarr

    from sensitivity.template import CHECKED, CODEC

    chunk = CHUNK_BYTES // (4 * lags * features)
    group = zarr.open_group(folder, mode="w")
    options = {"dtype": "float32", "fill_value": np.nan, "compressors": (CODEC, *CHECKED)}
    keys = {"name": "default", "separator": "."}
    shape = (windows, 1, 1, lags, features)
    jacobian = group.create_array(
        "jacobian",
        shape=shape,
        chunks=(chunk, *shape[1:]),
        dimension_names=("time", "output_step", "output", "lag", "feature"),
        chunk_key_encoding=keys,
        **options,
    )
    random = np.random.default_rng(0)
    sizes = np.exp(-np.arange(lags)[::-1] / 5)[:, None] * np.linspace(0.1, 1, features)
    for i in range(min(DISTINCT, -(-windows // chunk))):
        rows = min(chunk, windows - i * chunk)
        state = random.standard_normal((rows // 50 + 2, 1, 1, lags, features)).repeat(50, axis=0)[:rows]
        values = (0.5 + state + 0.2 * random.standard_normal((rows, 1, 1, lags, features))) * sizes
        jacobian[i * chunk : i * chunk + rows] = values.astype("float32")
    for i in range(DISTINCT, windows // chunk):
        os.link(folder / "jacobian" / f"c.{i % DISTINCT}.0.0.0.0", folder / "jacobian" / f"c.{i}.0.0.0.0")
    minutes = {"units": "minutes since 2001-01-01", "calendar": "proleptic_gregorian"}
    time = group.create_array(
        "time", shape=(windows,), chunks=(LABELS,), dtype="int64", dimension_names=("time",), attributes=minutes
    )
    for start in range(0, windows, LABELS):
        time[start : start + LABELS] = np.arange(start, min(windows, start + LABELS))
    labels = {"lag": np.arange(lags)[::-1], "output_step": [0], "input_std": ("feature", np.ones(features))}
    xr.Dataset(coords=labels).to_zarr(folder, mode="a", zarr_format=3)


def opened(folder: Path):
    """The store as `open_run` gives one, with predictions and inputs made up on the way."""
    import dask.array as da

    from sensitivity.query import opening

    dataset = opening.opened(folder)
    windows, *_, lags, features = dataset["jacobian"].shape
    chunk = dataset["jacobian"].encoding["chunks"][0]
    block = chunk * max(1, opening.BLOCK_BYTES // (4 * chunk * lags * features))
    dataset["jacobian"] = dataset["jacobian"].variable.chunk({"time": block})
    steps = np.random.default_rng(1).standard_normal((block + lags - 1, features)).astype("float32")
    view = np.lib.stride_tricks.sliding_window_view(steps, lags, axis=0).swapaxes(1, 2)
    numbers = da.arange(windows, chunks=block)
    known = {"dtype": "float32", "meta": np.empty((0, 0, 0), "float32"), "new_axis": [1, 2]}
    inputs = da.map_blocks(lambda n: view[: len(n)], numbers, chunks=(numbers.chunks[0], lags, features), **known)
    prediction = da.map_blocks(lambda n: steps[: len(n), :1, None], numbers, chunks=(numbers.chunks[0], 1, 1), **known)
    return dataset.assign(
        input=(("time", "lag", "feature"), inputs), prediction=(("time", "output_step", "output"), prediction)
    ).assign_coords(
        committed=("time", np.broadcast_to(np.True_, windows)),
        feature=[f"x_{i}" for i in range(features)],
        output=["y"],
    )


def child(folder: Path, names: list[str]) -> None:
    import dask

    from sensitivity import query

    dataset = opened(folder)
    if names:
        warm = query.ask(dataset.isel(time=slice(0, 100)), names)  # compiled, which a machine does once
        dask.compute(*warm.values())
    started = time.perf_counter()
    if names:
        dask.compute(*query.ask(dataset, names).values())
    else:
        dataset["jacobian"].data.sum().compute()
    seconds = time.perf_counter() - started
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"seconds": seconds, "peak": int(peak.split()[1]) * 1024}))


def asked(folder: Path, names: tuple[str, ...]) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", str(folder), *names]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--lags", type=int, default=20)
    parser.add_argument("--features", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    windows = int(given.gigabytes * 1e9 / (4 * given.lags * given.features))
    chunk = CHUNK_BYTES // (4 * given.lags * given.features)
    windows -= windows % chunk
    size = 4 * windows * given.lags * given.features
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "results.zarr"
        make_store(folder, windows, given.lags, given.features)
        print(f"{size / 1e9:.1f} GB, {windows:,} windows of {given.lags} lags and {given.features} features")
        turns = [{title: asked(folder, names) for title, names in SETS.items()} for _ in range(given.turns)]
    least = {title: min(turn[title]["seconds"] for turn in turns) for title in SETS}
    for title, seconds in least.items():
        peak = max(turn[title]["peak"] for turn in turns)
        share = least["sum"] / seconds
        speed = f"{seconds:7.2f} s {size / 1e6 / seconds:7,.0f} MB/s  {share:5.0%} of sum"
        print(f"{title:<34} {speed}  {peak / 1e6:5,.0f} MB")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
