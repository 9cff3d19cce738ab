"""The formats a series comes in, behind one face: blocks of steps in order, and slices where the format has them.

Every reader gives values as float64 `(step, feature)` with NaN where the source has none, and times as
they stand in the source. What the times and values mean is `survey`'s business.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
import tempfile
from pathlib import Path
from typing import IO, cast

import numpy as np

from ..addresses import place_of, scheme
from ..sections import SeriesSection
from .arrays import Matrix
from .blocks import Block, Reader, reading
from .datasets import open_dataset, open_labelled
from .tables import Csv, Parquet

_HDF5 = b"\x89HDF\r\n\x1a\n"

__all__ = ["Block", "Reader", "is_fetched", "open_reader"]


def open_reader(section: SeriesSection) -> Reader:
    """The reader for the series, by its path's ending; `Refused` where it cannot be read or has no such column."""
    path = section.path
    with reading(path):
        if path.endswith(".zarr"):
            return _open_zarr(section)
        if path.endswith(".parquet"):
            folder, name = place_of(path)
            return Parquet(section, folder.seekable(name))
        if is_fetched(path):
            return _open_file(section, str(_fetched(path)))
        if scheme(path):
            folder, name = place_of(path)
            return open_labelled(section, open_dataset(folder.seekable(name), engine="h5netcdf"))
        return _open_file(section, path)


def is_fetched(path: str) -> bool:
    """Whether a copy of it is made on this machine, which others have not: CSV, .npy and classic NetCDF elsewhere."""
    if not scheme(path) or path.endswith((".zarr", ".parquet")):
        return False
    return not (path.endswith(".nc") and _beginning(path, len(_HDF5)) == _HDF5)


def _beginning(url: str, size: int) -> bytes:
    folder, name = place_of(url)
    with contextlib.suppress(FileNotFoundError), cast(IO[bytes], folder.seekable(name)) as file:
        return file.read(size)
    return b""


def _open_file(section: SeriesSection, file: str) -> Reader:
    if file.endswith((".csv", ".csv.gz")):
        return Csv(section, file)
    if file.endswith(".npy"):
        return Matrix(section, np.lib.format.open_memmap(file, mode="r"))
    return open_labelled(section, open_dataset(file, engine=_engine(file)))


def _engine(file: str) -> str | None:
    """Where it is HDF5, what reads it by h5py, as Keras does: netCDF's own library beside that one crashes at times."""
    with open(file, "rb") as content:
        return "h5netcdf" if content.read(len(_HDF5)) == _HDF5 else None


def _open_zarr(section: SeriesSection) -> Reader:
    import zarr

    folder, name = place_of(section.path)
    store = folder.zarr(name)
    if isinstance(node := zarr.open(store, mode="r"), zarr.Array):
        return Matrix(section, node)
    dataset = open_dataset(store, engine="zarr", consolidated=False)
    in_order = dataset[sorted(dataset.data_vars, key=str)]  # a group lists its arrays in any order
    return open_labelled(section, in_order)


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
