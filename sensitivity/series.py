"""A series as workers read it: each only the steps of its own windows.

A source that cannot be read by slices is copied once into a Zarr store that can (`ingest`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import Refused
from .labels import Labels
from .readers import Block, Reader, is_fetched, open_reader
from .sections import Scaling, SeriesSection
from .survey import Content, Survey
from .windows import Windows, joined

if TYPE_CHECKING:
    import zarr
    from zarr.abc.store import Store

INGESTED_VARIABLE, INGESTED_TIME, INGESTED_SITE = "series", "time", "site"
INGESTED_STEPS = 1 << 13  # a chunk of the copy: a worker decompresses little more than the steps of its shard
LABEL_BLOCK = 1 << 18
HELD_BYTES = 256 << 20  # of a series on its way into its copy


class Series:
    """A series that gives any range of its steps, scaled as the model takes them. labels: that go with windows."""

    def __init__(
        self, reader: Reader, section: SeriesSection, dtype: str, *, scaled: bool = True, labels: Labels | None = None
    ) -> None:
        if not reader.sliceable:
            raise TypeError("a series is read by slices: ingest it first")
        self._reader, self._dtype, self._labels = reader, dtype, labels
        self._features = len(reader.features) - len(section.beside)
        scaling = section.scaling if scaled else None
        self.mean = np.array(scaling.mean if scaling else 0.0)
        self.std = np.array(scaling.std if scaling else 1.0)  # float64: to be divided by before rounding

    def windows(self, windows: Windows, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Windows `[start, stop)` as `(window, lag, feature)`, and which are whole, bool `(window)`. With labels, as
        these pack them.

        Scaled in float64 and then rounded once to the run's dtype.
        """
        parts = [self._read(windows, *near) for near in windows.near(start, stop)]
        cut, whole = zip(*parts, strict=True)
        return joined(list(cut)), joined(list(whole))

    def _read(self, windows: Windows, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        begin, end = windows.span(start, stop)
        ahead = 0 if self._labels is None else self._labels.ahead
        columns = self._reader.read(begin, min(end + ahead, windows.steps))
        values = columns[: end - begin, : self._features]
        whole = windows.cut_span(np.isfinite(values).all(axis=1)[:, None], start, stop).all(axis=(1, 2))
        scaled = ((values - self.mean) / self.std).astype(self._dtype)
        cut = windows.cut_span(scaled, start, stop)
        if self._labels is None:
            return cut, np.asarray(whole)
        last = windows.last_steps(start, stop)
        packed, there = self._labels.packed(cut, columns, last - begin, self._dtype)
        return packed, whole & there & windows.has_step(start, stop, ahead)


def ingest(section: SeriesSection, survey: Survey, store: Store) -> None:
    """Copy the surveyed series into a Zarr store: `series` `(time, feature)` float64, one site after another, and its
    labels.

    Raises `Refused` where it is not what was surveyed.
    """
    import xarray as xr
    import zarr
    from zarr.codecs import Crc32cCodec, ZstdCodec

    labels = {
        INGESTED_TIME: (INGESTED_TIME, survey.times(np.arange(survey.steps))),
        "feature": ("feature", np.array(survey.columns, object)),
    }
    xr.Dataset(coords=labels).to_zarr(store, zarr_format=3, consolidated=False, mode="w-")
    group = zarr.open_group(store, mode="r+")
    if survey.sites:
        _write_sites(group, survey)
    array = group.create_array(
        INGESTED_VARIABLE,
        shape=(survey.steps, len(survey.columns)),
        chunks=(min(survey.steps, INGESTED_STEPS), len(survey.columns)),
        dtype="float64",
        fill_value=np.nan,
        compressors=(ZstdCodec(), Crc32cCodec()),
        dimension_names=(INGESTED_TIME, "feature"),
        attributes={"coordinates": INGESTED_SITE} if survey.sites else {},
    )
    reader = open_reader(section)
    content, pieces = Content(section, reader.features), _Pieces(array, survey)
    for block in reader.blocks():
        content.add(block)
        if not pieces.add(block):
            break
    pieces.write()
    if content.fingerprint != survey.fingerprint:
        raise series_changed(section.path, "since it was surveyed")


def _write_sites(group: zarr.Group, survey: Survey) -> None:
    """The site of every step, some at a time: as text they are larger than what they label."""
    shape, chunks = (survey.steps,), (min(survey.steps, LABEL_BLOCK),)
    array = group.create_array(
        INGESTED_SITE, shape=shape, chunks=chunks, dtype="string", dimension_names=(INGESTED_TIME,)
    )
    for start in range(0, survey.steps, LABEL_BLOCK):
        stop = min(start + LABEL_BLOCK, survey.steps)
        array[start:stop] = survey.site_of(np.arange(start, stop))


class _Pieces:
    """Blocks on their way into an array that has one site after another, written many at a time: blocks of several
    sites may come side by side, and each touches chunks of its own.
    """

    def __init__(self, array: Any, survey: Survey) -> None:
        self._array = array
        ends = (*survey.starts[1:], survey.steps)
        names: list[str | None] = [site.name for site in survey.sites] or [None]
        self._free = {name: [start, stop] for name, start, stop in zip(names, survey.starts, ends, strict=True)}
        self._held: dict[str | None, list[np.ndarray]] = {}
        self._bytes = 0

    def add(self, block: Block) -> bool:
        """Whether there is room for it, as there was when the series was surveyed."""
        start, stop = self._free.get(block.site, (0, 0))
        held = self._held.setdefault(block.site, [])
        if start + sum(map(len, held)) + len(block.values) > stop:
            return False
        held.append(block.values)
        self._bytes += block.values.nbytes
        if self._bytes >= HELD_BYTES:
            self.write()
        return True

    def write(self) -> None:
        """Sites that adjoin go together: there may be hundreds in a chunk, which is encoded anew for each write."""
        run: list[np.ndarray] = []
        begin = end = 0
        for site in sorted(filter(self._held.get, self._held), key=lambda site: self._free[site][0]):
            held, start = self._held[site], self._free[site][0]
            if start != end or end - begin > INGESTED_STEPS:
                self._write(begin, run)
                run, begin = [], start
            run += held
            end = self._free[site][0] = start + sum(map(len, held))
        self._write(begin, run)
        self._held, self._bytes = {}, 0

    def _write(self, start: int, parts: list[np.ndarray]) -> None:
        if parts:
            values = np.concatenate(parts)
            self._array[start : start + len(values)] = values


def series_changed(path: str, when: str) -> Refused:
    return Refused(
        "series.path",
        given=f"{path}, whose content has changed {when}",
        allowed="the series as it was",
        remedy="restore it, or run the job into a new run directory",
    )


def ingested(section: SeriesSection, survey: Survey, path: str) -> SeriesSection:
    """The section that reads the copy at `path` made by `ingest`."""
    labels = {"time": INGESTED_TIME if section.time else None, "site": INGESTED_SITE if survey.sites else False}
    return section.model_copy(update={"path": path, **labels})


def is_sliceable(section: SeriesSection, survey: Survey) -> bool:
    """Whether workers can read the steps of their windows, and no others, where the series is."""
    return survey.grouped and not is_fetched(section.path) and open_reader(section).sliceable


def open_series(section: SeriesSection, dtype: str, labels: Labels | None = None) -> Series:
    """A sliceable series, its values scaled as the job says and rounded to `dtype`."""
    return Series(open_reader(section), section, dtype, labels=labels)


def chosen_windows(section: SeriesSection, survey: Survey, windows: Windows, numbers: np.ndarray) -> np.ndarray:
    """Windows of those numbers, `(window, lag, feature)` float64, in units of the series, which is read through."""
    found = np.full((len(numbers), windows.length, len(survey.features)), np.nan)
    begins = windows.last_steps_of(numbers) - windows.length + 1
    names: list[str | None] = [site.name for site in survey.sites] or [None]
    at = dict(zip(names, survey.starts, strict=True))
    for block in open_reader(section).blocks():
        start = at[block.site]
        stop = at[block.site] = start + len(block.values)
        for i in np.flatnonzero((begins < stop) & (begins + windows.length > start)):
            first, last = max(begins[i], start), min(begins[i] + windows.length, stop)
            values = block.values[first - start : last - start, : len(survey.features)]
            found[i, first - begins[i] : last - begins[i]] = values
    return found


def first_windows(
    section: SeriesSection, windows: Windows, dtype: str, count: int, labels: Labels | None = None
) -> np.ndarray:
    """Up to `count` whole windows `(window, lag, feature)`, spread over the first block of steps that has any; with
    labels, as these pack them.
    """
    scaling = section.scaling or Scaling(mean=[0.0], std=[1.0])
    tails: dict[str | None, np.ndarray] = {}
    reader = open_reader(section)
    features = len(reader.features) - len(section.beside)
    together = windows.length + (labels.ahead if labels else 0)
    for block in reader.blocks():
        columns = np.concatenate([tails.get(block.site, block.values[:0]), block.values])
        tails[block.site] = columns[max(0, len(columns) - together + 1) :].copy()
        if len(columns) < together:
            continue
        view = windows.cut(columns[:, :features])
        last = np.arange(len(view)) * windows.stride + windows.length - 1
        there = np.isfinite(view).all(axis=(1, 2))
        if labels is not None:
            there &= labels.there(columns, last)
        whole = np.flatnonzero(there)
        if whole.size:
            picked = whole[np.linspace(0, whole.size - 1, min(count, whole.size)).round().astype(int)]
            chosen = ((view[picked] - scaling.mean) / scaling.std).astype(dtype)
            return chosen if labels is None else labels.packed(chosen, columns, last[picked], dtype)[0]
    if labels is not None:
        raise Refused(
            "series.labels",
            given=f"{section.path}, in which no window of {windows.length} steps is whole and has its labels, "
            f"{labels.offsets[-1]} steps after its last one",
            allowed="one such window or more",
            remedy="fill gaps of features, labels and weights, or lower sensitivity.lead",
        )
    raise Refused(
        "series.path",
        given=f"{section.path}, in which every window of {windows.length} steps touches a missing value",
        allowed="one whole window or more",
        remedy="fill the gaps, leave out the feature that has them, or shorten windows.length",
    )
