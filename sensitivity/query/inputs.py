"""The inputs that derivatives belong to: each window of the series, beside its Jacobian."""

from __future__ import annotations

import functools
import threading

import dask.array as da
import numpy as np
import pyarrow as pa
import xarray as xr

from ..errors import Refused
from ..integrity import require_series
from ..readers import open_reader
from ..series import Series
from ..store import Run
from ..windows import joined
from .roles import main_of, roles_of

_reading = threading.RLock()  # files of Parquet and NetCDF are opened and read by one thread at a time


def with_inputs(dataset: xr.Dataset) -> xr.Dataset:
    """The dataset of a run with `input` beside its `jacobian`: lazy, in units of the series, in the run's dtype.

    `(time, lag, feature)`; `(time, output_step, lag, feature)` where lags count back from each output's own step, 0
    before the window. Read from the series of the run, once it is found, wherever a block is computed, to be what
    the run was made of. Raises `Refused` where the dataset is not of a run; so does computing it, where the series is
    gone or has changed.
    """
    if "input" in dataset:
        return dataset
    if not roles_of(dataset).by_input:
        raise Refused(
            "inputs",
            given=f"those beside {roles_of(dataset)}",
            allowed="inputs beside a product with a lag and a feature",
            remedy="leave them out",
        )
    run = _run(dataset)
    features = np.atleast_1d(dataset["feature"].values).tolist()
    lags = np.atleast_1d(dataset["lag"].values).tolist()
    by_step = "output_step" in roles_of(dataset).dims and _by_output_step(run)
    steps: list[int | None] = _positions(dataset, run) if by_step else [None]
    dims: tuple[str, ...] = ("time", "output_step", "lag", "feature")
    blocks = _inputs(dataset, run, steps, lags, features)
    if not by_step:
        dims, blocks = ("time", "lag", "feature"), blocks[:, 0]
    array = xr.DataArray(blocks, dims=dims, attrs={"long_name": "input of the model, in units of the series"})
    gone = [dim for dim in dims if dim not in dataset[main_of(dataset)].dims]
    return dataset.assign(input=array.squeeze(gone, drop=True))


def _positions(dataset: xr.Dataset, run: Run) -> list[int | None]:
    """The steps of the window that outputs stand at."""
    if "step_lag" not in dataset.coords:
        return np.atleast_1d(dataset["output_step"].values).tolist()
    return (run.windows.length - 1 - np.atleast_1d(dataset["step_lag"].values)).tolist()


def newest(dataset: xr.Dataset, feature: str) -> da.Array:
    """A feature of the series at each window's last step: lazy `(time)`, in units of the series."""
    return _inputs(dataset, _run(dataset), [None], [0], [feature])[:, 0, 0, 0]


def features_of(dataset: xr.Dataset) -> list[str]:
    """Every feature of the run's series; none where the dataset does not say which run it is of."""
    return list(_run(dataset).survey.features) if {"run"} <= {*dataset.attrs} else []


def time_blocks(dataset: xr.Dataset) -> tuple[int, ...]:
    """How many windows each block of the Jacobian has, or of what the run is about."""
    jacobian = dataset[main_of(dataset)].variable
    return jacobian.chunksizes["time"] if jacobian.chunks else (dataset.sizes["time"],)


def _by_output_step(run: Run) -> bool:
    """As `CallFacts.by_output_step`, without TensorFlow."""
    model = run.content["model"]
    every_step = model["scan"] and model["scan"]["outputs"] > 0 and len(model["target_shape"]) == 2
    return bool(every_step) and model.get("max_lag") is not None


def _run(dataset: xr.Dataset) -> Run:
    if "run" in dataset.attrs and "window" in dataset.coords:
        return Run.open(dataset.attrs["run"])
    raise Refused(
        "dataset",
        given="one that does not say which run it is of",
        allowed="what sensitivity.open_run returned, or a selection of it",
        remedy="open the run with sensitivity.open_run",
    )


def _inputs(dataset: xr.Dataset, run: Run, steps: list[int | None], lags: list[int], features: list[str]) -> da.Array:
    """`(time, step, lag, feature)`, in blocks of the Jacobian's."""
    windows = da.asarray(dataset["window"].data).rechunk((time_blocks(dataset),), method="tasks")
    columns = [run.survey.features.index(str(name)) for name in features]
    read = functools.partial(_read, path=str(run.place), seal=run.fingerprint, steps=steps, lags=lags, features=columns)
    return da.map_blocks(
        read,
        windows,
        dtype=run.job.run.dtype,
        chunks=(windows.chunks[0], (len(steps),), (len(lags),), (len(features),)),
        new_axis=[1, 2, 3],
        meta=np.empty((0,) * 4, run.job.run.dtype),
    )


def _read(
    windows: np.ndarray, path: str, seal: str, steps: list[int | None], lags: list[int], features: list[int]
) -> np.ndarray:
    run, series = _series(path, seal)
    last = run.windows.length - 1
    with _reading:
        whole = [
            series.windows(run.windows, int(windows[start]), int(windows[stop - 1]) + 1)[0]
            for start, stop in _runs(windows)
        ]
    values = joined(whole) if whole else np.empty((0, last + 1, len(run.survey.features)), run.job.run.dtype)
    if steps == [None] and lags == list(range(last, -1, -1)) and features == list(range(values.shape[2])):
        return values[:, None]
    found = np.empty((len(windows), len(steps), len(lags), len(features)), run.job.run.dtype)
    for i, step in enumerate(steps):
        places = (last if step is None else step) - np.array(lags)
        found[:, i] = values[:, np.maximum(places, 0)][:, :, features]
        found[:, i, places < 0] = 0
    return found


def _runs(windows: np.ndarray) -> list[tuple[int, int]]:
    """Where in `windows` consecutive ones stand: `[start, stop)`."""
    borders = [0, *(np.flatnonzero(np.diff(windows) != 1) + 1).tolist(), len(windows)]
    return [(start, stop) for start, stop in zip(borders, borders[1:], strict=False) if start < stop]


@functools.lru_cache(maxsize=8)
def _proved(path: str, seal: str) -> tuple[Run, Series]:
    run = Run.open(path)
    require_series(run)
    pa.default_memory_pool().release_unused()  # what reading a whole series took
    return run, Series(open_reader(run.series), run.series, run.job.run.dtype, scaled=False)


def _series(path: str, seal: str) -> tuple[Run, Series]:
    """The run and its series, read through and compared once a process."""
    with _reading:
        return _proved(path, seal)
