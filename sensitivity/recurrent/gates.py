"""Pictures of weights, or of gradients by them, by kind, gate and direction."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ..errors import Refused
from ..plots import Picture, look
from .canvas import ALARM, bar, drawn, image, mark, scale, sound
from .parts import KINDS, Part, alarms

BINS = 40
_DIRECTIONS = ("forward", "backward")
_COLOUR = dict(zip(_DIRECTIONS, look.COLOURS, strict=False))
_AXES = {KINDS[0]: "input", KINDS[1]: "unit before"}  # of a matrix's rows; its columns are the gate's units


def draw_histograms(parts: Sequence[Part]) -> Picture:
    """How a layer's weights, or gradients by them, are distributed: a row a kind, a column a gate, directions together.

    parts: of one layer, as `weights`, `gradients` and `weight_gradients` give them, or some of them. Shares of a part's
    finite numbers, in percent; each panel has a scale of its own, in units of the weight or of the gradient. A panel
    with NaN or infinite numbers has a frame and says so.
    """
    kinds, gates, _ = _laid_out(parts)

    def draw(figure: Figure) -> None:
        every = figure.subplots(len(kinds), len(gates), squeeze=False)
        for axes, (kind, gate) in zip(every.flat, itertools.product(kinds, gates), strict=True):
            _histogram(axes, [part for part in parts if (part.kind, part.gate) == (kind, gate)])
            axes.set_title(f"{kind}, {gate}", loc="left")
        _legend(figure, parts)
        figure.supylabel("% of the part's numbers", fontsize=9)
        _finish(figure, parts, f"{BINS} bins a panel, each with its own scale")

    return drawn(draw, 1.5 + 1.6 * len(kinds))


def draw_matrices(parts: Sequence[Part], *, shared: bool = True) -> Picture:
    """A layer's weights, or gradients by them, as images: a row a direction and kind, a column a gate.

    parts: as for `draw_histograms`. Columns of an image are the gate's units, rows what they are fed by. shared:
    a row of panels has one colour scale, in units of the weight or of the gradient; otherwise each panel has its own.
    What is not finite has a colour of its own, and its panel a frame.
    """
    kinds, gates, directions = _laid_out(parts)
    rows = [(direction, kind) for direction in directions for kind in kinds]
    heights = [0.45 if "bias" in kind else 1.5 for _, kind in rows]

    def draw(figure: Figure) -> None:
        every = figure.subplots(len(rows), len(gates), squeeze=False, height_ratios=heights)
        for row, (direction, kind) in enumerate(rows):
            found = {part.gate: part for part in parts if (part.direction, part.kind) == (direction, kind)}
            _images(figure, every[row], found, gates, shared, last=row == len(rows) - 1)
            every[row, 0].set_ylabel(_row_label(direction, kind, len(directions) > 1), fontsize=8)
        for axes, gate in zip(every[0], gates, strict=True):
            axes.set_title(f"gate {gate}", loc="left")
        _finish(figure, parts, "columns: units of the gate", "" if shared else "each image has its own scale")

    return drawn(draw, 1.5 + sum(heights) + 0.25 * len(rows))


def _laid_out(parts: Sequence[Part]) -> tuple[list[str], list[str], list[str]]:
    """Kinds, gates and directions, in the house's order."""
    if not parts or len({(part.layer, part.of) for part in parts}) > 1:
        raise Refused(
            "parts",
            given=f"{len(parts)} parts of {', '.join(sorted({part.layer for part in parts})) or 'nothing'}",
            allowed="parts of one layer, weights or gradients",
            remedy="draw one layer at a time, weights and gradients apart",
        )
    given = [{getattr(part, name) for part in parts} for name in ("kind", "direction")]
    gates = list(dict.fromkeys(part.gate for part in parts))
    return [kind for kind in KINDS if kind in given[0]], gates, [one for one in _DIRECTIONS if one in given[1]]


def _edges(parts: list[Part]) -> np.ndarray:
    finite = np.concatenate([part.values[np.isfinite(part.values)].ravel() for part in parts]).astype("float64")
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    room = 0.02 * (high - low) or 0.5 * max(abs(low), 1e-3)
    return np.linspace(low - room, high + room, BINS + 1)


def _histogram(axes: Axes, parts: list[Part]) -> None:
    if not parts:
        return axes.set_axis_off()
    edges = _edges(parts)
    for part in parts:
        finite = part.values[np.isfinite(part.values)].astype("float64")
        share = 100 * np.histogram(finite, edges)[0] / max(1, finite.size)
        colour = _COLOUR[part.direction]
        if part.direction == "forward":  # behind, so that both can be seen
            axes.stairs(share, edges, fill=True, color=colour, alpha=0.35)
        axes.stairs(share, edges, color=colour, linewidth=1.2)
    axes.axvline(0, color="#999999", linewidth=0.6, zorder=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
    axes.ticklabel_format(axis="x", style="sci", scilimits=(-2, 3))
    axes.set_ylim(bottom=0)
    _warn(axes, parts)


def _warn(axes: Axes, parts: list[Part]) -> None:
    nans = sum(part.statistics.nans for part in parts)
    infinities = sum(part.statistics.infinities for part in parts)
    if nans or infinities:
        mark(axes)
        said = ", ".join(f"{word} {n:,}" for word, n in (("NaN", nans), ("inf", infinities)) if n)
        axes.text(0.97, 0.93, said, color=ALARM, fontweight="bold", ha="right", va="top", transform=axes.transAxes)


def _legend(figure: Figure, parts: Sequence[Part]) -> None:
    directions = [one for one in _DIRECTIONS if any(part.direction == one for part in parts)]
    if len(directions) > 1:
        figure.legend(handles=[Patch(color=_COLOUR[one], label=one) for one in directions], loc="upper right", ncols=2)


def _images(figure: Figure, panels: Any, found: dict[str, Part], gates: list[str], shared: bool, *, last: bool) -> None:
    values = {gate: np.atleast_2d(part.values.astype("float64")) for gate, part in found.items()}
    whole = np.concatenate([array.ravel() for array in values.values()])
    for axes, gate in zip(panels, gates, strict=True):
        if gate not in values:
            axes.set_axis_off()
            continue
        end, extend = scale(whole if shared else values[gate])
        shown = image(axes, values[gate], end, signed=True)
        _dress_image(axes, len(values[gate]) > 1, first=axes is panels[0], last=last)
        _warn(axes, [found[gate]])
        if not shared:
            bar(figure, shown, axes, extend, "")
    if shared:
        first = next(iter(found.values()))
        bar(figure, shown, list(panels), extend, first.of if first.values.ndim > 1 else "")


def _dress_image(axes: Axes, is_matrix: bool, *, first: bool, last: bool) -> None:
    axes.spines[:].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=4, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4, min_n_ticks=1))
    axes.tick_params(labelbottom=last, labelleft=first and is_matrix, left=is_matrix)


def _row_label(direction: str, kind: str, several: bool) -> str:
    name = f"{direction}\n{kind}" if several else kind.replace(" ", "\n")
    return f"{name}\n({_AXES[kind]})" if kind in _AXES else name


def _finish(figure: Figure, parts: Sequence[Part], *more: str) -> None:
    first, found = parts[0], alarms(parts)
    count = sum(part.values.size for part in parts)
    look.title(figure, f"{first.of.capitalize()}s of {look.plain(first.layer)}, by gate", f"{count:,} numbers", *more)
    sound(figure, f"NOT FINITE: in {len(found)} of {len(parts)} parts" if found else "")
