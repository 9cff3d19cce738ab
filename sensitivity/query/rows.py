"""Statistics as rows: what tables, CSV and JSON are made of."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import xarray as xr

from .pairs import matrix_of, stand_elsewhere
from .roles import roles_of


def rows(statistic: xr.Dataset) -> list[dict[str, object]]:
    """One row per label combination, labels first, then statistics; plain Python values, None for NaN.

    Labels: groups, then output step, output, lag and feature, or the product's own, then what the statistic itself
    tells apart. Groups of which there is no window at all have no rows; a pair has one, whatever its order.
    """
    dims = _order(statistic)
    names = [str(name) for name in statistic.data_vars]
    whole = [statistic[name].broadcast_like(_frame(statistic, dims)).transpose(*dims) for name in names]
    columns = [array.values.reshape(-1).tolist() for array in whole]
    labels = [_labels(statistic, dim) for dim in dims]
    combinations = np.ndindex(*(len(values) for values in labels))
    found = [
        {dim: labels[axis][i] for axis, (dim, i) in enumerate(zip(dims, index, strict=True))}
        | {name: _number(value) for name, value in zip(names, values, strict=True)}
        for index, *values in zip(combinations, *columns, strict=True)
    ]
    groups = [dim for dim in dims[: len(dims) - len(_own(statistic))] if dim not in roles_of(statistic).dims]
    found = _present(found, groups) if groups and "count" in names else found
    return _each_pair_once(found, statistic) if "pairs" in statistic.attrs else found


def _order(statistic: xr.Dataset) -> list[str]:
    own, labels = _own(statistic), roles_of(statistic).dims
    groups = [str(dim) for dim in statistic.dims if dim not in labels and dim not in own]
    return [*groups, *(dim for dim in labels if dim in statistic.dims), *own]


def _own(statistic: xr.Dataset) -> list[str]:
    """Dimensions that the statistic makes: `count` has no part in them."""
    if "count" not in statistic:
        return []
    return [str(dim) for dim in statistic.dims if dim not in {*statistic["count"].dims, *roles_of(statistic).dims}]


def _frame(statistic: xr.Dataset, dims: list[str]) -> xr.DataArray:
    return xr.DataArray(np.zeros([statistic.sizes[dim] for dim in dims], bool), dims=dims)


def _labels(statistic: xr.Dataset, dim: str) -> list[Any]:
    if dim not in statistic.coords:
        return list(range(statistic.sizes[dim]))
    values = statistic[dim].values
    return text_of(values).tolist() if values.dtype.kind == "M" else values.tolist()


def text_of(times: np.ndarray) -> np.ndarray:
    """Dates as text, to the second where that says all."""
    whole = times.astype("datetime64[s]")
    return np.datetime_as_string(whole if (whole == times).all() else times)


def _number(value: Any) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _present(found: list[dict[str, object]], groups: list[str]) -> list[dict[str, object]]:
    def group(row: dict[str, object]) -> tuple[object, ...]:
        return tuple(row[name] for name in groups)

    seen = {group(row) for row in found if row["count"]}
    return [row for row in found if group(row) in seen] or found


def _each_pair_once(found: list[dict[str, object]], statistic: xr.Dataset) -> list[dict[str, object]]:
    dims = matrix_of(statistic)
    if dims is None:
        return found
    first, second = (np.atleast_1d(statistic[dim].values).tolist() for dim in dims)
    empty = {
        (a, b) for (a, b), gone in zip(product(first, second), stand_elsewhere(first, second), strict=True) if gone
    }
    return [row for row in found if (row[dims[0]], row[dims[1]]) not in empty]
