"""The input record: its steps proved regular, its gaps found, its windows cut.

A series is read twice at most: once whole, in blocks, by `survey`, which proves what a run relies on and
computes what a plan needs; and then by workers, each only the steps of its own windows. A source that
cannot be read by slices (CSV, Parquet) is copied once into a Zarr store that can (`ingest`).
"""

from __future__ import annotations

import hashlib
import re
import warnings
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import Refused
from .job import Scaling, SeriesSection
from .readers import Block, Reader, open_reader

if TYPE_CHECKING:
    from zarr.abc.store import Store

_TIME_OF_DAY = re.compile(r"\s*\d{1,2}:\d")
INGESTED_VARIABLE, INGESTED_TIME = "series", "time"
INGESTED_STEPS = 1 << 13  # a chunk of the copy: a worker decompresses little more than the steps of its shard


@dataclass(frozen=True)
class TimeAxis:
    """Regular times as a rule: `first + step × i`, or the i-th date of a calendar frequency such as month start.

    kind: "index" (steps are numbered), "number", "datetime" (`first` and `step` in microseconds).
    """

    kind: str
    first: float | int = 0
    step: float | int = 1
    calendar: str | None = None

    def at(self, steps: np.ndarray) -> np.ndarray:
        """Labels of `steps` `(n)`: int64, float64 or datetime64[us] `(n)`."""
        if self.calendar is not None:
            import pandas as pd

            first = np.datetime64(int(self.first), "us")
            periods = int(steps.max(initial=-1)) + 1
            dates = pd.date_range(first, periods=periods, freq=self.calendar)
            return dates.to_numpy().astype("datetime64[us]")[steps]
        labels = self.first + self.step * steps
        return labels.astype("datetime64[us]") if self.kind == "datetime" else labels


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
    clock, sums = _Clock(section), _Sums(len(reader.features))
    of_times, of_values = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    for block in reader.blocks():
        times = clock.read(block)
        sums.add(block.values)
        of_times.update(times.tobytes() if times is not None else b"")
        of_values.update((np.where(np.isnan(block.values), np.nan, block.values) + 0.0).tobytes())  # one NaN, one zero
    if not sums.steps:
        raise Refused("series.path", given=f"{section.path} (no steps)", allowed="one step or more", remedy="fill it")
    fingerprint = hashlib.blake2b(of_times.digest() + of_values.digest(), digest_size=16)
    mean, std, largest = sums.mean_std_largest()
    return Survey(
        reader.features, sums.steps, clock.axis, tuple(sums.missing), mean, std, largest, fingerprint.hexdigest()
    )


def ingest(section: SeriesSection, survey: Survey, store: Store) -> None:
    """Copy the surveyed series into a Zarr store: `series` `(time, feature)` float64, and its labels."""
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
    start = 0
    for block in open_reader(section.path, section.time, section.features).blocks():
        if start + len(block.values) > survey.steps:
            raise series_changed(section.path, "since it was surveyed")
        array[start : start + len(block.values)] = block.values
        start += len(block.values)


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


