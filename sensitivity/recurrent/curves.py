"""The picture of a decay: a norm by lag, its fit, its half-life."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from ..errors import Refused
from ..plots import Picture, look
from .canvas import drawn, sound
from .decay import Decay

_MOST = len(look.COLOURS)
_DECADES = 3  # with more ticks than one each
_FLAT = 0.02  # decades: norms that hardly differ are not blown up to the height of the page


def draw_decay(decays: Decay | Sequence[Decay]) -> Picture:
    """Norms by lag on a logarithmic axis, in their own unit: the median over windows, a band of the middle half of
    windows, the fitted exponential (dashed), and where it first has halved or doubled (a ring).

    decays: one, or several, such as both halves of a `Bidirectional` layer: up to 7. Oldest lags are on the left.
    """
    found = [decays] if isinstance(decays, Decay) else list(decays)
    if not found or len(found) > _MOST or not all(isinstance(one, Decay) for one in found):
        given = f"{len(found)} of {', '.join(sorted({type(one).__name__ for one in found})) or 'nothing'}"
        raise Refused("decays", given=given, allowed=f"1 to {_MOST} Decay", remedy="draw fewer at a time")
    return drawn(lambda figure: _draw(figure, found))


def _draw(figure: Figure, decays: list[Decay]) -> None:
    figure.set_size_inches(look.WIDTH, look.HEIGHT + 0.22 * len(decays))
    axes = figure.subplots()
    for i, decay in enumerate(decays):
        _curve(axes, decay, i)
    axes.invert_xaxis()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel(_lag_label(decays))
    axes.set_ylabel(f"{' or '.join(sorted({one.unit for one in decays}))} (logarithmic)")
    _decades(axes)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.14), fontsize="small", handlelength=3)
    quantities = dict.fromkeys(one.quantity for one in decays)
    samples = dict.fromkeys(one.sample for one in decays)
    said = "band: middle half of windows · dashed: fit · ring: halved or doubled"
    look.title(figure, "Vanishing or exploding: norms by lag", *quantities, *samples, said)
    sound(figure, "\n".join(f"{one.alarm}: {look.plain(one.layer)} ({one.direction})" for one in decays if one.alarm))


def _curve(axes: Axes, decay: Decay, i: int) -> None:
    """In decades: norms may be beyond the range of floating-point numbers."""
    how = look.line(i, len(decay.lags))
    median, (low, high) = _log10(decay.median), _log10(decay.band)
    label = f"{look.plain(decay.layer)} ({decay.direction}): {decay.verdict}"
    axes.plot(decay.lags, median, label=label, **how)
    axes.fill_between(decay.lags, low, high, color=how["color"], alpha=0.2, linewidth=0)
    if decay.fit is None:
        return
    along = np.array([decay.first, decay.lags[-1]])
    exponents = (decay.fit.log_start + decay.fit.log_rate * along) / math.log(10)
    axes.plot(along, exponents, color=how["color"], linestyle=(0, (5, 4)), linewidth=0.9)
    turn = decay.first + min(decay.fit.half_life, decay.fit.doubling_time)
    if turn <= decay.lags[-1]:
        at = (decay.fit.log_start + decay.fit.log_rate * turn) / math.log(10)
        axes.plot([turn], [at], "o", markersize=10, markerfacecolor="none", color=how["color"])


def _log10(logs: np.ndarray) -> np.ndarray:
    """A gap where the norm is zero, or none."""
    return np.where(np.isfinite(logs), logs, np.nan) / math.log(10)


def _decades(axes: Axes) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, or at powers of ten alone where there are many."""
    low, high = axes.get_ylim()
    if high - low < _FLAT:
        low, high = low - _FLAT, high + _FLAT
    axes.set_ylim(low, high)
    if high - low > _DECADES:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    elif high - low > 0.5:
        powers = np.arange(math.floor(low), math.ceil(high) + 1)
        ticks = np.add.outer(powers, np.log10([1, 2, 5])).ravel()
        axes.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda exponent, _: _number(exponent)))


def _number(exponent: float) -> str:
    if abs(exponent) < 4:
        return f"{10**exponent:.3g}"
    whole = math.floor(exponent + 1e-9)
    return f"{10 ** (exponent - whole):.2g}e{whole}"


def _lag_label(decays: list[Decay]) -> str:
    where = {"forward": "newest", "backward": "oldest"}
    directions = dict.fromkeys(one.direction for one in decays)
    if len(directions) > 1:
        return "lag (steps back along each pass, from the window's newest step or, backward, its oldest)"
    return f"lag (steps back along the pass, from the window's {where[next(iter(directions))]} step)"
