"""Pictures along the lag: profiles, their bands, features, output steps and months by lag."""

from __future__ import annotations

import calendar

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..query.alignment import counts_from
from ..query.sums import CELL
from . import look
from .bands import BAND
from .terms import heading

PANELS, LINES = 6, 10
ROWS = 30


def draw_profile(found: xr.Dataset, figure: Figure, top: int | None = None) -> None:
    """found: `mean_abs` `(output_step, output, lag, feature)`; its interval is drawn where there is one."""
    values = look.influence(found)
    order, others = look.most(values, top or LINES)
    axes = figure.subplots()
    at = look.places(values["lag"].values)
    interval = _interval(found)
    for i, name in enumerate(look.names(values.isel(feature=order))):
        how = look.line(i, len(at))
        axes.plot(at, values.isel(feature=order[i]), label=name, **how)
        if interval is not None:
            low, high = (edge.isel(feature=order[i]) for edge in interval)
            axes.fill_between(at, low, high, color=how["color"], alpha=0.25, linewidth=0)
    axes.invert_xaxis()
    _from_zero(axes, values.values)
    look.dress_lags(axes.xaxis, values["lag"])
    axes.set_ylabel(look.size_label(found))
    axes.legend(fontsize="small", bbox_to_anchor=(1.01, 1), loc="upper left", title="largest first", alignment="left")
    said = "" if interval is None else "bands: interval of the mean"
    _title(figure, "profile", found, others, said)


def _interval(found: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray] | None:
    """Of one target: those of several cannot be averaged."""
    if "mean_abs_low" not in found or not look.of_one_target(found):
        return None
    low, high = (look.scaled(found, f"mean_abs_{edge}").squeeze(look.targets(found)) for edge in ("low", "high"))
    return look.newest_last(low), look.newest_last(high)


def _from_zero(axes: Axes, values: np.ndarray) -> None:
    """The axis begins at zero, also where all there is lies there."""
    axes.set_ylim(0, None if np.nanmax(np.nan_to_num(values), initial=0) > 0 else 1)


def _title(figure: Figure, kind: str, found: xr.Dataset, *more: str, **named: str) -> None:
    what = heading(found, kind, output=look.output(found), **named)
    look.title(figure, what, look.windows(found), look.averaged(found), *more)


def draw_band(found: xr.Dataset, figure: Figure, top: int | None = None) -> None:
    """found: `mean_abs` and `size_quantile` `(lag, feature, at)` at `bands.BAND`; a panel for each feature."""
    values = look.influence(found)
    order, others = look.most(values, top or PANELS)
    quantile = look.newest_last(look.scaled(found, "size_quantile"))
    columns = min(3, len(order))
    rows = -(-len(order) // columns)
    figure.set_size_inches(look.WIDTH, max(look.HEIGHT * 0.8, 1.3 + 1.6 * rows))
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    labels = look.names(values.isel(feature=order))
    for axes, feature, label in zip(panels, order, labels, strict=False):
        _panel(axes, values.isel(feature=feature), quantile.isel(feature=feature))
        axes.set_title(label, loc="left")
    for axes in panels[len(order) :]:
        axes.set_axis_off()
    for axes in panels[max(0, len(order) - columns) : len(order)]:
        axes.tick_params(axis="x", labelbottom=True)
    panels[0].invert_xaxis()
    _from_zero(panels[0], quantile.values)
    figure.supxlabel(look.lag_label(values["lag"]), fontsize=9)
    figure.supylabel(look.size_label(found, "|{}|"), fontsize=9, multialignment="center")
    said = "line: mean; dark: the middle half of windows; light: 5–95 %"
    _title(figure, "band", found, said, others)


def _panel(axes: Axes, mean: xr.DataArray, quantile: xr.DataArray) -> None:
    at = look.places(mean["lag"].values)
    for (low, high), shade in (((0, 3), "#9ecae1"), ((1, 2), "#4292c6")):
        edges = [quantile.sel(at=BAND[place]) for place in (low, high)]
        axes.fill_between(at, edges[0], edges[1], color=shade, linewidth=0)
    axes.plot(at, mean, color="black", marker="." if len(at) == 1 else "")
    look.dress_lags(axes.xaxis, mean["lag"], label=False)


def draw_heatmap(found: xr.Dataset, figure: Figure, top: int | None = None) -> None:
    """found: `mean_abs` `(output_step, output, lag, feature)`: lag × feature."""
    values = look.influence(found)
    order, others = look.most(values, top or ROWS)
    values = values.isel(feature=order).transpose("feature", "lag")
    figure.set_size_inches(look.WIDTH, max(look.HEIGHT, 1.5 + 0.2 * len(order)))
    _rows(figure, found, values, look.names(values))
    _title(figure, "heatmap", found, others, look.holes(values.values))


def _rows(figure: Figure, found: xr.Dataset, values: xr.DataArray, labels: list[str] | None) -> Axes:
    """An image of values `(row, lag)`, the first row on top; without labels rows are numbered by their coordinate."""
    axes = figure.subplots()
    look.heat(axes, values.values, (*look.span(values["lag"].values), len(values) - 0.5, -0.5), look.size_label(found))
    look.dress_lags(axes.xaxis, values["lag"])
    if labels is not None:
        look.name_rows(axes, labels)
    return axes


def draw_steps(found: xr.Dataset, figure: Figure, top: int | None = None) -> None:
    """found: `mean_abs` `(output_step, output, lag, feature)`: output step × lag, the sum over features."""
    values = look.newest_last(look.total(look.scaled(found, "mean_abs")).mean("output")).transpose("output_step", "lag")
    steps = values["output_step"].values
    few = [str(step) for step in steps] if len(steps) <= ROWS else None
    axes = _rows(figure, found, values, few)
    if few is None:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(lambda place, _: str(steps[int(place)]) if 0 <= place < len(steps) else "")
    axes.set_ylabel("output step")
    parts = [look.windows(found), look.of_features(found), look.averaged(found.isel(output_step=[0]))]
    grey = look.holes(values.values)
    if grey and counts_from(found) == "output":
        grey = "grey: this lag of this output step is outside the window"
    look.title(figure, heading(found, "steps", output=look.output(found)), *parts, grey)


def draw_months(found: xr.Dataset, figure: Figure, top: int | None = None) -> None:
    """found: `mean_abs` with one dimension of groups in front, such as month: group × lag, the sum over features."""
    (group,) = (str(dim) for dim in found["mean_abs"].dims if dim not in CELL)
    values = look.total(look.influence(found)).transpose(group, "lag")
    labels = [calendar.month_abbr[row] if group == "month" else look.plain(row) for row in values[group].values]
    _rows(figure, found, values, labels).set_ylabel("" if group in ("month", "season") else look.plain(group))
    _title(figure, "groups", found, look.of_features(found), look.holes(values.values), group=look.plain(group))
