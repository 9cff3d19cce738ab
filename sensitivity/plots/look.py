"""What all pictures look like: colours, names, lags along an axis, titles that say how much they are made of."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ..query.roles import CALLED
from ..query.sums import CELL, TARGET
from .terms import target_words, terms_of

# Okabe & Ito (2008), without their yellow, which white paper swallows: told apart with any colour vision. Marks and
# line styles tell lines apart in grey; there is one mark more than colours, so that the two do not repeat together.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
STYLES = ("-", "--", ":")
MAGNITUDES, SIGNED, NOTHING = "viridis", "RdBu_r", "#d9d9d9"
WIDTH, HEIGHT = 8.0, 4.5  # inches
_NAME, _END, _LINE = 26, 8, 116  # characters
_RC: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sensitivity",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "hatch.linewidth": 0.5,
}


@contextmanager
def style() -> Iterator[None]:
    """In here figures are drawn and saved as all of them are; what else the user has set stays."""
    with matplotlib.rc_context(_RC):
        yield


def plain(name: object, longest: int = _NAME, end: int = _END) -> str:
    """A label that matplotlib takes as it is, on one line: no mathematics, not hidden for an underscore in front.

    What is too long loses its middle, but for its last marks, `end` of them.
    """
    text = "".join(mark if mark.isprintable() else " " for mark in str(name))
    if len(text) > longest:
        text = f"{text[: longest - end - 1]}…{text[len(text) - end :]}"
    text = text.replace("$", r"\$")
    return f"\u200b{text}" if text.startswith("_") else text


def names(values: xr.DataArray | xr.Dataset) -> list[str]:
    """Features' labels: shortened where that still tells them apart, numbered where nothing does."""
    labels = values["feature"].values.tolist()
    for longest, end in ((_NAME, _END), (_NAME, _NAME - 2), (_NAME, 0), (2 * _NAME, 2 * _NAME // 3)):
        found = [plain(name, longest, end) for name in labels]
        if len(set(found)) == len(set(labels)):
            return found
    return [f"{plain(name)} ({i + 1})" for i, name in enumerate(labels)]


def scaled(found: xr.Dataset, variable: str) -> xr.DataArray:
    """In units of the output: times the feature's standard deviation, where that is known."""
    values = found[variable]
    return values * found["input_std"].reset_coords(drop=True) if "input_std" in found.coords else values


def influence(found: xr.Dataset) -> xr.DataArray:
    """Mean |J| × the feature's standard deviation `(…, lag, feature)`, in units of the output: comparable.

    found: a statistic with `mean_abs`. The mean over output steps and outputs, where there are several; lags fall.
    """
    return newest_last(scaled(found, "mean_abs").mean(targets(found)))


def newest_last(values: xr.DataArray) -> xr.DataArray:
    """Lags fall, steps rise."""
    return values.sortby("lag", ascending=CALLED in values["lag"].attrs) if "lag" in values.dims else values


def targets(found: xr.Dataset) -> list[str]:
    return [dim for dim in TARGET if dim in found.dims]


def of_one_target(found: xr.Dataset) -> bool:
    return all(found.sizes[dim] == 1 for dim in targets(found))


def most(values: xr.DataArray, top: int) -> tuple[np.ndarray, str]:
    """Which features have the largest values, largest first, `top` at most; what is to be said of the others."""
    weight = abs(values).sum([str(dim) for dim in values.dims if dim != "feature"]).values
    order = np.argsort(-weight, kind="stable")[:top]
    rest = len(weight) - len(order)
    if rest <= 0:
        return order, ""
    whole = weight.sum()
    share = f", {100 * (1 - weight[order].sum() / whole):.0f} % of the sum" if whole > 0 else ""
    what = values["feature"].attrs.get(CALLED) or "feature"
    return order, f"{len(order)} of {len(weight)} {what}s; not drawn: {rest} other{'s' * (rest > 1)}{share}"


# ---- words -------------------------------------------------------------------------------------------


def output(found: xr.Dataset) -> str:
    """The output that is meant, in a sentence."""
    if "output" not in found.coords or found.sizes.get("output", 1) > 1:
        return f"the {target_words(found, 'output')}" if found.sizes.get("output", 1) > 1 else "the output"
    name = plain(np.atleast_1d(found["output"].values)[0])
    return "the output" if name == "output" else name


def units(found: xr.Dataset) -> str:
    return plain(found.attrs.get("units", "units of the output"))


def size_label(found: xr.Dataset, what: str = "mean |{}|") -> str:
    """Of an axis: what it shows of an entry, and in which unit."""
    own = terms_of(found)
    std = is_scaled(found)
    unit = f"{units(found)}{own.left if std else own.per}"
    return f"{what.format(own.symbol)}{own.times if std else ''}\n({unit})"


def is_scaled(found: xr.Dataset) -> bool:
    """Whether it is drawn in units of the output, or could be."""
    of_std = bool({"input_std", "importance"} & {*found.variables})
    return found.attrs.get("scaled", of_std if terms_of(found).plain else "input_std" in found.variables)


def windows(found: xr.Dataset) -> str:
    """How many windows a statistic is of: "26 of 55 windows"."""
    groups = [dim for dim in found["count"].dims if dim not in CELL]
    count = int(found["count"].sum(groups).max())
    total = found.attrs.get("windows")
    return f"{count:,} windows" if total is None else f"{count:,} of {total:,} windows"


def averaged(found: xr.Dataset) -> str:
    """Over what values are averaged that are drawn as one."""
    parts = [
        f"{found.sizes[dim]} {target_words(found, dim)}" for dim in TARGET if dim in found.dims and found.sizes[dim] > 1
    ]
    return f"mean over {' and '.join(parts)}" if parts else ""


def of_features(found: xr.Dataset) -> str:
    """What a picture shows that has one value for all features."""
    if found.sizes.get("feature", 1) > 1:
        return f"sum over {found.sizes['feature']} {terms_of(found).item}s"
    return plain(np.atleast_1d(found["feature"].values)[0], 60) if "feature" in found.coords else ""


def title(figure: Figure, what: str, *more: str) -> None:
    """What the picture shows, and below it what it is made of."""
    said = _lines([part for part in more if part], int(_LINE * figure.get_figwidth() / WIDTH))
    room = "\n " * len(said.splitlines())
    above = figure.suptitle(what + room, x=0.012, ha="left", fontsize=11, linespacing=1.3)
    below = Annotation(said, (0, 0), xycoords=above, va="bottom", fontsize=9, linespacing=1.3, color="#444444")
    figure.add_artist(below)


def _lines(parts: list[str], longest: int) -> str:
    """As many parts on a line as it holds; one that is longer than that is broken."""
    found = [""]
    for part in parts:
        joined = f"{found[-1]} · {part}" if found[-1] else part
        if len(joined) <= longest:
            found[-1] = joined
        else:
            found += textwrap.wrap(part, longest)
    return "\n".join(line for line in found if line)


# ---- axes --------------------------------------------------------------------------------------------


def places(lags: np.ndarray) -> np.ndarray:
    """Where falling lags stand on an axis: at their own number if they are consecutive, else side by side."""
    return lags if _consecutive(lags) else np.arange(len(lags))[::-1]


def _consecutive(lags: np.ndarray) -> bool:
    return bool((np.diff(lags) == -1).all())


def dress_lags(axis: Axis, lags: xr.DataArray, label: bool = True) -> None:
    """Ticks at whole lags, and what lags are."""
    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    values = lags.values
    if not _consecutive(values):
        axis.set_major_formatter(FuncFormatter(lambda place, _: _lag_at(values[::-1], place)))
    if label:
        axis.set_label_text(lag_label(lags))


def lag_label(lags: xr.DataArray) -> str:
    """What stands along an axis of lags, or of what plays their part."""
    called = lags.attrs.get(CALLED, "lag")
    known = lags.attrs.get("long_name", "" if CALLED in lags.attrs else "steps back")
    return f"{called} ({known})" if known else called


def _lag_at(lags: np.ndarray, place: float) -> str:
    index = round(place)
    return str(lags[index]) if 0 <= index < len(lags) and abs(place - index) < 1e-6 else ""


def span(lags: np.ndarray) -> tuple[float, float]:
    """The edges of the oldest and of the newest lag's cell."""
    at = places(lags)
    return float(at[0]) + 0.5, float(at[-1]) - 0.5


def heat(
    axes: Axes, values: np.ndarray, extent: tuple[float, float, float, float], label: str, **how: Any
) -> AxesImage:
    """An image of values `(y, x)` with its colour bar; grey where there is none. how: cmap, vmin, vmax, extend, and
    the colour `nothing` in place of grey.
    """
    cmap = matplotlib.colormaps[how.pop("cmap", MAGNITUDES)].with_extremes(bad=how.pop("nothing", NOTHING))
    extend = how.pop("extend", "neither")
    limits = {"vmin": 0, "vmax": largest(values)} | how
    image = axes.imshow(np.ma.masked_invalid(values), aspect="auto", cmap=cmap, extent=extent, **limits)
    bar = axes.figure.colorbar(image, ax=axes, extend=extend, pad=0.02)
    bar.set_label(label)
    bar.outline.set_visible(False)
    axes.spines[:].set_visible(False)
    return image


def largest(values: np.ndarray) -> float:
    """The largest finite |value|; 1 where all are zero or none is finite."""
    finite = np.abs(values[np.isfinite(values)])
    return float(finite.max()) if finite.size and finite.max() > 0 else 1.0


def holes(values: np.ndarray) -> str:
    return "grey: no window" if not np.isfinite(values).all() else ""


def name_rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)


def line(i: int, points: int) -> dict[str, Any]:
    """How the i-th line looks: told apart from the others by colour, mark and style."""
    step = max(1, math.ceil(points / 24))
    return {
        "color": COLOURS[i % len(COLOURS)],
        "marker": MARKS[i % len(MARKS)],
        "linestyle": STYLES[i // len(COLOURS) % len(STYLES)],
        "markevery": (i * step // len(COLOURS) % step, step),
    }


def total(values: xr.DataArray) -> xr.DataArray:
    """The sum over features; NaN where none has a value."""
    return values.sum("feature", min_count=1)
