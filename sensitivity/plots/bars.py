"""A bar for each feature: its importance, and how its derivatives are distributed."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..query.pairs import matrix_of
from . import look
from .pairs import draw_pairs
from .terms import heading, terms_of

ROWS = 25
BLUE, GREY = look.COLOURS[0], "#999999"
BOXES = ((0.01, 0.99, "#c6dbef", 0.3), (0.05, 0.95, "#6baed6", 0.55), (0.25, 0.75, "#2171b5", 0.8))


def draw_importance(found: xr.Dataset, figure: Figure, top: int | None = None) -> None:
    """found: `importance` `(output_step, output, feature)`; the largest on top, others as one bar.

    Of pairs of features it is a matrix.
    """
    if (dims := matrix_of(found)) is not None:
        return draw_pairs(found, dims, figure, top)
    values = found["importance"].mean(look.targets(found))
    order, others = look.most(values, top or ROWS)
    sizes, share = values.values[order], 100 * values.values / max(np.nansum(values.values), np.finfo(float).tiny)
    labels, texts = look.names(values.isel(feature=order)), [_percent(part) for part in share[order]]
    axes = _axes(figure, len(order) + bool(others))
    axes.barh(range(len(order)), sizes, color=BLUE, height=0.7, xerr=_interval(found, values, order), capsize=2)
    if others:
        rest = np.delete(np.arange(len(share)), order)
        axes.barh(len(order), np.nansum(values.values[rest]), color="white", edgecolor=GREY, hatch="////", height=0.7)
        labels, texts = [*labels, f"{len(rest)} others together"], [*texts, _percent(np.nansum(share[rest]))]
    look.name_rows(axes, labels)
    _beside(axes, found, texts)
    axes.set_xlabel("importance: " + look.size_label(found).replace("\n", " "))
    said = "bars' ends: interval" if "importance_low" in found and look.of_one_target(found) else ""
    own = terms_of(found)
    look.title(
        figure,
        heading(found, "importance", output=look.output(found)),
        look.windows(found),
        f"mean over {own.lag}s" if own.lag else "",
        look.averaged(found),
        others.replace("not drawn", "together"),
        said,
        found.attrs.get("note", "").replace("share:", "per cent:"),
    )


def _axes(figure: Figure, rows: int) -> Axes:
    figure.set_size_inches(look.WIDTH, 1.4 + 0.26 * max(rows, 4))
    axes = figure.subplots()
    axes.set_ylim(rows - 0.4, -0.6)
    axes.spines["left"].set_visible(False)
    return axes


def _percent(part: float) -> str:
    return f"{part:.0f} %" if part >= 0.5 or part == 0 else "< 1 %" if part > 0 else ""


def _beside(axes: Axes, found: xr.Dataset, texts: list[str]) -> None:
    """Each bar's share at the right edge, where no bar can reach it."""
    low, high = axes.get_xlim()
    axes.set_xlim(0, high if high > 0 and low < high else 1)
    for row, text in enumerate(texts):
        axes.annotate(text, (1.01, row), xycoords=("axes fraction", "data"), va="center", color="#444444")


def _interval(found: xr.Dataset, values: xr.DataArray, order: np.ndarray) -> np.ndarray | None:
    """How far it reaches below and above `(2, feature)`; of one target: those of several cannot be averaged."""
    if "importance_low" not in found or not look.of_one_target(found):
        return None
    low, high = (found[f"importance_{edge}"].squeeze(look.targets(found)).values[order] for edge in ("low", "high"))
    middle = values.values[order]
    return np.clip(np.nan_to_num([middle - low, high - middle]), 0, None)


def draw_distribution(found: xr.Dataset, figure: Figure, top: int | None = None) -> None:
    """found: `pooled_quantile` `(feature, at)` of J at `bands.LEVELS`: nested boxes, the widest-ranging on top."""
    values = look.scaled(found, "pooled_quantile")
    order, others = look.most(abs(values.sel(at=[0.05, 0.95])).max("at"), top or ROWS)
    values = values.isel(feature=order)
    axes = _axes(figure, len(order))
    rows = np.arange(len(order))
    for low, high, shade, height in BOXES:
        left, right = np.nan_to_num(values.sel(at=low).values), np.nan_to_num(values.sel(at=high).values)
        label = f"{low:.0%} to {high:.0%}".replace("% to", " to").replace("%", " %")
        axes.barh(rows, right - left, left=left, height=height, color=shade, label=label)
    axes.use_sticky_edges = False
    axes.plot(values.sel(at=0.5), rows, "|", color="white", markersize=9, markeredgewidth=2.5)
    axes.plot(values.sel(at=0.5), rows, "|", color="black", markersize=9, markeredgewidth=1.2, label="median")
    axes.axvline(0, color="#666666", linewidth=0.8, zorder=0)
    look.name_rows(axes, look.names(values))
    axes.legend(fontsize="small", bbox_to_anchor=(1.01, 1), loc="upper left")
    axes.set_xlabel(look.size_label(found, "{}").replace("\n", " "))
    title = heading(found, "distribution", output=look.output(found))
    look.title(figure, title, look.windows(found), _together(found), others)


def _together(found: xr.Dataset) -> str:
    return look.averaged(found).replace("mean over", "all of")
