"""Pictures of gradients by a recurrent layer's output, over its steps and units."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..errors import Refused
from ..plots import Picture, look
from .canvas import ALARM, alarm_of, bar, drawn, evenly, grid, hide, image, largest_units, of_all, scale, sound
from .decay import require, sequences, split_units

Panels = Literal["unit", "all"]
PANELS, LINES, POINTS = 12, 20, 2000
_COLUMNS = 4
_LAG = {
    "forward": "lag (steps back from the window's newest)",
    "backward": "lag (steps back along the backward pass, from the window's oldest)",
}
_LARGEST, _EVEN = "those of the largest mean |gradient|", "evenly chosen"


def draw_lines(
    gradients: Any,
    *,
    panels: Panels = "unit",
    layer: str = "layer",
    unit: str = "gradient",
    most_panels: int = PANELS,
    most_lines: int = LINES,
) -> Picture:
    """Gradients `(batch, step, unit)` over the window's steps, a line a window.

    panels: "unit", one for each unit, or "all", one with a line for each window and unit. layer: its name. unit: what
    one of gradients is in, for the axis. At most so many panels, of the units with the largest mean |gradient|, and so
    many lines in each, evenly chosen; the picture says how many of how many. NaN and infinite numbers are crosses.
    """
    values = sequences(gradients)
    if panels not in get_args(Panels):
        raise Refused("panels", given=panels, allowed='"unit" or "all"', remedy="name one of these")
    _positive(most_panels=most_panels, most_lines=most_lines)
    if panels == "all":
        return drawn(lambda figure: _together(figure, values, layer, unit, most_lines))
    units = largest_units(values, most_panels)
    windows = evenly(len(values), most_lines)
    rows, columns = grid(len(units), _COLUMNS)

    def draw(figure: Figure) -> None:
        every = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for axes, number in zip(every.flat, units, strict=False):
            _lines(axes, values[windows][..., number])
            axes.set_title(f"unit {number}", loc="left")
        hide(every.flat[len(units) :])
        for axes in every.flat[max(0, len(units) - columns) : len(units)]:
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("lag (steps back)")
        figure.supylabel(unit, fontsize=9)
        chosen = of_all(len(units), values.shape[-1], "units", _LARGEST)
        _finish(figure, f"Gradients by the output of {look.plain(layer)}", values, chosen, windows)

    return drawn(draw, 1.6 + 1.5 * rows)


def _together(figure: Figure, values: np.ndarray, layer: str, unit: str, most: int) -> None:
    axes = figure.subplots()
    lines = np.moveaxis(values, -1, 1).reshape(-1, values.shape[1])
    chosen = evenly(len(lines), most)
    _lines(axes, lines[chosen])
    axes.set_ylabel(unit)
    axes.set_xlabel(_LAG["forward"])
    said = of_all(len(chosen), len(lines), "lines, of a window and a unit each", _EVEN)
    look.title(figure, f"Gradients by the output of {look.plain(layer)}", said)
    sound(figure, alarm_of(values))


def _lines(axes: Axes, values: np.ndarray) -> None:
    """values `(line, step)`, oldest step first"""
    lags = np.arange(values.shape[1])[::-1]
    colours = look.COLOURS
    for i, line in enumerate(np.where(np.isfinite(values), values, np.nan)):
        axes.plot(lags, line, color=colours[i % len(colours)], linewidth=0.9, alpha=0.8, marker=_marker(line))
    axes.axhline(0, color="#999999", linewidth=0.6, zorder=0)
    _cross(axes, lags[~np.isfinite(values).all(0)])
    axes.set_xlim(len(lags) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=5))


def _cross(axes: Axes, places: np.ndarray) -> None:
    """Just above the axis, where numbers are not finite."""
    if len(places):
        axes.plot(places, np.full(len(places), 0.03), "x", color=ALARM, transform=axes.get_xaxis_transform())


def _marker(line: np.ndarray) -> str:
    """A step between two that are not finite has no line to be seen by."""
    known = np.isfinite(line)
    return "" if len(line) > 1 and (known[1:] & known[:-1]).any() else "."


def draw_heatmap(
    gradients: Any,
    *,
    bidirectional: bool = False,
    window: int | None = None,
    layer: str = "layer",
    unit: str = "gradient",
) -> Picture:
    """Gradients `(batch, step, unit)` by lag and unit: their mean size over windows, or those of one window, signed.

    bidirectional: units of a forward pass, then as many of a backward one: each has a panel, the backward one mirrored,
    so that in both lag 0, on the right, is where the pass ends. window: the number of the one that is drawn; None: the
    mean of |gradient| over all. NaN and infinite numbers have a colour of their own. layer, unit: as for `draw_lines`.
    """
    values = sequences(gradients)
    if window is not None and not -len(values) <= window < len(values):
        raise Refused("window", given=window, allowed=f"0 to {len(values) - 1}", remedy="choose one of these")
    halves = split_units(values) if bidirectional else {"forward": values}
    with np.errstate(invalid="ignore", over="ignore"):
        shown = {name: np.abs(half).mean(0) if window is None else half[window] for name, half in halves.items()}

    def draw(figure: Figure) -> None:
        every = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
        _heat(figure, every, shown, unit if window is not None else f"mean |{unit}|")
        if bidirectional:
            every[0].set_title("forward: left to right is the order of time", loc="left")
            every[1].set_title("backward, mirrored: left to right is against the order of time", loc="left")
        what = f"mean size over {len(values):,} windows" if window is None else f"window {window} of {len(values):,}"
        look.title(figure, f"Gradients by the output of {look.plain(layer)}", what, f"{values.shape[-1]} units")
        sound(figure, alarm_of(values if window is None else values[window]))

    return drawn(draw, 1.3 + 2.7 * len(shown))


def _heat(figure: Figure, every: Any, shown: dict[str, np.ndarray], label: str) -> None:
    """One scale for all panels; a row a unit."""
    whole = np.concatenate(list(shown.values()), 1)
    end, extend = scale(whole)
    signed = bool((whole < 0).any())
    for axes, (direction, values) in zip(every, shown.items(), strict=True):
        steps, units = values.shape
        drawn_image = image(axes, values.T, end, (steps - 0.5, -0.5, units - 0.5, -0.5), signed=signed)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_xlabel(_LAG[direction])
        axes.set_ylabel("unit of the half" if len(shown) > 1 else "unit")
    bar(figure, drawn_image, list(every), extend, label)


def draw_points(
    gradients: Any,
    *,
    bidirectional: bool = False,
    layer: str = "layer",
    unit: str = "gradient",
    most_points: int = POINTS,
) -> Picture:
    """Gradients `(batch, unit)` by what a layer gives of its last step alone: a point a window, by unit, and medians.

    bidirectional: a panel for the units of each half. Of more than `most_points` points, windows are chosen evenly.
    NaN and infinite numbers are crosses at the unit. layer, unit: as for `draw_lines`.
    """
    values = require(gradients, "(batch, unit)")
    _positive(most_points=most_points)
    split = {name: half[:, 0] for name, half in _halves(values, bidirectional).items()}
    windows = evenly(len(values), max(1, most_points // values.shape[1]))

    def draw(figure: Figure) -> None:
        every = figure.subplots(1, len(split), squeeze=False, sharey=True)[0]
        for axes, (direction, half) in zip(every, split.items(), strict=True):
            _points(axes, half, windows)
            axes.set_title(f"{direction} half" if bidirectional else "", loc="left")
        every[0].set_ylabel(unit)
        what = f"Gradients by the output of {look.plain(layer)}, of its last step"
        _finish(figure, what, values, f"{values.shape[1]} units · bars: medians", windows)

    return drawn(draw)


def _halves(values: np.ndarray, bidirectional: bool) -> dict[str, np.ndarray]:
    return split_units(values[:, None]) if bidirectional else {"": values[:, None]}


def _points(axes: Axes, values: np.ndarray, windows: np.ndarray) -> None:
    units = np.arange(values.shape[1])
    finite = np.where(np.isfinite(values), values, np.nan)
    for line in finite[windows]:
        axes.plot(units, line, ".", color=look.COLOURS[0], alpha=max(0.15, min(0.8, 20 / len(windows))), markersize=5)
    kept = np.isfinite(finite).any(0)
    axes.plot(units[kept], np.nanmedian(finite[:, kept], 0), "_", color="black", markersize=9, markeredgewidth=1.6)
    axes.axhline(0, color="#999999", linewidth=0.6, zorder=0)
    _cross(axes, units[~np.isfinite(values).all(0)])
    axes.set_xlim(-0.7, len(units) - 0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("unit")


def _finish(figure: Figure, what: str, values: np.ndarray, chosen: str, windows: np.ndarray) -> None:
    said = of_all(len(windows), len(values), "windows", _EVEN)
    crosses = "crosses: not finite" if alarm_of(values) else ""
    look.title(figure, what, chosen, said, crosses)
    sound(figure, alarm_of(values))


def _positive(**counts: int) -> None:
    for key, count in counts.items():
        if count < 1:
            raise Refused(key, given=count, allowed="1 or more", remedy="give more")
