"""How a norm falls or grows with the lag, and what to say of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import Refused

BAND = (0.25, 0.75)
_CLEAR = 0.8  # R² of a fit that needs no warning


@dataclass(frozen=True)
class Fit:
    """norm ≈ start · rate**lag, by least squares on the norm's logarithm. explained: its R²."""

    log_rate: float
    log_start: float
    explained: float

    @property
    def rate(self) -> float:
        """What the norm is multiplied by from one step to the next further back."""
        return math.exp(self.log_rate)

    @property
    def half_life(self) -> float:
        """Steps in which the norm halves; infinite where it does not fall."""
        return math.log(0.5) / self.log_rate if self.log_rate < 0 else math.inf

    @property
    def doubling_time(self) -> float:
        """Steps in which the norm doubles; infinite where it does not grow."""
        return math.log(2) / self.log_rate if self.log_rate > 0 else math.inf


@dataclass(frozen=True, eq=False)
class Decay:
    """A norm by lag, of some windows, and the exponential that it follows.

    log_norms: natural logarithms `(window, lag)` float64 of the norm, lag 0 first: -inf where it is zero, NaN or +inf
    where it is none. Logarithms, because products of hundreds of steps leave the range of floating-point numbers.
    Lags are steps along the layer's own pass: of a backward one, they count from the window's oldest step on.
    quantity: what it is the norm of. unit: of the norm. windows: how many there were to choose from. first: the lag
    that the fit begins with.
    """

    layer: str
    direction: str
    quantity: str
    unit: str
    log_norms: np.ndarray
    windows: int
    first: int = 0

    @property
    def lags(self) -> np.ndarray:
        return np.arange(self.log_norms.shape[1])

    @cached_property
    def lost(self) -> int:
        """Windows with a NaN or an infinite norm at any lag; they count in nothing else."""
        return int(self._is_lost.sum())

    @property
    def _is_lost(self) -> np.ndarray:
        return np.any(~(self.log_norms < np.inf), axis=1)

    @cached_property
    def median(self) -> np.ndarray:
        """Logarithms `(lag)` of the median over windows."""
        kept = self.log_norms[~self._is_lost]
        return np.median(kept, 0) if len(kept) else np.full(len(self.lags), np.nan)

    @cached_property
    def band(self) -> np.ndarray:
        """Logarithms `(2, lag)` of the lower and the upper quartile over windows."""
        kept = self.log_norms[~self._is_lost]
        if not len(kept):
            return np.full((2, len(self.lags)), np.nan)
        return np.quantile(kept, BAND, axis=0, method="inverted_cdf")  # between -inf and others there is nothing

    @cached_property
    def fit(self) -> Fit | None:
        """Of the median over windows; None where fewer than two lags have one that is not zero."""
        return _fitted(self.lags, self.median, self.first)

    @cached_property
    def rates(self) -> np.ndarray:
        """Of each window alone `(window)`; NaN where it has none."""
        fits = [_fitted(self.lags, one, self.first) for one in self.log_norms]
        return np.array([np.nan if fit is None else fit.rate for fit in fits])

    @property
    def zero_from(self) -> int | None:
        """The lag from which on the median is exactly zero; None where the last one is not."""
        above = np.flatnonzero(self.median != -np.inf)
        last = int(above[-1]) + 1 if len(above) else 0
        return None if last == len(self.lags) else last

    @property
    def verdict(self) -> str:
        """In words. Stable is what neither halves nor doubles within the lags that there are."""
        if self.lost == len(self.log_norms):
            return "not finite: NaN or infinite in every window"
        gone = "" if self.zero_from is None else f"exactly zero from lag {self.zero_from} on"
        if self.fit is None:
            return f"vanishing: {gone}" if gone else "no verdict: a single step"
        spanned = len(self.lags) - 1 if self.zero_from is None else self.zero_from - 1
        if self.fit.half_life <= spanned:
            said = f"vanishing: halves every {_steps(self.fit.half_life)}"
        elif self.fit.doubling_time <= spanned:
            said = f"exploding: doubles every {_steps(self.fit.doubling_time)}"
        else:
            said = "vanishing" if gone else f"stable: neither halves nor doubles within {_steps(spanned)}"
        return f"{said}, {gone}" if gone else said

    @property
    def alarm(self) -> str:
        """What must not be overlooked; empty where all is finite."""
        return f"NOT FINITE: NaN or infinite in {self.lost} of {len(self.log_norms)} windows" if self.lost else ""

    def __str__(self) -> str:
        lines = [f"{self.layer} ({self.direction}): {self.verdict}"]
        if self.alarm:
            lines.insert(0, self.alarm)
        lines.append(f"  of       {self.quantity}, {self.sample}")
        if self.fit is not None:
            lines.append(f"  rate     {self.fit.rate:.4g} a step{self._spread()}")
            clear = self.fit.explained >= _CLEAR or self.verdict.startswith("stable")
            rough = "" if clear else ": the norm is hardly exponential in the lag"
            lines.append(f"  fit      R² {self.fit.explained:.2f} over lags {self.first} to {self.lags[-1]}{rough}")
        return "\n".join(lines)

    @property
    def sample(self) -> str:
        used = len(self.log_norms)
        return f"{used:,} windows" if used == self.windows else f"{used:,} of {self.windows:,} windows"

    def _spread(self) -> str:
        known = self.rates[np.isfinite(self.rates)]
        if len(known) < 4:
            return ""
        low, high = np.quantile(known, BAND)
        return f", {low:.4g} to {high:.4g} in the middle half of the windows"


