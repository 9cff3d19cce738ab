"""Two runs, sites or models side by side: the importance of each feature, and where their lag profiles differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..query.pairs import each_once
from ..query.roles import CALLED
from . import look
from .terms import heading, terms_of

ROWS = 20
COUNTED = {"long_name": "number of windows that the values are from", "units": "1"}


def side_by_side(both: Sequence[xr.Dataset], names: Sequence[str] | None = None) -> xr.Dataset:
    """`importance` `(run, feature)` and `influence` `(run, lag, feature)`, lazy, of two datasets with both statistics.

    Features and lags that only one has are NaN for the other.
    """
    parts = [_comparable(found) for found in both]
    features = list(dict.fromkeys(name for part in parts for name in part["feature"].values.tolist()))
    falling = CALLED not in both[0]["lag"].attrs
    lags = sorted({lag for part in parts for lag in part["lag"].values.tolist()}, reverse=falling)
    labels: dict[str, Any] = {"lag": ("lag", lags, both[0]["lag"].attrs), "feature": np.array(features, object)}
    units = {found.attrs.get("units") for found in both}
    words = look.size_label(both[0]).replace("\n", " ")
    of_both = {name: _stacked([part[name] for part in parts], labels) for name in ("importance", "influence")}
    made: dict[str, Any] = {
        "importance": (("run", "feature"), of_both["importance"], _words(both, f"importance: {words}")),
        "influence": (("run", "lag", "feature"), of_both["influence"], _words(both, f"influence by lag: {words}")),
        "windows": ("run", da.stack([da.asarray(found["count"].max().data) for found in both]), COUNTED),
    }
    named = {"units": units.pop()} if len(units) == 1 and None not in units else {}
    attrs = {"windows": [found.attrs.get("windows", 0) for found in both], **named}
    if "roles" in both[0].attrs:
        attrs |= {"roles": both[0].attrs["roles"], "scaled": look.is_scaled(both[0])}
    return xr.Dataset(made, coords=labels | {"run": list(names or _names(*both))}, attrs=attrs)


def _words(both: Sequence[xr.Dataset], long_name: str) -> dict[str, str]:
    own = terms_of(both[0])
    return {"long_name": long_name, "units": f"{look.units(both[0])}{own.left if look.is_scaled(both[0]) else own.per}"}


def _comparable(found: xr.Dataset) -> xr.Dataset:
    found = each_once(found)
    importance = found["importance"].mean(look.targets(found))
    return xr.Dataset({"importance": importance, "influence": look.influence(found).transpose("lag", "feature")})


def _stacked(parts: Sequence[xr.DataArray], labels: dict[str, Any]) -> da.Array:
    """Both on common labels: not by xarray, which reindexes Dask arrays in pieces."""
    whole = xr.Dataset(coords=labels)
    shape = tuple(whole.sizes[str(dim)] for dim in parts[0].dims)
    laid = []
    for part in parts:
        at = np.ix_(*(whole.indexes[str(dim)].get_indexer(part[dim].values.tolist()) for dim in part.dims))
        data = da.asarray(part.data).rechunk(-1)
        laid.append(data.map_blocks(_laid, at=at, shape=shape, dtype=float, chunks=shape, meta=np.empty(0)))
    return da.stack(laid)


def _laid(values: np.ndarray, at: tuple[np.ndarray, ...], shape: tuple[int, ...]) -> np.ndarray:
    found = np.full(shape, np.nan)
    found[at] = values
    return found


def _names(*found: xr.Dataset) -> list[str]:
    names = [PurePosixPath(str(one.attrs.get("run", "run"))).name for one in found]
    return names if names[0] != names[1] else [f"{name} ({i + 1})" for i, name in enumerate(names)]


def draw_comparison(found: xr.Dataset, figure: Figure, top: int | None = None) -> None:
    """found: as `side_by_side` makes it. Left: both importances. Right: first − second, by lag, with the
    sign that `query.compare` has.
    """
    order, others = look.most(found["importance"].max("run"), top or ROWS)
    found = found.isel(feature=order)
    figure.set_size_inches(look.WIDTH * 1.25, 1.9 + 0.34 * max(len(order), 4))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1.4))
    _draw_bars(left, found)
    _draw_difference(right, found)
    look.name_rows(left, look.names(found))
    right.tick_params(axis="y", length=0)
    first, second = (look.plain(name) for name in found["run"].values)
    gaps = "grey: only one of the two has it" if not np.isfinite(found["influence"]).all() else ""
    counts = [
        f"{look.plain(name)}: {int(count):,} of {total:,} windows"
        for name, count, total in zip(found["run"].values, found["windows"].values, found.attrs["windows"], strict=True)
    ]
    look.title(figure, heading(found, "comparison", pair=f"{first} and {second}"), *counts, others, gaps)


def _draw_bars(axes: Axes, found: xr.Dataset) -> None:
    rows = np.arange(found.sizes["feature"])
    for i, (shift, hatch) in enumerate(((-0.2, ""), (0.2, "////"))):
        sizes = np.nan_to_num(found["importance"].isel(run=i).values)
        name = look.plain(found["run"].values[i])
        axes.barh(rows + shift, sizes, height=0.38, color=look.COLOURS[i], edgecolor="white", hatch=hatch, label=name)
    axes.set_xlim(0, None if np.nansum(found["importance"]) > 0 else 1)
    axes.legend(fontsize="small", loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)
    axes.set_xlabel(look.size_label(found, "importance: mean |{}|"))
    axes.spines["left"].set_visible(False)


def _draw_difference(axes: Axes, found: xr.Dataset) -> None:
    values = look.newest_last(found["influence"])
    gap = (values.isel(run=0) - values.isel(run=1)).transpose("feature", "lag")
    high = look.largest(gap.values)
    extent = (*look.span(gap["lag"].values), len(gap) - 0.5, -0.5)
    label = look.size_label(found, "difference of mean |{}|")
    look.heat(axes, gap.values, extent, label, cmap=look.SIGNED, vmin=-high, vmax=high)
    look.dress_lags(axes.xaxis, gap["lag"])
    first, second = (look.plain(name) for name in found["run"].values)
    axes.set_title(f"{first} − {second},{terms_of(found).by_lag}".rstrip(","), loc="left")
