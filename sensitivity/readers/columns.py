"""Which columns of a series a model takes, and their values as numbers."""

from __future__ import annotations

import itertools
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import Refused, suggested
from ..sections import SeriesSection

_TIME_OF_DAY = re.compile(r"\s*\d{1,2}:\d")


def choose_features(columns: Sequence[str], section: SeriesSection) -> tuple[str, ...]:
    """The columns to read: those that the model takes, in the order asked for, else all that are no labels; and then
    what a loss takes beside them.
    """
    beside = section.beside
    weights = [section.weights] if section.weights else []
    wanted = {"features": section.features or (), "labels": section.labels or (), "weights": weights}
    for key, names in wanted.items():
        missing = [name for name in names if name not in columns]
        if missing:
            raise no_column(f"series.{key}", missing, columns)
    features = section.features or [name for name in columns if name not in beside]
    if not features and columns:
        raise Refused(
            "series.features",
            given=f"nothing, and all columns are labels or weights: {', '.join(columns)}",
            allowed="the columns that the model takes, labels among them or not",
            remedy="name them",
        )
    if not features:
        raise no_column("series.features", [], columns)
    return *features, *beside


def require_once(used: Sequence[str], columns: Sequence[str], section: SeriesSection) -> None:
    """Refuse to take a column of which there are two."""
    count = Counter(columns)
    twice = [name for name in dict.fromkeys(used) if count[name] > 1]
    if twice:
        raise Refused(
            _key_of(twice[0], section),
            given=f"{', '.join(twice)}, {count[twice[0]]} columns of this name in the series",
            allowed="columns that have names of their own",
            remedy="rename one of them in the series",
        )


def _key_of(name: str, section: SeriesSection) -> str:
    """The key of a job file that asks for a column."""
    if name in section.beside:
        return "series.weights" if name == section.weights else "series.labels"
    return next((f"series.{key}" for key in ("time", "site") if getattr(section, key) == name), "series.features")


def no_column(key: str, missing: Sequence[str], columns: Sequence[str]) -> Refused:
    shown = ", ".join(itertools.islice(columns, 20)) + (", …" if len(columns) > 20 else "")
    return Refused(
        key,
        given=f"{', '.join(missing)} (no such column)" if missing else "a series without numeric columns",
        allowed=f"columns of the series: {shown or 'none'}",
        remedy=suggested(missing, columns, _column_advice(columns)),
    )


def _column_advice(columns: Sequence[str]) -> str:
    if len(columns) == 1 and any(mark in columns[0] for mark in ";\t|"):
        return "separate the columns by commas"
    if not columns:
        return "give numbers as one variable per feature along the steps, or one variable (step, feature)"
    return "correct the name; spelling and case count"


def numbers(column: Any, name: str, first_row: int) -> np.ndarray:
    import pandas as pd

    no_number = getattr(column.dtype, "kind", "O") in "mM"  # pandas would turn dates into nanoseconds
    found = pd.to_numeric(column, errors="coerce")
    bad = np.flatnonzero(((found.isna() | no_number) & column.notna()).to_numpy())
    if bad.size:
        rows = "\n".join(f"row {first_row + i + 1}: {column.iloc[i]!r}" for i in bad[:3])
        raise Refused(
            f"series column {name!r}",
            given=f"values that are no numbers, first\n{rows}",
            allowed="numbers, or nothing where a value is missing",
            remedy="name a time column as series.time; leave text columns out of features and labels",
        )
    return found.to_numpy(np.float64, na_value=np.nan)


def is_time_of_day(label: Any) -> bool:
    """Whether a time lacks its date: pandas would take today's."""
    return isinstance(label, str) and _TIME_OF_DAY.match(label) is not None


def dates(times: Any) -> np.ndarray:
    """Text, dates and times with zones as datetime64 in UTC, NaT for what cannot be read."""
    import pandas as pd

    with warnings.catch_warnings():  # pandas warns of what is about to be refused with its row
        warnings.simplefilter("ignore", UserWarning)
        parsed = pd.to_datetime(pd.Series(times), errors="coerce", utc=True)
    return parsed.dt.tz_localize(None).to_numpy()
