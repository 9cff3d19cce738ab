"""The input record: its steps proved regular, its gaps found, its windows cut.

A series is read twice at most: once whole, in blocks, by `survey`, which proves what a run relies on and
computes what a plan needs; and then by workers, each only the steps of its own windows. A source that
cannot be read by slices (CSV, Parquet) is copied once into a Zarr store that can (`ingest`).
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import Refused
from .job import Scaling, SeriesSection
from .readers import Block, Reader, open_reader
from .times import Clock, TimeAxis

if TYPE_CHECKING:
    from zarr.abc.store import Store

INGESTED_VARIABLE, INGESTED_TIME = "series", "time"
INGESTED_STEPS = 1 << 13  # a chunk of the copy: a worker decompresses little more than the steps of its shard


@dataclass(frozen=True)
class Survey:
    """What one pass over the series proves and finds.

    missing: the runs `[start, stop)` of steps that lack a finite value in some feature, in order.
    mean, std, largest (by absolute value): per feature, over its finite values, in the series' own units.
    fingerprint: of times and values, whatever the format they came in.
    """

    features: tuple[str, ...]
    steps: int
    axis: TimeAxis
    missing: tuple[tuple[int, int], ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    largest: tuple[float, ...]
    fingerprint: str

    def require_fits(self, dtype: str, scaling: Scaling | None) -> None:
        """Refuse values that would overflow in the run's dtype."""
        limit = float(np.finfo(dtype).max)
        for i, name in enumerate(self.features):
            mean, std = (scaling.mean[i], scaling.std[i]) if scaling else (0.0, 1.0)
            if (self.largest[i] + abs(mean)) / std > limit:
                raise Refused(
                    f"series column {name!r}",
                    given=f"values up to {self.largest[i]:.3g}",
                    allowed=f"at most {limit:.3g}, what {dtype} holds",
                    remedy="mark such values as missing, or set run.dtype",
                )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Survey:
        return cls(
            features=tuple(content["features"]),
            steps=content["steps"],
            axis=TimeAxis(**content["axis"]),
            missing=tuple((start, stop) for start, stop in content["missing"]),
            mean=tuple(content["mean"]),
            std=tuple(content["std"]),
            largest=tuple(content["largest"]),
            fingerprint=content["fingerprint"],
        )


@dataclass(frozen=True)
class Windows:
    """Window geometry: window i is the steps `[i × stride, i × stride + length)`, named by its last step."""

    steps: int
    length: int
    stride: int = 1

    @property
    def count(self) -> int:
        return max(0, (self.steps - self.length) // self.stride + 1)

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """The steps that windows `[start, stop)` touch."""
        return start * self.stride, (stop - 1) * self.stride + self.length

    def last_steps(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop) * self.stride + self.length - 1

    def skipped(self, missing: tuple[tuple[int, int], ...], start: int, stop: int) -> np.ndarray:
        """Which of windows `[start, stop)` touch a missing step: bool `(window)`."""
        first, last = np.clip(self._touched(missing), start, stop) - start
        change = np.zeros(stop - start + 1, np.int64)
        np.add.at(change, first, 1)
        np.add.at(change, last, -1)
        return np.cumsum(change[:-1]) > 0

    def skipped_count(self, missing: tuple[tuple[int, int], ...]) -> int:
        first, last = self._touched(missing)
        reached = np.maximum.accumulate(np.concatenate([[0], last]))[:-1]
        return int(np.maximum(0, last - np.maximum(first, reached)).sum())

    def _touched(self, missing: tuple[tuple[int, int], ...]) -> np.ndarray:
        """For each run of missing steps, the windows `[first, last)` that touch it: int64 `(2, run)`."""
        start, stop = np.array(missing, np.int64).reshape(-1, 2).T
        first = np.maximum(0, -(-(start - self.length + 1) // self.stride))
        return np.stack([first, np.maximum(first, np.minimum(self.count, (stop - 1) // self.stride + 1))])

    def cut(self, values: np.ndarray) -> np.ndarray:
        """A view `(window, lag, feature)` of consecutive steps `(step, feature)`, oldest lag first."""
        view = np.lib.stride_tricks.sliding_window_view(values, self.length, axis=0)
        return view[:: self.stride].swapaxes(1, 2)


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


def survey(section: SeriesSection) -> Survey:
    """Read the series once, in blocks. Raises `Refused` for anything a run could not rely on."""
    reader = open_reader(section.path, section.time, section.features)
    if section.scaling:
        section.scaling.require(len(reader.features))
    content, sums = _Content(section), _Sums(len(reader.features))
    for block in reader.blocks():
        content.add(block)
        sums.add(block.values)
    if not sums.steps:
        raise Refused("series.path", given=f"{section.path} (no steps)", allowed="one step or more", remedy="fill it")
    mean, std, largest = sums.mean_std_largest()
    axis, missing = content.clock.axis, tuple(sums.missing)
    return Survey(reader.features, sums.steps, axis, missing, mean, std, largest, content.fingerprint)


class _Content:
    """What a series holds, block by block: its times, proved regular, and its values."""

    def __init__(self, section: SeriesSection) -> None:
        self.clock = Clock(section)
        self._times, self._values = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)

    def add(self, block: Block) -> None:
        times = self.clock.read(block)
        self._times.update(times.tobytes() if times is not None else b"")
        alike = np.where(np.isnan(block.values), np.nan, block.values) + 0.0  # one NaN, one zero
        self._values.update(alike.tobytes())

    @property
    def fingerprint(self) -> str:
        return hashlib.blake2b(self._times.digest() + self._values.digest(), digest_size=16).hexdigest()


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
    content, start = _Content(section), 0
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


class _Sums:
    """Running moments and gaps over blocks of values."""

    def __init__(self, features: int) -> None:
        self.steps = 0
        self.missing: list[tuple[int, int]] = []
        self._count, self._mean, self._squares, self._largest = np.zeros((4, features))

    def add(self, values: np.ndarray) -> None:
        finite = np.isfinite(values)
        self._add_gaps(~finite.all(axis=1))
        with np.errstate(over="ignore", invalid="ignore"):  # what no dtype of ours holds
            self._add_moments(np.where(finite, values, 0.0), finite)
        self.steps += len(values)

    def _add_gaps(self, gap: np.ndarray) -> None:
        edges = np.flatnonzero(np.diff(gap.astype(np.int8), prepend=0, append=0)) + self.steps
        runs = [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
        if runs and self.missing and self.missing[-1][1] == runs[0][0]:
            runs[0] = (self.missing.pop()[0], runs[0][1])
        self.missing += runs

    def _add_moments(self, values: np.ndarray, finite: np.ndarray) -> None:
        """Chan, Golub & LeVeque's pairwise update (1983): no cancellation, whatever the offset."""
        count = finite.sum(axis=0)
        total = self._count + count
        mean = values.sum(axis=0) / np.maximum(count, 1)
        shift = mean - self._mean
        squares = (np.where(finite, values - mean, 0.0) ** 2).sum(axis=0)
        self._squares += squares + shift**2 * self._count * count / np.maximum(total, 1)
        self._mean += shift * count / np.maximum(total, 1)
        self._count = total
        self._largest = np.maximum(self._largest, np.abs(values).max(axis=0, initial=0.0))

    def mean_std_largest(self) -> tuple[tuple[float, ...], ...]:
        std = np.sqrt(self._squares / np.maximum(self._count, 1))
        return tuple(tuple(map(float, column)) for column in (self._mean, std, self._largest))
