"""Share of windows whose output is near zero, where a division by the output is unreliable."""

from __future__ import annotations

from collections.abc import Sequence

import dask
import dask.array as da
import numpy as np
import xarray as xr

from ..suspicions import SMALL_OUTPUT
from .sums import TARGET
from .tasks import tree


def near_zero(dataset: xr.Dataset, codes: da.Array) -> xr.DataArray:
    """The share of windows whose |prediction| is below `SMALL_OUTPUT` of its standard deviation: lazy float64
    `(output_step, output)`, NaN without windows.

    codes: int64 `(time)`, below zero where a window does not count. The predictions are read twice, block by block:
    kept until their standard deviation is known, they might fill the memory.
    """
    values = dataset["prediction"].transpose("time", *TARGET)
    data = da.asarray(values.data).rechunk({1: -1, 2: -1})
    codes = codes.rechunk({0: data.chunks[0]})
    blocks = range(data.numblocks[0])
    sums = tree(_moments, [data, codes], [[(i, 0, 0), (i,)] for i in blocks], _added)
    std = da.from_delayed(dask.delayed(_deviation)(sums), data.shape[1:], np.float64)
    small = tree(_small, [data, codes, std], [[(i, 0, 0), (i,), (0, 0)] for i in blocks], _added)
    share = da.from_delayed(dask.delayed(_share)(small), data.shape[1:], np.float64)
    labels = {name: values[name].variable for name in TARGET if name in values.coords}
    return xr.DataArray(share, dims=TARGET, coords=labels)


def _moments(predictions: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Number, sum and sum of squares of the predictions that count: `(3, output_step, output)`."""
    known, counts = _counted(predictions, codes)
    return np.stack([counts.sum(0), known.sum(0), np.square(known).sum(0)])


def _small(predictions: np.ndarray, codes: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Number of the predictions that count, and of those that are near zero: `(2, output_step, output)`."""
    known, counts = _counted(predictions, codes)
    return np.stack([counts.sum(0), (counts & (np.abs(known) < SMALL_OUTPUT * std)).sum(0)]).astype(float)


def _counted(predictions: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Predictions in float64, 0 where they do not count, and whether they do."""
    counts = np.isfinite(predictions) & (codes >= 0)[:, None, None]
    return np.where(counts, predictions, 0).astype(float), counts


def _added(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.sum(parts, axis=0)


def _deviation(sums: np.ndarray) -> np.ndarray:
    number, total, squares = sums
    mean = total / np.maximum(number, 1)
    return np.sqrt(np.maximum(squares / np.maximum(number, 1) - mean**2, 0))


def _share(counts: np.ndarray) -> np.ndarray:
    number, small = counts
    return np.where(number > 0, small / np.maximum(number, 1), np.nan)
