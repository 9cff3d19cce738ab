"""Two runs, sites or models side by side: the importance of each feature, and where their lag profiles differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from . import look

ROWS = 20


def side_by_side(both: Sequence[xr.Dataset], names: Sequence[str] | None = None) -> xr.Dataset:
    """`importance` `(run, feature)` and `influence` `(run, lag, feature)`, lazy, of two datasets with both statistics.

    Features and lags that only one has are NaN for the other.
    """
    parts = [_comparable(found) for found in both]
    labels = list(names) if names else _names(*both)
    joined = xr.concat(
        parts, xr.Variable("run", labels), join="outer", coords="minimal", compat="override", combine_attrs="override"
    )
    return joined.assign_attrs(windows=[found.attrs.get("windows", 0) for found in both])


def _comparable(found: xr.Dataset) -> xr.Dataset:
    importance = found["importance"].mean(look.targets(found))
    made = {"importance": importance, "influence": look.influence(found), "windows": _windows(found)}
    return xr.Dataset(made).drop_vars("input_std", errors="ignore")


def _windows(found: xr.Dataset) -> xr.DataArray:
    return found["count"].max()


def _names(*found: xr.Dataset) -> list[str]:
    names = [PurePosixPath(str(one.attrs.get("run", "run"))).name for one in found]
    return names if names[0] != names[1] else [f"{name} ({i + 1})" for i, name in enumerate(names)]


def draw_comparison(found: xr.Dataset, figure: Figure, top: int | None = None) -> None:
    """found: as `side_by_side` makes it. Left: both importances; right: second − first, by lag."""
    order, others = look.most(found["importance"].max("run"), top or ROWS)
    found = found.isel(feature=order)
    figure.set_size_inches(look.WIDTH * 1.25, 1.9 + 0.34 * max(len(order), 4))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1.4))
    _draw_bars(left, found)
    _draw_difference(right, found)
    look.name_rows(left, look.names(found))
    right.tick_params(axis="y", length=0)
    first, second = (look.plain(name) for name in found["run"].values)
    counts = [
        f"{look.plain(name)}: {int(count):,} of {total:,} windows"
        for name, count, total in zip(found["run"].values, found["windows"].values, found.attrs["windows"], strict=True)
    ]
    look.title(figure, f"{first} and {second}: what the output depends on", *counts, others)


def _draw_bars(axes: Axes, found: xr.Dataset) -> None:
    rows = np.arange(found.sizes["feature"])
    for i, (shift, hatch) in enumerate(((-0.2, ""), (0.2, "////"))):
        sizes = np.nan_to_num(found["importance"].isel(run=i).values)
        name = look.plain(found["run"].values[i])
        axes.barh(rows + shift, sizes, height=0.38, color=look.COLOURS[i], edgecolor="white", hatch=hatch, label=name)
    axes.set_xlim(0, None if np.nansum(found["importance"]) > 0 else 1)
    axes.legend(fontsize="small", loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)
    axes.set_xlabel(look.size_label(found, "importance: mean |∂output/∂input|"))
    axes.spines["left"].set_visible(False)


def _draw_difference(axes: Axes, found: xr.Dataset) -> None:
    values = look.newest_last(found["influence"])
    gap = (values.isel(run=1) - values.isel(run=0)).transpose("feature", "lag")
    high = look.largest(gap.values)
    extent = (*look.span(gap["lag"].values), len(gap) - 0.5, -0.5)
    label = look.size_label(found, "difference of mean |∂output/∂input|")
    look.heat(axes, gap.values, extent, label, cmap=look.SIGNED, vmin=-high, vmax=high)
    look.dress_lags(axes.xaxis, gap["lag"])
    first, second = (look.plain(name) for name in found["run"].values)
    axes.set_title(f"{second} − {first}, by lag", loc="left")
