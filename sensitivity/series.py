"""A series as workers read it: each only the steps of its own windows.

A source that cannot be read by slices is copied once into a Zarr store that can (`ingest`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .errors import Refused
from .job import Scaling, SeriesSection
from .readers import Reader, open_reader
from .survey import Content, Survey
from .windows import Windows

if TYPE_CHECKING:
    from zarr.abc.store import Store

INGESTED_VARIABLE, INGESTED_TIME = "series", "time"
INGESTED_STEPS = 1 << 13  # a chunk of the copy: a worker decompresses little more than the steps of its shard


class Series:
    """A series that gives any range of its steps, scaled as the model takes them."""

    def __init__(self, reader: Reader, scaling: Scaling | None, dtype: str) -> None:
        if not reader.sliceable:
            raise TypeError("a series is read by slices: ingest it first")
        self._reader, self._dtype = reader, dtype
        self.mean = np.array(scaling.mean if scaling else 0.0)
        self.std = np.array(scaling.std if scaling else 1.0)  # float64: to be divided by before rounding

    def windows(self, windows: Windows, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Windows `[start, stop)` as `(window, lag, feature)`, and which are whole, bool `(window)`.

        Scaled in float64 and then rounded once to the run's dtype.
        """
        values = self._reader.read(*windows.span(start, stop))
        whole = np.asarray(windows.cut(np.isfinite(values)).all(axis=(1, 2)))
        return windows.cut(((values - self.mean) / self.std).astype(self._dtype)), whole


def ingest(section: SeriesSection, survey: Survey, store: Store) -> None:
    """Copy the surveyed series into a Zarr store: `series` `(time, feature)` float64, and its labels.

    Raises `Refused` where it is not what was surveyed.
    """
    import xarray as xr
    import zarr
    from zarr.codecs import Crc32cCodec, ZstdCodec

    labels = {
        INGESTED_TIME: (INGESTED_TIME, survey.axis.at(np.arange(survey.steps))),
        "feature": ("feature", np.array(survey.features, object)),
    }
    xr.Dataset(coords=labels).to_zarr(store, zarr_format=3, consolidated=False, mode="w-")
    array = zarr.open_group(store, mode="r+").create_array(
        INGESTED_VARIABLE,
        shape=(survey.steps, len(survey.features)),
        chunks=(min(survey.steps, INGESTED_STEPS), len(survey.features)),
        dtype="float64",
        fill_value=np.nan,
        compressors=(ZstdCodec(), Crc32cCodec()),
        dimension_names=(INGESTED_TIME, "feature"),
    )
    content, start = Content(section), 0
    for block in open_reader(section.path, section.time, section.features).blocks():
        content.add(block)
        stop = start + len(block.values)
        if stop > survey.steps:
            break
        array[start:stop] = block.values
        start = stop
    if content.fingerprint != survey.fingerprint:
        raise series_changed(section.path, "since it was surveyed")


def series_changed(path: str, when: str) -> Refused:
    return Refused(
        "series.path",
        given=f"{path}, whose content has changed {when}",
        allowed="the series as it was",
        remedy="restore it, or run the job into a new run directory",
    )


def ingested(section: SeriesSection, path: str) -> SeriesSection:
    """The section that reads the copy at `path` made by `ingest`."""
    return section.model_copy(update={"path": path, "time": INGESTED_TIME if section.time else None})


def is_sliceable(section: SeriesSection) -> bool:
    return open_reader(section.path, section.time, section.features).sliceable


def open_series(section: SeriesSection, dtype: str) -> Series:
    """A sliceable series, its values scaled as the job says and rounded to `dtype`."""
    return Series(open_reader(section.path, section.time, section.features), section.scaling, dtype)


def first_windows(section: SeriesSection, windows: Windows, dtype: str, count: int) -> np.ndarray:
    """Up to `count` whole windows `(window, lag, feature)`, spread over the first block of steps that has any."""
    scaling = section.scaling or Scaling(mean=[0.0], std=[1.0])
    values = np.empty((0, 0))
    for block in open_reader(section.path, section.time, section.features).blocks():
        values = np.concatenate([values[-windows.length + 1 :], block.values]) if values.size else block.values
        if len(values) < windows.length:
            continue
        view = windows.cut(values)
        whole = np.flatnonzero(np.isfinite(view).all(axis=(1, 2)))
        if whole.size:
            chosen = view[whole[np.linspace(0, whole.size - 1, min(count, whole.size)).round().astype(int)]]
            return ((chosen - scaling.mean) / scaling.std).astype(dtype)
    raise Refused(
        "series.path",
        given=f"{section.path}, in which every window of {windows.length} steps touches a missing value",
        allowed="one whole window or more",
        remedy="fill the gaps, leave out the feature that has them, or shorten windows.length",
    )
