"""Whether a statistic changes over the years: its value in each period, and the median slope through these."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd
import xarray as xr

from ..errors import Refused
from .ask import ask, statistic
from .conditions import By, Grouping, listed
from .intervals import changing
from .naming import COUNT, ENDS, Words, end_of
from .periods import COUNTED, YEAR, as_numbers, calendar, span_of, stretches
from .slopes import LEAST_PERIODS, theil_sen
from .statistics import Statistic

PERIOD = "period"
PERIODS = {"year": "years", "month": "months"}
ENOUGH_YEARS, ENOUGH_MONTHS, STRETCHES = 8, 36, 40
PARTIAL = 0.5  # of the median count: periods with fewer windows do not count


def trend(
    dataset: xr.Dataset,
    of: str | Statistic = "mean-abs",
    *,
    every: str | int | None = None,
    level: float = 0.95,
    by: By = None,
    **conditions: Any,
) -> xr.Dataset:
    """The trend over time of a statistic's variables: lazy, in one pass.

    of: the statistic. every: "year"; "month", compared with the same months of other years; or a number of equal
    stretches of time. None: years where there are eight, else months where there are 36, else 40 stretches. Periods
    with less than half the median number of windows do not count. by, and `conditions`, are those of `ask`.

    `NAME_slope`, `NAME_slope_low`, `NAME_slope_high` (interval of `level`) and `NAME_p` (two-sided, Mann-Kendall,
    corrected for serial correlation; see `slopes`) for each variable, in its units a year, or per unit of time where
    times are numbers; `periods`: how many count; `count` windows.
    """
    base = statistic(of) if isinstance(of, str) else of
    if not 0.5 <= level < 1:
        raise Refused("level", given=level, allowed="from 0.5 to below 1", remedy="write 0.95")
    kind, periods = _periods(dataset, every)
    finish = partial(_finish, base=base, level=level, kind=kind, dates=dataset["time"].dtype.kind == "M")
    made = Statistic("trend", base.needs, finish, words=_words(base, level, kind, dataset["time"].dtype.kind))
    found = ask(dataset, [made], by=[*listed(by), periods], **conditions)["trend"]
    return found.assign_attrs(of=base.name, every=kind, level=level)


def _words(base: Statistic, level: float, kind: str, times: str) -> Words:
    """times: the kind of their dtype: dates, numbers of steps, or numbers with a unit of their own."""
    unit = {"M": "year", "i": "step", "u": "step"}.get(times, "unit of time")
    periods = {"year": "years", "month": "months of one name in different years"}.get(kind, "equal stretches of time")
    found: Words = COUNT | {"periods": (f"number of {PERIODS.get(kind, 'stretches of time')} that have a value", "1")}
    for name, (long_name, units) in base.words.items():
        slope = f"trend of: {long_name} (median slope between {periods}, Theil–Sen)"
        per = f"{'' if units == '1' else units + ' '}per {unit}"
        ends = {f"{name}_slope{edge}": (end_of(slope, edge, level, "Sen 1968"), per) for edge in ENDS}
        p = f"two-sided p-value of the trend of: {long_name} (Mann–Kendall, corrected for serial correlation)"
        found |= {f"{name}_slope": (slope, per), **ends, f"{name}_p": (p, "1")}
    return found


def _periods(dataset: xr.Dataset, every: str | int | None) -> tuple[str, Grouping]:
    dates = dataset["time"].dtype.kind == "M" and dataset.sizes["time"] > 0
    if every is None:
        every = _fitting(dataset) if dates else STRETCHES
    if isinstance(every, int) and every >= LEAST_PERIODS:
        return "stretch", stretches(dataset, every, PERIOD)
    if every not in COUNTED or not dates:
        raise Refused(
            "every",
            given=every,
            allowed=f"{', '.join(COUNTED)} (of dates), or {LEAST_PERIODS} equal stretches of time or more",
            remedy="leave it out, or write every=20",
        )
    return str(every), calendar(dataset, str(every), PERIOD)


def _fitting(dataset: xr.Dataset) -> str | int:
    first, last = span_of(dataset)
    years = (last - first) / YEAR
    return "year" if years >= ENOUGH_YEARS else "month" if years * 12 >= ENOUGH_MONTHS else STRETCHES


def _finish(sums: xr.Dataset, base: Statistic, level: float, kind: str, dates: bool) -> xr.Dataset:
    values = base.finish(sums)
    begins = sums[PERIOD].values
    positions = as_numbers(begins) / (YEAR if dates else 1)
    seasons = pd.DatetimeIndex(begins).month.to_numpy() if kind == "month" else None
    count = values["count"].where(values["count"] > 0)
    enough = count >= PARTIAL * count.median(PERIOD)
    found: dict[str, Any] = {"count": values["count"].sum(PERIOD)}
    for name in changing(base, values):
        field = values[name].where(enough).transpose(PERIOD, ...)
        slopes = theil_sen(field.values, positions, level, seasons)
        parts = {"slope": slopes.slope, "slope_low": slopes.low, "slope_high": slopes.high, "p": slopes.p_value}
        found |= {f"{name}_{part}": (field.dims[1:], array) for part, array in parts.items()}
        found["periods"] = (field.dims[1:], slopes.periods)
    return xr.Dataset(found, coords=values.drop_dims(PERIOD).coords, attrs=values.attrs)
