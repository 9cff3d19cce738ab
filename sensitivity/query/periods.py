"""Stretches and calendar periods of time as groups of windows."""

from __future__ import annotations

from collections.abc import Callable

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr

from .conditions import Grouping
from .inputs import time_blocks

Span = tuple[float, float]
YEAR = 365.2425 * 86_400e6  # of the calendar, in microseconds


def as_numbers(times: np.ndarray) -> np.ndarray:
    """Microseconds since 1970 of dates, and numbers as they are: float64."""
    whole = times.astype("datetime64[us]").astype(np.int64) if times.dtype.kind == "M" else times
    return whole.astype(float)


def span_of(*datasets: xr.Dataset) -> Span:
    """From the first window of all to the last."""
    times = [as_numbers(dataset["time"].values) for dataset in datasets if dataset.sizes["time"]]
    return (min(one.min() for one in times), max(one.max() for one in times)) if times else (0.0, 0.0)


def stretches(dataset: xr.Dataset, count: int, name: str, span: Span | None = None) -> Grouping:
    """`count` equal stretches of a span of time, by default the dataset's, labelled by the time each begins at."""
    first, last = span or span_of(dataset)
    width = (last - first) / count or 1.0
    codes = np.minimum((as_numbers(dataset["time"].values) - first) // width, count - 1).astype(np.int64)
    begins = first + width * np.arange(count)
    dates = dataset["time"].dtype.kind == "M"
    labels = begins.round().astype(np.int64).astype("datetime64[us]").astype("datetime64[ns]") if dates else begins
    return Grouping(name, labels, da.from_array(codes, chunks=(time_blocks(dataset),)))


def calendar(dataset: xr.Dataset, every: str, name: str) -> Grouping:
    """Every "year" or "month" from the first window's to the last one's, labelled by the date it begins at."""
    times = pd.DatetimeIndex(dataset["time"].values)
    number = COUNTED[every](times)
    first, last = (int(number.min()), int(number.max())) if len(times) else (0, 0)
    unit = {"year": "Y", "month": "M"}[every]
    labels = np.arange(first, last + 1).astype(f"datetime64[{unit}]").astype("datetime64[ns]")
    return Grouping(name, labels, da.from_array(number - first, chunks=(time_blocks(dataset),)))


# Since 1970.
COUNTED: dict[str, Callable[[pd.DatetimeIndex], np.ndarray]] = {
    "year": lambda times: times.year.to_numpy().astype(np.int64) - 1970,
    "month": lambda times: (times.year.to_numpy().astype(np.int64) - 1970) * 12 + times.month.to_numpy() - 1,
}