def gradient_decay(gradients: Any, *, bidirectional: bool = False, layer: str = "layer") -> tuple[Decay, ...]:
    """How the gradient by a layer's output at each step falls or grows with the lag: the norm over units.

    gradients: `(batch, step, unit)`, of a loss or an output by the sequence that the layer gives, oldest step first; in
    any floating-point dtype. bidirectional: its units are those of a forward pass, then as many of a backward one, as a
    `Bidirectional` layer joins them (`merge_mode="concat"`): one `Decay` of each half, whose lags count from where its
    pass ends. layer: what it is called.

    Such a gradient takes the sequence as given: it passes through the layers above, not through the layer's own
    recurrence. Of that, `jacobian_decay` tells. Raises `Refused` for other shapes.
    """
    values = sequences(gradients)
    halves = split_units(values) if bidirectional else {"forward": values}
    return tuple(
        Decay(layer, direction, "|gradient by the output of a step|", "gradient", _log_norm(half), len(values))
        for direction, half in halves.items()
    )


def sequences(gradients: Any) -> np.ndarray:
    """`(batch, step, unit)` float64, or `Refused`."""
    return require(gradients, "(batch, step, unit)")


def require(gradients: Any, dims: str) -> np.ndarray:
    """An array of those dims in float64, none of them of length zero."""
    values = np.asarray(gradients)
    if values.ndim != dims.count(",") + 1 or values.dtype.kind not in "fiu" or not values.size:
        raise Refused(
            "gradients",
            given=f"an array of shape {values.shape} and dtype {values.dtype}",
            allowed=f"numbers {dims}, none of these zero",
            remedy="give the gradient of one number by the layer's output, in the shape of that output",
        )
    return values.astype("float64")


def split_units(values: np.ndarray) -> dict[str, np.ndarray]:
    """`(batch, step, unit)` by direction, each in the order of its own pass: the last step is where it ends."""
    units = values.shape[-1]
    if units % 2:
        raise Refused(
            "bidirectional",
            given=f"True, and {units} units",
            allowed="as many units forward as backward, one after the other",
            remedy='leave it out, as for a Bidirectional layer of another merge_mode than "concat"',
        )
    return {"forward": values[..., : units // 2], "backward": values[:, ::-1, units // 2 :]}


def _log_norm(values: np.ndarray) -> np.ndarray:
    """`(batch, step, unit)` → `(window, lag)`, newest first; of any size: squares are of numbers up to 1 alone."""
    values = values[:, ::-1]
    largest = np.abs(values).max(-1)
    unit = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(unit) + np.log(np.linalg.norm(values / unit[..., None], axis=-1))


def _fitted(lags: np.ndarray, logs: np.ndarray, first: int) -> Fit | None:
    used = np.isfinite(logs) & (lags >= first)
    if used.sum() < 2:
        return None
    x, y = lags[used].astype("float64"), logs[used]
    log_rate, log_start = np.polyfit(x, y, 1)
    around, left = y - y.mean(), y - log_start - log_rate * x
    whole = float(around @ around)
    return Fit(float(log_rate), float(log_start), 1 - float(left @ left) / whole if whole > 0 else 1.0)


def _steps(count: float) -> str:
    number = f"{count:.3g}"
    return f"{number} step{'' if number == '1' else 's'}"
