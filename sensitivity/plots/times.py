"""Time × lag, for a record of any length: windows are grouped into bins of time that fit on a page."""

from __future__ import annotations

import dask.array as da
import matplotlib.dates as dates
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..errors import Refused
from ..query.conditions import Grouping
from ..query.inputs import time_blocks
from . import look
from .terms import heading

BINS = 800
DAY = 86_400
# Seconds: bins that do not beat against the day or the week.
ROUND = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600 * hours for hours in (1, 2, 3, 4, 6, 8, 12)),
    *(DAY * days for days in (1, 2, 4, 7, 14, 28, 56, 91, 182, 364)),
)


def time_bins(dataset: xr.Dataset, most: int = BINS) -> Grouping:
    """Windows by equal bins of time, `most` at most; by their number (`window`) where time is no regular number.

    labels: where each bin begins, its windows being those from there on. One window a bin, where that is enough.
    """
    times = dataset["time"].values
    if not len(times):
        raise Refused("dataset", given="no window", allowed="a dataset with windows", remedy="select some of its times")
    if times.dtype.kind not in "Miu":
        width = -(-len(times) // most)
        return _grouping(dataset, "window", da.arange(len(times)), 0, width, np.dtype(np.int64))
    numbers = times.astype(np.int64)
    first, last = int(numbers.min()), int(numbers.max())
    width = _width(times.dtype, _step(numbers), last - first, most)
    if width > _step(numbers):
        first = first // width * width
    return _grouping(dataset, "time", da.from_array(numbers), first, width, times.dtype)


def _step(numbers: np.ndarray) -> int:
    """What is typically between two times; sites may follow each other."""
    steps = np.diff(numbers)
    if (steps < 0).any():
        steps = np.diff(np.unique(numbers))
    steps = steps[steps > 0]
    return int(np.median(steps)) if len(steps) else 1


def _width(dtype: np.dtype, step: int, length: int, most: int) -> int:
    """The narrowest round width that is enough: whole steps, round in the calendar too where there is one."""
    least = step * -(-(length // step + 1) // most)
    if least == step or dtype.kind != "M":
        return least
    second = int(np.timedelta64(1, "s").astype(dtype.str.replace("M8", "m8")).astype(np.int64))
    fitting = [width * second for width in ROUND if least <= width * second <= 2 * least and not width * second % step]
    # One more bin may begin before the first window.
    return next((width for width in fitting if length // width + 2 <= most), least)


def _grouping(dataset: xr.Dataset, name: str, numbers: da.Array, first: int, width: int, dtype: np.dtype) -> Grouping:
    blocks = (time_blocks(dataset),)
    codes = (numbers.rechunk(blocks) - first) // width
    last = int(dataset["time"].values.astype(np.int64).max()) if name == "time" else dataset.sizes["time"] - 1
    starts = first + width * np.arange((last - first) // width + 1)
    return Grouping(name, starts.astype(dtype), codes)


def draw_times(found: xr.Dataset, figure: Figure, top: int | None = None) -> None:
    """found: `mean_abs` `(time, output_step, output, lag, feature)` by `time_bins`; the sum over features."""
    along = "time" if "time" in found.dims else "window"
    values = look.total(look.influence(found)).transpose("lag", along)
    starts = values[along].values
    edges = _edges(starts)
    newest_below = look.span(values["lag"].values)[::-1]
    limits, cut = _limits(values.values)
    axes = figure.subplots()
    look.heat(axes, values.values, (*edges, *newest_below), look.size_label(found), **limits)
    look.dress_lags(axes.yaxis, values["lag"])
    _dress_time(axes, values[along])
    parts = [look.windows(found), look.of_features(found), look.averaged(found), _each(starts), cut]
    what = heading(found, "times", output=look.output(found))
    look.title(figure, what, *parts, look.holes(values.values))


def _edges(starts: np.ndarray) -> tuple[float, float]:
    alone = np.timedelta64(1, "D") if starts.dtype.kind == "M" else 1
    ends = np.array([starts[0], starts[-1] + (starts[1] - starts[0] if len(starts) > 1 else alone)])
    first, last = dates.date2num(ends) if starts.dtype.kind == "M" else ends.astype(float)
    return float(first), float(last)


def _limits(values: np.ndarray) -> tuple[dict[str, object], str]:
    """Colours end where 99.5 % of values do, if few are far above."""
    finite = values[np.isfinite(values)]
    high = float(np.quantile(finite, 0.995)) if finite.size else 0.0
    if high <= 0 or finite.max() < 2 * high:
        return {}, ""
    return {"vmax": high, "extend": "max"}, "colours end at the 99.5 % quantile"


def _dress_time(axes: Axes, starts: xr.DataArray) -> None:
    if starts.dtype.kind == "M":
        locator = dates.AutoDateLocator()
        axes.xaxis_date()
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    known = "number of the window" if starts.name == "window" else "time of the window's last step"
    axes.set_xlabel(starts.attrs.get("long_name", known))


def _each(starts: np.ndarray) -> str:
    """What one column of pixels is."""
    if len(starts) < 2:
        return ""
    width = starts[1] - starts[0]
    if starts.dtype.kind != "M":
        return f"a column: {int(width):,}" if width > 1 else ""
    seconds = width / np.timedelta64(1, "s")
    for name, size in (("day", DAY), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            return f"a column: {seconds / size:,.3g} {name}{'' if seconds == size else 's'}"
    return f"a column: {seconds:,.3g} s"
