"""The formats a series comes in, behind one face: blocks of steps in order, and slices where the format has them.

Every reader gives values as float64 `(step, feature)` with NaN where the source has none, and times as
they stand in the source. What the times and values mean is `survey`'s business.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..addresses import place_of, scheme
from ..errors import Refused
from ..patience import StoreFailed
from .arrays import Dataset, Matrix, open_dataset
from .blocks import Block, Reader, unreadable
from .tables import Csv, Parquet

__all__ = ["Block", "Reader", "open_reader"]


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
        return Csv(path, file, time, features)
    if file.endswith(".parquet"):
        return Parquet(path, file, time, features)
    if file.endswith(".npy"):
        return Matrix(path, np.lib.format.open_memmap(file, mode="r"), time, features)
    return Dataset(path, open_dataset(file, engine=None), time, features)


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


def _open_zarr(path: str, time: str | None, features: Sequence[str] | None) -> Reader:
    import zarr

    folder, name = place_of(path)
    store = folder.zarr(name)
    if isinstance(node := zarr.open(store, mode="r"), zarr.Array):
        return Matrix(path, node, time, features)
    dataset = open_dataset(store, engine="zarr", consolidated=False)
    in_order = dataset[sorted(dataset.data_vars, key=str)]  # a group lists its arrays in any order
    return Dataset(path, in_order, time, features)
