"""The formats a series comes in, behind one face: blocks of steps in order, and slices where the format has them.

Every reader gives values as float64 `(step, feature)` with NaN where the source has none, and times as
they stand in the source. What the times and values mean is `series`' business.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from .addresses import place_of, scheme
from .errors import Refused, gist
from .patience import StoreFailed

BLOCK_STEPS = 1 << 18


class Block(NamedTuple):
    """Consecutive steps: `times` `(step)` or None where steps are numbered, `values` `(step, feature)` float64."""

    times: Any
    values: np.ndarray


class Reader(Protocol):
    """`sliceable`: `read` fetches steps without reading those before them."""

    features: tuple[str, ...]
    sliceable: bool

    def blocks(self) -> Iterator[Block]: ...

    def read(self, start: int, stop: int) -> np.ndarray: ...


def open_reader(path: str, time: str | None, features: Sequence[str] | None) -> Reader:
    """The reader for `path` by its ending; raises `Refused` for what cannot be read or has no such column."""
    try:
        if path.endswith(".zarr"):
            return _open_zarr(path, time, features)
        if not scheme(path):
            return _open_file(path, path, time, features)
        reader = _open_file(path, str(_fetched(path)), time, features)
        reader.sliceable = False  # workers elsewhere have no such copy
        return reader
    except (Refused, StoreFailed):
        raise
    except Exception as error:
        raise unreadable(path, error) from error


def _open_file(path: str, file: str, time: str | None, features: Sequence[str] | None) -> Reader:
    """path: what the file is called in messages."""
    if file.endswith((".csv", ".csv.gz")):
        return _Csv(path, file, time, features)
    if file.endswith(".parquet"):
        return _Parquet(path, file, time, features)
    if file.endswith(".npy"):
        return _Matrix(path, np.lib.format.open_memmap(file, mode="r"), time, features)
    return _Dataset(path, _open_dataset(file, engine=None), time, features)


def _fetched(url: str) -> Path:
    """A copy of an object on this machine, which lasts as long as this process."""
    folder, name = place_of(url)
    return _fetched_once(url, folder.version(name))


@functools.lru_cache(maxsize=2)
def _fetched_once(url: str, version: str | None) -> Path:
    folder, name = place_of(url)
    copies = tempfile.mkdtemp(prefix="sensitivity-")
    atexit.register(shutil.rmtree, copies, ignore_errors=True)
    with folder.local_copy(name) as copy:
        return Path(shutil.move(copy, copies))


def unreadable(path: str, error: Exception) -> Refused:
    return Refused(
        "series.path",
        given=f"{path} ({gist(error)})",
        allowed="a file that its ending describes",
        remedy="save it as UTF-8"
        if isinstance(error, UnicodeDecodeError)
        else "open it with pandas or xarray to see what is wrong with it",
    )


class _Table(ABC):
    """Columns read in order, block by block: the formats that cannot be entered in the middle."""

    sliceable = False

    def __init__(
        self, path: str, file: str, columns: Sequence[str], time: str | None, features: Sequence[str] | None
    ) -> None:
        self.path, self.file, self.time = path, file, time
        if time is not None and time not in columns:
            raise _no_column("series.time", [time], columns)
        self.features = choose_features([name for name in columns if name != time], features)
        _require_once(self._columns, columns)

    @property
    def _columns(self) -> list[str]:
        return [*self.features, *([self.time] if self.time is not None else [])]

    def blocks(self) -> Iterator[Block]:
        row = 0
        try:
            for frame in self._frames():
                times = frame[self.time] if self.time is not None else None
                columns = [_numbers(frame[name], name, row) for name in self.features]
                yield Block(times, np.stack(columns, axis=1))
                row += len(frame)
        except (Refused, StoreFailed):
            raise
        except Exception as error:
            raise unreadable(self.path, error) from error

    @abstractmethod
    def _frames(self) -> Iterator[Any]:
        """Data frames of at most `BLOCK_STEPS` consecutive rows."""

    def read(self, start: int, stop: int) -> np.ndarray:
        raise TypeError(f"{self.path} cannot be read by slices; ingest it first")


class _Csv(_Table):
    def __init__(self, path: str, file: str, time: str | None, features: Sequence[str] | None) -> None:
        import pandas as pd

        written = pd.read_csv(file, header=None, nrows=1, dtype=str, keep_default_na=False).iloc[0]
        self._known = list(
            map(str, pd.read_csv(file, nrows=0))
        )  # where names are left out or repeated, pandas makes some up
        names = [own or name for own, name in zip(written, self._known, strict=True)]
        super().__init__(path, file, names, time, features)

    def _frames(self) -> Iterator[Any]:
        import pandas as pd

        others = {name: str for name in self._known if name not in self._columns}  # with usecols, long rows would pass
        with pd.read_csv(self.file, dtype=others, chunksize=BLOCK_STEPS) as chunks:
            for frame in chunks:
                if not isinstance(frame.index, pd.RangeIndex):  # columns would be shifted
                    raise ValueError("rows have more values than the header has names")
                yield frame


class _Parquet(_Table):
    def __init__(self, path: str, file: str, time: str | None, features: Sequence[str] | None) -> None:
        import pyarrow.parquet as pq

        with pq.ParquetFile(file) as opened:
            names = [name for name in opened.schema_arrow.names if not name.startswith("__index_level_")]
            if time is not None and time in opened.schema_arrow.names and time not in names:
                names.append(time)
        super().__init__(path, file, names, time, features)

    def _frames(self) -> Iterator[Any]:
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.file) as file:
            for batch in file.iter_batches(BLOCK_STEPS, columns=self._columns):
                yield batch.to_pandas(ignore_metadata=True)


class _Sliced(ABC):
    """Formats that give any range of steps at its own cost."""

    sliceable = True
    path: str
    features: tuple[str, ...]
    steps: int

    def blocks(self) -> Iterator[Block]:
        for start in range(0, self.steps, BLOCK_STEPS):
            stop = min(start + BLOCK_STEPS, self.steps)
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


class _Matrix(_Sliced):
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


class _Dataset(_Sliced):
    """A labelled dataset: one variable per feature, or one `(time, feature)` variable with labelled columns."""

    def __init__(self, path: str, dataset: Any, time: str | None, features: Sequence[str] | None) -> None:
        self.path, self._dataset = path, dataset
        self._time = _time_variable(dataset, time)
        dim = self._time.dims[0] if self._time is not None else _leading_dim(path, dataset, features)
        columns = _columns_along(dataset, dim)
        names = [name for name, _ in columns]
        self.features = choose_features(names, features)
        _require_once(self.features, names)
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


def _open_dataset(path: Any, engine: str | None, **options: Any) -> Any:
    import xarray as xr

    any_year = xr.coders.CFDatetimeCoder(time_unit="us")
    return xr.open_dataset(path, engine=engine, chunks=None, cache=False, decode_times=any_year, **options)


def _open_zarr(path: str, time: str | None, features: Sequence[str] | None) -> Reader:
    import zarr

    folder, name = place_of(path)
    store = folder.zarr(name)
    if isinstance(node := zarr.open(store, mode="r"), zarr.Array):
        return _Matrix(path, node, time, features)
    dataset = _open_dataset(store, engine="zarr", consolidated=False)
    in_order = dataset[sorted(dataset.data_vars, key=str)]  # a group lists its arrays in any order
    return _Dataset(path, in_order, time, features)


def _time_variable(dataset: Any, time: str | None) -> Any:
    if time is None:
        return None
    if time not in dataset.variables:
        raise _no_column("series.time", [time], list(map(str, dataset.variables)))
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


def choose_features(columns: Sequence[str], features: Sequence[str] | None) -> tuple[str, ...]:
    """The columns the model takes: those asked for, in that order, else all."""
    missing = [name for name in features or () if name not in columns]
    if missing or not columns:
        raise _no_column("series.features", missing, columns)
    return tuple(features or columns)


def _require_once(used: Sequence[str], columns: Sequence[str]) -> None:
    """Refuse to take a column of which there are two."""
    count = Counter(columns)
    twice = [name for name in dict.fromkeys(used) if count[name] > 1]
    if twice:
        raise Refused(
            "series.features",
            given=f"{', '.join(twice)}, {count[twice[0]]} columns of this name in the series",
            allowed="columns that have names of their own",
            remedy="rename one of them in the series",
        )


def _no_column(key: str, missing: Sequence[str], columns: Sequence[str]) -> Refused:
    shown = ", ".join(itertools.islice(columns, 20)) + (", …" if len(columns) > 20 else "")
    return Refused(
        key,
        given=f"{', '.join(missing)} (no such column)" if missing else "a series without numeric columns",
        allowed=f"columns of the series: {shown or 'none'}",
        remedy=_column_advice(columns),
    )


def _column_advice(columns: Sequence[str]) -> str:
    if len(columns) == 1 and any(mark in columns[0] for mark in ";\t|"):
        return "separate the columns by commas"
    if not columns:
        return "give numbers as one variable per feature along the steps, or one variable (step, feature)"
    return "correct the name; spelling and case count"


def _numbers(column: Any, name: str, first_row: int) -> np.ndarray:
    import pandas as pd

    no_number = getattr(column.dtype, "kind", "O") in "mM"  # pandas would turn dates into nanoseconds
    numbers = pd.to_numeric(column, errors="coerce")
    bad = np.flatnonzero(((numbers.isna() | no_number) & column.notna()).to_numpy())
    if bad.size:
        rows = "\n".join(f"row {first_row + i + 1}: {column.iloc[i]!r}" for i in bad[:3])
        raise Refused(
            f"series column {name!r}",
            given=f"values that are no numbers, first\n{rows}",
            allowed="numbers, or nothing where a value is missing",
            remedy="name a time column as series.time; leave text columns out of series.features",
        )
    return numbers.to_numpy(np.float64, na_value=np.nan)
