"""What pictures of recurrent layers share: a page of panels, what is thinned out, what is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..plots import Picture, look

ALARM = "#e6007e"  # of no palette that values are drawn in
SHOWN = 0.995  # of all numbers are within a colour scale; a few large ones would leave the others grey
_FAR = 1.5  # times that scale: numbers beyond are worth an arrow on the colour bar


def drawn(draw: Callable[[Figure], None], height: float = look.HEIGHT) -> Picture:
    """A figure of the house's width, in its style; no part of pyplot, which would keep it."""
    with look.style():
        picture = Picture(figsize=(look.WIDTH, height), layout="constrained")
        draw(picture)
    return picture


def grid(count: int, columns: int) -> tuple[int, int]:
    """Rows and columns of so many panels."""
    columns = min(columns, count)
    return math.ceil(count / columns), columns


def evenly(count: int, most: int) -> np.ndarray:
    """At most so many of them, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(int))


def largest_units(values: np.ndarray, most: int) -> np.ndarray:
    """Units of `(batch, …, unit)` of the largest mean size, at most so many, in their own order; NaN is largest."""
    sizes = np.abs(values).reshape(-1, values.shape[-1])
    with np.errstate(over="ignore"):
        weight = np.where(np.isfinite(sizes).all(0), sizes.mean(0), np.inf)
    return np.sort(np.argsort(-weight, kind="stable")[:most])


def of_all(drawn: int, count: int, what: str, which: str) -> str:
    """What is to be said of a selection: "12 of 64 units, those of the largest mean |gradient|"."""
    return f"{count:,} {what}" if drawn == count else f"{drawn:,} of {count:,} {what}, {which}"


def alarm_of(values: np.ndarray) -> str:
    """In words; empty where all numbers are finite."""
    nans, infinities = int(np.isnan(values).sum()), int(np.isinf(values).sum())
    said = [f"{n:,} {word}" for n, word in ((nans, "NaN"), (infinities, "infinite")) if n]
    return f"NOT FINITE: {' and '.join(said)} of {values.size:,} numbers" if said else ""


def sound(figure: Figure, alarm: str) -> None:
    """The alarm below the panels, where it cannot be overlooked."""
    if alarm:
        figure.supxlabel(alarm, color=ALARM, fontsize=10, fontweight="bold")


def mark(axes: Axes) -> None:
    """A panel with a number that is not finite."""
    for side in axes.spines.values():
        side.set(visible=True, color=ALARM, linewidth=2)


def scale(values: np.ndarray) -> tuple[float, str]:
    """The end of a colour scale for |values|, and at which ends its colour bar goes on (matplotlib's `extend`)."""
    sizes = np.abs(values[np.isfinite(values)])
    top = look.largest(sizes)
    usual = float(np.quantile(sizes, SHOWN)) if sizes.size else 0.0
    far = usual > 0 and top > _FAR * usual
    signed = bool((values < 0).any())
    return (usual if far else top), ("both" if signed else "max") if far else "neither"


def image(axes: Axes, values: np.ndarray, end: float, extent: Any = None, *, signed: bool) -> Any:
    """Of values `(y, x)` up to end, from zero or from -end on; what is not finite in the colour of alarm."""
    cmap = matplotlib.colormaps[look.SIGNED if signed else look.MAGNITUDES].with_extremes(bad=ALARM)
    shown = np.ma.masked_invalid(values)
    return axes.imshow(
        shown, aspect="auto", cmap=cmap, vmin=-end if signed else 0, vmax=end, extent=extent, interpolation="nearest"
    )


def bar(figure: Figure, shown: Any, axes: Any, extend: str, label: str) -> None:
    found = figure.colorbar(shown, ax=axes, extend=extend, pad=0.02)
    found.set_label(label)
    found.outline.set_visible(False)


def hide(axes: Iterable[Axes]) -> None:
    for one in axes:
        one.set_axis_off()