class _Clock:
    """Reads times block by block and refuses what is not strictly regular, with the first offending rows."""

    def __init__(self, section: SeriesSection) -> None:
        self._section = section
        self._row = 0
        self._last: np.ndarray | None = None
        self.axis = TimeAxis("index")

    def read(self, block: Block) -> np.ndarray | None:
        """The block's times as int64 microseconds or numbers `(step)`, checked; None where steps are numbered."""
        if block.times is None or not len(block.values):
            return None
        times, kind = self._parsed(block.times)
        if self._last is None:
            self.axis = _axis(times, kind)
        self._check(times)
        self._row += len(times)
        self._last = times[-1:]
        return times

    def _parsed(self, times: Any) -> tuple[np.ndarray, str]:
        import pandas as pd

        values = np.asarray(times)
        if isinstance(values[0], str) and _TIME_OF_DAY.match(values[0]):
            self._require(np.zeros(1, bool), times, "a time of day without its date")
        if values.dtype.kind in "iuf":
            self._require(np.isfinite(values), times, "a missing time")
            return values.astype(np.float64 if values.dtype.kind == "f" else np.int64), "number"
        if values.dtype.kind != "M":
            with warnings.catch_warnings():  # pandas warns of what is about to be refused with its row
                warnings.simplefilter("ignore", UserWarning)
                parsed = pd.to_datetime(pd.Series(times), errors="coerce", utc=True)
            values = parsed.dt.tz_localize(None).to_numpy()
        self._require(~np.isnat(values), times, "no time that can be read")
        return values.astype("datetime64[us]").astype(np.int64), "datetime"

    def _require(self, good: np.ndarray, times: Any, what: str) -> None:
        bad = np.flatnonzero(~good)
        if bad.size:
            shown = np.asarray(times)
            self._refuse([f"row {self._row + i + 1}: {shown[i]!r}, {what}" for i in bad[:3]])

    def _check(self, times: np.ndarray) -> None:
        if self.axis.calendar is not None:
            expected = self.axis.at(np.arange(self._row, self._row + len(times))).astype(np.int64)
            bad, steps = np.flatnonzero(times != expected), None
        else:
            steps = np.diff(times, prepend=times[:1] if self._last is None else self._last)
            tolerance = 1e-6 * abs(self.axis.step) if self.axis.kind == "number" else 0
            wrong = (np.abs(steps - self.axis.step) > tolerance) | (steps <= 0)
            wrong[0] &= self._last is not None
            bad = np.flatnonzero(wrong)
        if bad.size:
            self._refuse([self._described(times, i, steps) for i in bad[:3]])

    def _described(self, times: np.ndarray, i: int, steps: np.ndarray | None) -> str:
        before = times[i - 1] if i else (self._last[0] if self._last is not None else times[0])
        gap = times[i] - before if steps is None else steps[i]
        what = "the same time again" if gap == 0 else "back in time" if gap < 0 else "another step than before"
        return f"row {self._row + i + 1}: {self._text(times[i])} after {self._text(before)}, {what}"

    def _text(self, time: Any) -> str:
        return (
            str(np.datetime64(int(time), "us").astype("datetime64[s]")) if self.axis.kind == "datetime" else str(time)
        )

    def _refuse(self, rows: list[str]) -> None:
        step = np.timedelta64(int(self.axis.step), "us").astype(object) if self.axis.kind == "datetime" else None
        raise Refused(
            "series.time",
            given=f"column {self._section.time!r} of {self._section.path}, first offending rows\n" + "\n".join(rows),
            allowed=f"times in order, each once, at a regular step{f' (here {step})' if step else ''}",
            remedy="sort the series, drop repeated rows, fill skipped steps with empty rows; write dates as "
            "2014-01-31 13:00:00\n(or leave series.time out to number the steps)",
        )


def _axis(times: np.ndarray, kind: str) -> TimeAxis:
    """The rule that the first block follows; `_Clock` holds every block to it."""
    steps = np.diff(times)
    if not len(steps):
        return TimeAxis(kind, times[0].item(), 1)
    usual = float(np.median(steps)) if kind == "number" and times.dtype.kind == "f" else int(np.median(steps))
    calendar = _months(times) if kind == "datetime" and (steps != usual).any() else None
    return TimeAxis(kind, times[0].item(), usual, calendar)


def _months(times: np.ndarray) -> str | None:
    """The pandas frequency of dates that stand at the start, or all at the end, of every k-th month."""
    import pandas as pd

    dates = pd.DatetimeIndex(times.astype("datetime64[us]"))
    months = int(np.median(np.diff(dates.year * 12 + dates.month)))
    anchor = "MS" if dates.is_month_start.all() else "ME" if dates.is_month_end.all() else None
    return f"{months}{anchor}" if anchor and months > 0 else None
