"""Share of windows whose output is near zero, where a division by the output is unreliable."""

from __future__ import annotations

import dask.array as da
import numpy as np
import xarray as xr
from dask.graph_manipulation import bind

from ..suspicions import SMALL_OUTPUT
from .sums import TARGET


def near_zero(dataset: xr.Dataset, codes: da.Array) -> xr.DataArray:
    """The share of windows whose |prediction| is below `SMALL_OUTPUT` of its standard deviation: lazy float64
    `(output_step, output)`, NaN without windows.

    codes: int64 `(time)`, below zero where a window does not count. The predictions are read twice, the second time
    when their standard deviation is known: kept until then, they might fill the memory.
    """
    values = dataset["prediction"].transpose("time", *TARGET)
    data = da.asarray(values.data)
    known, counts = _counted(data, codes)
    number, total, squares = counts.sum(0), known.sum(0), (known**2).sum(0)
    mean = total / da.maximum(number, 1)
    std = da.sqrt(da.maximum(squares / da.maximum(number, 1) - mean**2, 0))
    again, counted = _counted(*bind([data, codes], [std]))
    small = ((abs(again) < SMALL_OUTPUT * std) & counted).sum(0)
    share = da.where(number > 0, small / da.maximum(number, 1), np.nan)
    labels = {name: values[name].variable for name in TARGET if name in values.coords}
    return xr.DataArray(share, dims=TARGET, coords=labels)


def _counted(data: da.Array, codes: da.Array) -> tuple[da.Array, da.Array]:
    """Predictions in float64, 0 where they do not count, and whether they do: `(time, output_step, output)` each."""
    counts = da.isfinite(data) & (codes >= 0)[:, None, None]
    return da.where(counts, data, 0).astype(float), counts
