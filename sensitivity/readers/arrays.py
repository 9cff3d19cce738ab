"""Arrays: .npy, NetCDF and Zarr."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import Refused
from ..patience import StoreFailed
from . import blocks
from .blocks import Block, unreadable
from .columns import choose_features, no_column, require_once


class _Sliced(ABC):
    """Formats that give any range of steps at its own cost."""

    sliceable = True
    path: str
    features: tuple[str, ...]
    steps: int

    def blocks(self) -> Iterator[Block]:
        for start in range(0, self.steps, blocks.BLOCK_STEPS):
            stop = min(start + blocks.BLOCK_STEPS, self.steps)
            try:
                block = Block(self._times(start, stop), self.read(start, stop))
            except StoreFailed:
                raise
            except Exception as error:  # every format has its own way of being damaged
                raise unreadable(self.path, error) from error
            yield block

    def _times(self, start: int, stop: int) -> np.ndarray | None:
        return None

    @abstractmethod
    def read(self, start: int, stop: int) -> np.ndarray:
        """The values of steps `[start, stop)`, `(step, feature)` float64."""


class Matrix(_Sliced):
    """A bare `(step, feature)` or `(step)` array: .npy, or a Zarr array outside a group. It has no times."""

    def __init__(self, path: str, array: Any, time: str | None, features: Sequence[str] | None) -> None:
        if array.ndim not in (1, 2) or np.dtype(array.dtype).kind not in "iufb":
            raise Refused(
                "series.path",
                given=f"{path}, an array of shape {tuple(array.shape)} and dtype {array.dtype}",
                allowed="numbers of shape (step, feature), or (step) for one feature",
                remedy="save the series itself, not windows cut from it",
            )
        if time is not None:
            raise Refused(
                "series.time",
                given=f"{time!r} for {path}",
                allowed="no time column: a bare array has none",
                remedy="leave series.time out (steps are numbered), or give the series as CSV, Parquet, NetCDF or Zarr",
            )
        width = 1 if array.ndim == 1 else array.shape[1]
        columns = [f"feature_{i}" for i in range(width)]
        names_them = features is not None and len(features) == width and not set(features) <= set(columns)
        self.features = tuple(features or ()) if names_them else choose_features(columns, features)
        self._index = list(range(width)) if names_them else [columns.index(name) for name in self.features]
        self.path, self._array, self.steps = path, array, array.shape[0]

    def read(self, start: int, stop: int) -> np.ndarray:
        rows = np.asarray(self._array[start:stop])
        return rows.reshape(stop - start, -1)[:, self._index].astype(np.float64)


class Dataset(_Sliced):
    """A labelled dataset: one variable per feature, or one `(time, feature)` variable with labelled columns."""

    def __init__(self, path: str, dataset: Any, time: str | None, features: Sequence[str] | None) -> None:
        self.path, self._dataset = path, dataset
        self._time = _time_variable(dataset, time)
        dim = self._time.dims[0] if self._time is not None else _leading_dim(path, dataset, features)
        columns = _columns_along(dataset, dim)
        names = [name for name, _ in columns]
        self.features = choose_features(names, features)
        require_once(self.features, names)
        self._places = dict(columns)
        self.steps = dataset.sizes[dim]

    def _times(self, start: int, stop: int) -> np.ndarray | None:
        return None if self._time is None else self._time[start:stop].values

    def read(self, start: int, stop: int) -> np.ndarray:
        values = np.empty((stop - start, len(self.features)))
        places = [self._places[name] for name in self.features]
        for variable in dict.fromkeys(variable for variable, _ in places):
            part = self._dataset[variable][start:stop].values
            for column, (owner, index) in enumerate(places):
                if owner == variable:
                    values[:, column] = part if index is None else part[:, index]
        return values


def open_dataset(path: Any, engine: str | None, **options: Any) -> Any:
    import xarray as xr

    any_year = xr.coders.CFDatetimeCoder(time_unit="us")
    return xr.open_dataset(path, engine=engine, chunks=None, cache=False, decode_times=any_year, **options)


def _time_variable(dataset: Any, time: str | None) -> Any:
    if time is None:
        return None
    if time not in dataset.variables:
        raise no_column("series.time", [time], list(map(str, dataset.variables)))
    if dataset[time].ndim != 1:
        raise Refused(
            "series.time",
            given=f"{time!r} with dimensions {dataset[time].dims}",
            allowed="a one-dimensional coordinate",
            remedy="name the coordinate that labels the steps",
        )
    return dataset[time]


def _leading_dim(path: str, dataset: Any, features: Sequence[str] | None) -> str:
    """Without a time coordinate, the steps are the first dimension of the variables that are asked for."""
    wanted = [name for name in features or () if name in dataset.data_vars] or list(dataset.data_vars)
    dims = list(dict.fromkeys(dataset[name].dims[0] for name in wanted if dataset[name].ndim))
    if len(dims) != 1:
        raise Refused(
            "series.time",
            given=f"nothing, and the variables of {path} begin with dimensions {dims}",
            allowed="one dimension of steps",
            remedy="name the time coordinate as series.time, or the variables as series.features",
        )
    return dims[0]


def _columns_along(dataset: Any, dim: str) -> list[tuple[str, tuple[str, int | None]]]:
    """Of each feature the name, and (variable, column in it, or None for a one-dimensional variable)."""
    places: list[tuple[str, tuple[str, int | None]]] = []
    for name, variable in dataset.data_vars.items():
        if variable.dtype.kind not in "iufb" or variable.ndim not in (1, 2) or variable.dims[0] != dim:
            continue
        if variable.ndim == 1:
            places.append((str(name), (name, None)))
            continue
        labels = variable[variable.dims[1]].values if variable.dims[1] in variable.coords else None
        for i in range(variable.shape[1]):
            places.append((str(labels[i]) if labels is not None else f"{name}_{i}", (name, i)))
    return places
