"""Statistics from sums over time of each derivative J: count, Σ J, Σ |J|, Σ J² over finite entries.

Sums of parts add up to the sums of the whole, so neither chunks nor their order change an answer beyond rounding
(float64).
"""

from __future__ import annotations

import dask.array as da
import numpy as np
import xarray as xr

SUMS = ("count", "total", "total_abs", "total_squares")


def sums(dataset: xr.Dataset) -> xr.Dataset:
    """Count, Σ J, Σ |J| and Σ J² over time, finite entries only: lazy float64 `(output_step, output, lag, feature)`."""
    jacobian = dataset["jacobian"].chunk()
    blocks = jacobian.data
    chunks = ((1,) * blocks.numblocks[0], *blocks.chunks[1:], (len(SUMS),))
    parts = da.map_blocks(
        _block_sums, blocks, dtype=np.float64, chunks=chunks, new_axis=blocks.ndim, meta=np.empty((0,) * 6)
    )
    totals = parts.sum(axis=0)
    dims = jacobian.dims[1:]
    labels = {name: jacobian[name] for name in dims} | {"input_std": dataset["input_std"]}
    return xr.Dataset({name: (dims, totals[..., i]) for i, name in enumerate(SUMS)}, coords=labels)


def _block_sums(block: np.ndarray) -> np.ndarray:
    """`(time, …)` → `(1, …, 4)`: the block's `SUMS`."""
    finite = np.isfinite(block)
    values = np.where(finite, block, 0).astype(np.float64)
    parts = (finite.sum(axis=0), values.sum(axis=0), np.abs(values).sum(axis=0), np.square(values).sum(axis=0))
    return np.stack(parts, axis=-1, dtype=np.float64)[None]


def lag_profile(dataset: xr.Dataset) -> xr.Dataset:
    """`count`, `mean` J, `mean_abs` |J| and `rms` J over time: lazy `(output_step, output, lag, feature)`.

    J is in units of the output per unit of the feature; NaN where no window counts.
    """
    found = sums(dataset)
    weight = found["count"].where(found["count"] > 0)
    return xr.Dataset(
        {
            "count": found["count"].astype(np.int64),
            "mean": found["total"] / weight,
            "mean_abs": found["total_abs"] / weight,
            "rms": np.sqrt(found["total_squares"] / weight),
        }
    )


def importance(dataset: xr.Dataset) -> xr.Dataset:
    """What each feature moves the output by, typically: lazy `(output_step, output, feature)`.

    `count` windows; `mean_abs` |J| over windows and lags; `input_std`, the feature's standard deviation over the
    series; `importance` = mean_abs × input_std, in units of the output; `share`, importance by its sum over features.
    """
    found = sums(dataset)
    std = found["input_std"].reset_coords(drop=True)
    found = found.drop_vars("input_std")
    weight = found["count"].sum("lag")
    mean_abs = found["total_abs"].sum("lag") / weight.where(weight > 0)
    importance = mean_abs * std
    total = importance.sum("feature")
    return xr.Dataset(
        {
            "count": found["count"].max("lag").astype(np.int64),
            "mean_abs": mean_abs,
            "input_std": std.broadcast_like(mean_abs),
            "importance": importance,
            "share": importance / total.where(total > 0),
        }
    )


STATISTICS = {"importance": importance, "lag-profile": lag_profile}
