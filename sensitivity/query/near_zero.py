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
    values = dataset["prediction"].transpose("time", *TARGET)
    counts = xr.apply_ufunc(np.isfinite, values, dask="allowed") & xr.DataArray(codes >= 0, dims="time")
    known = values.astype(float).where(counts)
    small = (abs(known) < SMALL_OUTPUT * known.std("time")) & counts
    number = counts.sum("time")
    return (small.sum("time") / number.where(number > 0)).drop_vars(
        [name for name in values.coords if name not in TARGET], errors="ignore"
    )
