"""What makes a run's answers doubtful though nothing fails: told by `plan`, `run` and the report, never refused."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .moments import Extremes
from .sections import SeriesSection
from .survey import Survey

# Codes for missing values that data centres write.
CODES = {*(-99.0, -99.9, -999.0, -999.9, -9999.0, -9999.9, -99999.0, -32768.0, 999.0, 9999.0, 99999.0, 32767.0)}
HUGE = 1e15  # nothing that is measured is so large: 1e20, 9.96921e36
FAR = 100.0  # times the range of all other values: no code that is known, and yet none of them
LARGE = 10.0  # of a typical value that a model takes: ten times what scaling leaves
OFFSET = 10.0  # standard deviations from zero
SMALL_OFFSET = 3.0  # below it no offset saturates anything
NEAR_ZERO = 1e-3  # of what the derivatives of a window would have to be, for inputs to move the output as they do
ROUNDING = 1e-6  # of an output: no less can be told from none
SATURATED = 0.5  # share of windows from which on it is told
SMALL_OUTPUT, FEW_OUTPUTS = 0.01, 0.03  # |output| by its standard deviation; share of windows from which on it is told
SHOWN = 4  # columns


@dataclass(frozen=True)
class Suspicion:
    """what: is suspicious. where: a column, several, or the model. figure: that it is told from. remedy: what to do."""

    what: str
    where: str
    figure: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what} ({self.figure}); {self.remedy}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def of_series(
    survey: Survey, section: SeriesSection, normalises: bool | None, classes: Collection[str] = ()
) -> tuple[Suspicion, ...]:
    """What the survey says of the columns that the model takes.

    normalises: whether the model's first layers scale by themselves; None where that cannot be told. classes: columns
    of numbers of classes, which nobody scales.
    """
    known = list(zip(survey.features, survey.extremes, strict=False))
    codes = [(name, found) for name, one in known if (found := code_of(one))]
    return (
        *(_of_code(name, value, one) for (name, one) in known for coded, value in codes if name == coded),
        *_of_constants([name for name, one in known if one.count and one.low == one.high]),
        *(() if normalises is not False else _of_sizes(survey, section, classes)),
    )


def code_of(column: Extremes) -> float | None:
    """The least or largest value, where it is repeated and stands for no value: a code, or far from all others."""
    ends = (
        (column.low, column.low_count, column.next_low, column.high),
        (column.high, column.high_count, column.next_high, column.low),
    )
    return next((value for value, count, near, far in ends if count > 1 and _is_code(value, near, far)), None)


def _is_code(value: float, near: float | None, far: float) -> bool:
    """near, far: of all other values the nearest and the farthest; None: there are no others."""
    if near is None:
        return False
    gap, others = abs(near - value), abs(far - near)
    if abs(value) >= HUGE:
        return gap > 0.5 * abs(value)
    if any(abs(value - code) <= 1e-6 * abs(code) for code in CODES):  # which float32 rounds
        return gap >= max(others, 1.0) or (value < 0 <= min(near, far))
    return others > 0 and gap >= FAR * others


def _of_code(name: str, value: float, column: Extremes) -> Suspicion:
    low = value == column.low
    count = column.low_count if low else column.high_count
    near, far = (column.next_low, column.high) if low else (column.next_high, column.low)
    assert near is not None
    least, most = sorted((near, far))
    return Suspicion(
        "a value that may stand for a missing one",
        f"column {name!r}",
        f"{value:g} in {count:,} of {column.count:,} values, all others from {least:.4g} to {most:.4g}",
        "where it stands for a missing value, leave the cell empty: windows with it are then skipped",
    )


def _of_constants(names: Sequence[str]) -> tuple[Suspicion, ...]:
    if not names:
        return ()
    what = "the value never changes, so its importance is 0 whatever its derivatives are"
    return (
        Suspicion(
            what,
            _columns(names),
            "standard deviation 0",
            "read the derivatives themselves, or run a series in which it changes",
        ),
    )


def _of_sizes(survey: Survey, section: SeriesSection, classes: Collection[str]) -> tuple[Suspicion, ...]:
    """Columns that are not scaled as the model takes them."""
    scaled = {name: (mean, std) for name, mean, std in section.scaled(survey.features)}
    found: list[tuple[str, float, float]] = []
    for name, mean, std in zip(survey.features, survey.mean, survey.std, strict=True):
        offset, by = scaled.get(name, (0.0, 1.0))
        middle, spread = (mean - offset) / by, std / by
        if (
            name not in classes
            and spread
            and (np.hypot(middle, spread) > LARGE or abs(middle) > max(OFFSET * spread, SMALL_OFFSET))
        ):
            found.append((name, middle, spread))
    if not found:
        return ()
    figures = [f"{name} {middle:.4g} ± {spread:.3g}" for name, middle, spread in found[:SHOWN]]
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return (
        Suspicion(
            "far from the values of scaled inputs, and none of the model's first layers normalises them",
            _columns([name for name, *_ in found]),
            f"as the model takes them, mean ± std: {', '.join(figures)}{more}",
            "if the model was trained on scaled inputs, give the scaling as series.scaling",
        ),
    )


def _columns(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"column{'s' * (len(names) > 1)} {', '.join(map(repr, names[:SHOWN]))}{more}"


# ---- derivatives --------------------------------------------------------------------------------------


def near_zero_share(prediction: np.ndarray, derivatives: np.ndarray, windows: np.ndarray) -> float | None:
    """The share of windows and outputs whose derivatives together would not move the output by a thousandth of what it
    varies by; None where nothing can be told.

    prediction `(window, output)`, derivatives `(window, output, *source)` by windows `(window, *source)`, in one unit.
    """
    axes = tuple(range(windows.ndim - 1))
    spread = windows.astype(float).std(axis=axes)
    with np.errstate(invalid="ignore", over="ignore"):
        moved = np.abs(derivatives.astype(float) * spread).sum(axis=tuple(range(2, derivatives.ndim)))
        outputs = prediction.astype(float)
        least = np.maximum(NEAR_ZERO * outputs.std(axis=0), ROUNDING * np.abs(outputs).mean(axis=0))
    if not np.isfinite(moved).all() or not np.isfinite(least).all():
        return None
    return float((moved <= least).mean()) if moved.size else None


def of_derivatives(share: float | None, windows: int) -> tuple[Suspicion, ...]:
    """share: as `near_zero_share` tells it of the audit's windows."""
    if share is None or share <= SATURATED:
        return ()
    return (
        Suspicion(
            "most derivatives are near zero: the model may be saturated",
            "model",
            f"{100 * share:.0f} % of all outputs of the audit's {windows} windows",
            "compare the scale of the series with what the model was trained on (series.scaling)",
        ),
    )


def of_stored(name: str, mean: float, quartile: float) -> tuple[Suspicion, ...]:
    """mean, quartile: of |derivative| where it is largest, over all windows: its mean and its third quartile."""
    if not mean > 0 or quartile > NEAR_ZERO * mean:
        return ()
    return (
        Suspicion(
            "derivatives are near zero in most windows; a few windows determine the mean",
            f"derivatives by {name}",
            f"in 75 % of windows |J| is below {100 * NEAR_ZERO:g} % of its mean over all windows",
            "compare the scale of the series with what the model was trained on (series.scaling)",
        ),
    )


def of_outputs(share: float) -> tuple[Suspicion, ...]:
    """share: of windows whose output is near zero, as `query.elasticity` tells it."""
    if not share > FEW_OUTPUTS:
        return ()
    return (
        Suspicion(
            "outputs are near zero, and elasticity divides by them: a few windows may determine its mean",
            "elasticity",
            f"in {100 * share:.2g} % of windows the output is below {100 * SMALL_OUTPUT:g} % of its standard deviation",
            "leave these windows out with a condition, such as 'abs(prediction) > 0.1', or ask for gradient-input",
        ),
    )
