"""Quantiles of all windows' derivatives at once: of |J| over outputs, and of J over outputs and lags."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from ..query import histogram
from ..query.naming import COUNT
from ..query.statistics import Statistic
from ..query.sums import TARGET

BAND = (0.05, 0.25, 0.75, 0.95)
LEVELS = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_NEEDS = ("count", "histogram", "tops")


def _pooled(sums: xr.Dataset, name: str, over: Sequence[str], at: Sequence[float], sized: bool) -> xr.Dataset:
    """Quantiles `(…, at)` of J, or of |J| if sized, of all windows and all of the dimensions `over` together."""
    kept = [dim for dim in sums["tops"].dims if dim not in over]
    counts = sums["histogram"].transpose(*kept, *over, "bin").values
    tops = sums["tops"].transpose(*kept, *over).values
    values = np.full((*tops.shape[: len(kept)], len(at)), np.nan)
    for place in np.ndindex(values.shape[:-1]):
        values[place] = _quantiles(counts[place], tops[place], np.array(at), sums.attrs["dtype"], sized)
    coords: dict[Any, Any] = {dim: sums[dim] for dim in kept if dim in sums.coords}
    found = xr.DataArray(values, dims=(*kept, "at"), coords=coords | {"at": np.array(at)})
    known = {key: sums[key] for key in ("input_std",) if key in sums.coords}
    return xr.Dataset({"count": sums["count"], name: found}, coords=known)


def _quantiles(counts: np.ndarray, tops: np.ndarray, at: np.ndarray, dtype: str, sized: bool) -> np.ndarray:
    """Of histograms `(…, bin)` with tops `(…)` taken together: the entries of these ranks, as `histogram.quantile`."""
    *cells, bins = np.nonzero(counts)
    if not len(bins):
        return np.full(len(at), np.nan)
    values = histogram.middles(bins, tops[tuple(cells)], dtype)
    values = np.abs(values) if sized else values
    order = np.argsort(values)
    running = np.cumsum(counts[(*cells, bins)][order], dtype=np.float64)
    ranks = np.maximum(np.ceil(at * running[-1] * (1 - 1e-12)), 1)
    return values[order][np.searchsorted(running, ranks)]


sizes = Statistic(
    "size-quantiles",
    _NEEDS,
    partial(_pooled, name="size_quantile", over=TARGET, at=BAND, sized=True),
    ("count",),
    words=COUNT | {"size_quantile": ("quantile of |{letter}| over windows and outputs", "{unit}")},
)
spread = Statistic(
    "spread",
    _NEEDS,
    partial(_pooled, name="pooled_quantile", over=(*TARGET, "lag"), at=LEVELS, sized=False),
    ("count",),
    words=COUNT | {"pooled_quantile": ("quantile of the {noun} over windows, lags and outputs", "{unit}")},
)
