"""Times of a series' steps: read in whatever form they come, proved regular, and kept as a rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import Refused
from .readers import Block
from .readers.columns import dates, is_time_of_day
from .sections import SeriesSection

ENOUGH = 64  # times from which a rule can be told; a block may hold fewer of a site


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


class Clock:
    """Reads one site's times block by block and refuses what is not strictly regular, with the first offending rows."""

    def __init__(self, section: SeriesSection, site: str | None = None) -> None:
        self._section, self._site = section, site
        self._row = self._checked = 0
        self._first: list[np.ndarray] = []  # times that wait for more of them, to tell the rule from
        self._last: np.ndarray | None = None
        self._kind = "index"
        self._rule = TimeAxis("index")

    def read(self, block: Block) -> np.ndarray | None:
        """The block's times as int64 microseconds or numbers `(step)`, checked; None where steps are numbered."""
        if block.times is None or not len(block.values):
            return None
        times, self._kind = self._parsed(block.times)
        self._row += len(times)
        if self._checked:
            self._check(times)
            return times
        self._first.append(times)
        if self._row >= ENOUGH:
            self._begin()
        return times

    @property
    def axis(self) -> TimeAxis:
        """The rule that all times read so far follow."""
        self._begin()
        return self._rule

    def _begin(self) -> None:
        if self._first:
            times = np.concatenate(self._first)
            self._rule, self._first = _axis(times, self._kind), []
            self._check(times)

    def _parsed(self, times: Any) -> tuple[np.ndarray, str]:
        values = np.asarray(times)
        if is_time_of_day(values[0]):
            self._require(np.zeros(1, bool), times, "a time of day without its date")
        if values.dtype.kind in "iuf":
            self._require(np.isfinite(values), times, "a missing time")
            return values.astype(np.float64 if values.dtype.kind == "f" else np.int64), "number"
        if values.dtype.kind != "M":
            values = dates(times)
        self._require(~np.isnat(values), times, "no time that can be read")
        return values.astype("datetime64[us]").astype(np.int64), "datetime"

    def _require(self, good: np.ndarray, times: Any, what: str) -> None:
        bad = np.flatnonzero(~good)
        if bad.size:
            shown = np.asarray(times)
            self._refuse([f"{self._called(self._row + i)}: {shown[i]!r}, {what}" for i in bad[:3]])

    def _called(self, row: int) -> str:
        return f"row {row + 1}" if self._site is None else f"row {row + 1} of site {self._site!r}"

    def _check(self, times: np.ndarray) -> None:
        rule = self._rule
        if rule.calendar is not None:
            expected = rule.at(np.arange(self._checked, self._checked + len(times))).astype(np.int64)
            bad, steps = np.flatnonzero(times != expected), None
        else:
            steps = np.diff(times, prepend=times[:1] if self._last is None else self._last)
            tolerance = 1e-6 * abs(rule.step) if rule.kind == "number" else 0
            wrong = (np.abs(steps - rule.step) > tolerance) | (steps <= 0)
            wrong[0] &= self._last is not None
            bad = np.flatnonzero(wrong)
        if bad.size:
            self._refuse([self._described(times, i, steps) for i in bad[:3]])
        self._checked += len(times)
        self._last = times[-1:]

    def _described(self, times: np.ndarray, i: int, steps: np.ndarray | None) -> str:
        before = times[i - 1] if i else (self._last[0] if self._last is not None else times[0])
        gap = times[i] - before if steps is None else steps[i]
        what = "the same time again" if gap == 0 else "back in time" if gap < 0 else "another step than before"
        return f"{self._called(self._checked + i)}: {self._text(times[i])} after {self._text(before)}, {what}"

    def _text(self, time: Any) -> str:
        return (
            str(np.datetime64(int(time), "us").astype("datetime64[s]")) if self._rule.kind == "datetime" else str(time)
        )

    def _refuse(self, rows: list[str]) -> None:
        step = np.timedelta64(int(self._rule.step), "us").astype(object) if self._rule.kind == "datetime" else None
        panel = "" if self._site else ";\nname the column that tells several sites apart as series.site"
        raise Refused(
            "series.time",
            given=f"column {self._section.time!r} of {self._section.path}, first offending rows\n" + "\n".join(rows),
            allowed=f"times in order, each once, at a regular step{f' (here {step})' if step else ''}",
            remedy="sort the series, drop repeated rows, fill skipped steps with empty rows; write dates as "
            f"2014-01-31 13:00:00\n(or leave series.time out to number the steps){panel}",
        )


def _axis(times: np.ndarray, kind: str) -> TimeAxis:
    """The rule that the first block follows; `Clock` holds every block to it."""
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
