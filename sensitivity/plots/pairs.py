"""A cell for each pair of features: how much the output bends by both."""

from __future__ import annotations

import textwrap

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from . import look
from .terms import heading, terms_of

ROWS = 20
UNIT = 34  # characters of a unit on one line
WRITTEN = 10  # rows; of more, numbers would not fit into cells


def draw_pairs(found: xr.Dataset, dims: tuple[str, str], figure: Figure, top: int | None = None) -> None:
    """found: `importance` `(output_step, output, feature)` by pairs of `dims`; each pair once, the largest first."""
    values = found["importance"].mean(look.targets(found)).values
    first, second = (found.attrs["roles"].labels[dim].values.tolist() for dim in dims)
    matrix, order, left_out = _most(values.reshape(len(first), len(second)), first == second, top or ROWS)
    rows, columns = (
        [str(names[place]) for place in places] for names, places in zip((first, second), order, strict=True)
    )
    figure.set_size_inches(look.WIDTH, 1.9 + 0.34 * max(len(rows), 5))
    axes = figure.subplots()
    extent = (-0.5, len(columns) - 0.5, len(rows) - 0.5, -0.5)
    size, unit = look.size_label(found).split("\n")
    look.heat(axes, matrix, extent, f"importance\n{textwrap.fill(unit, UNIT)}", nothing="white")
    look.name_rows(axes, [look.plain(name) for name in rows])
    axes.set_xticks(range(len(columns)), [look.plain(name) for name in columns], rotation=30, ha="right")
    axes.tick_params(axis="x", length=0)
    written = max(matrix.shape) <= WRITTEN
    if written:
        for (row, column), value in np.ndenumerate(matrix):
            shade = "white" if value < 0.6 * look.largest(matrix) else "black"
            axes.text(column, row, _percent(value / np.nansum(values)), ha="center", va="center", color=shade)
    look.title(
        figure,
        heading(found, "importance", output=look.output(found)),
        look.windows(found),
        f"{size}, both orders of a pair together" + ("; per cent of all pairs" if written else ""),
        f"mean over {own.lag}s of both" if (own := terms_of(found)).lag else "",
        look.averaged(found),
        left_out,
    )


def _most(matrix: np.ndarray, square: bool, top: int) -> tuple[np.ndarray, list[np.ndarray], str]:
    """The rows and columns with the largest sums, in falling order; of a square each pair above the diagonal."""
    known = np.nan_to_num(matrix)
    if square:
        both = np.where(np.isfinite(matrix), matrix, matrix.T)
        order = np.argsort(-np.nan_to_num(both).sum(axis=0), kind="stable")[:top]
        found = np.where(np.tri(len(order), k=-1, dtype=bool), np.nan, both[np.ix_(order, order)])
        places = [order, order]
    else:
        places = [np.argsort(-known.sum(axis=axis), kind="stable")[:top] for axis in (1, 0)]
        found = matrix[np.ix_(*places)]
    whole, left = known.sum(), known.sum() - np.nan_to_num(found).sum()
    rest = max(len(matrix) - len(places[0]), matrix.shape[1] - len(places[1]))
    share = f", {100 * left / whole:.0f} % of the sum" if whole > 0 else ""
    return found, places, f"not drawn: {rest} other{'s' * (rest > 1)}{share}" if rest > 0 else ""


def _percent(part: float) -> str:
    return "" if not np.isfinite(part) else f"{100 * part:.0f} %" if part >= 0.005 or part == 0 else "< 1 %"
