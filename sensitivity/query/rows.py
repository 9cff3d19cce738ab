"""Statistics as rows: what tables, CSV and JSON are made of."""

from __future__ import annotations

import numpy as np
import xarray as xr


def rows(statistic: xr.Dataset) -> list[dict[str, object]]:
    """One row per label combination, labels first, then statistics; plain Python values, None for NaN."""
    dims = [name for name in ("site", "output_step", "output", "lag", "feature") if name in statistic.dims]
    names = [str(name) for name in statistic.data_vars]
    columns = [statistic[name].transpose(*dims).values.reshape(-1).tolist() for name in names]
    labels = [statistic[dim].values.tolist() for dim in dims]
    combinations = np.ndindex(*(len(values) for values in labels))
    return [
        {dim: labels[axis][i] for axis, (dim, i) in enumerate(zip(dims, index, strict=True))}
        | {name: None if value != value else value for name, value in zip(names, values, strict=True)}
        for index, *values in zip(combinations, *columns, strict=True)
    ]
