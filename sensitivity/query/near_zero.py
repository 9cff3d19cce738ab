"""How many outputs are near zero: what divides by these is made by a few windows."""

from __future__ import annotations

import dask.array as da
import numpy as np
import xarray as xr

from ..suspicions import SMALL_OUTPUT
from .sums import TARGET


def near_zero(dataset: xr.Dataset, codes: da.Array) -> xr.DataArray:
    """The share of windows whose |prediction| is below `SMALL_OUTPUT` of its standard deviation: lazy float64
    `(output_step, output)`, NaN without windows.

    codes: int64 `(time)`, below zero where a window does not count. The predictions are read twice.
    """
    values = xr.DataArray(dataset["prediction"].variable.transpose("time", *TARGET))  # without labels
    finite: xr.DataArray = xr.apply_ufunc(np.isfinite, values, dask="allowed")
    counts = finite & xr.DataArray(codes >= 0, dims="time")
    known = values.astype(float).where(counts, 0)
    number = counts.sum("time")
    each = number.clip(min=1)
    mean, square = known.sum("time") / each, (known * known).sum("time") / each
    std = np.sqrt((square - mean * mean).clip(min=0))
    small = ((abs(known) < SMALL_OUTPUT * std) & counts).sum("time")
    return (small / each).where(number > 0)
