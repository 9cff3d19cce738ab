"""What blocks of values add up to, column by column: moments and extremes, whatever the blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Extremes:
    """Of a column's finite values, in units of the series: how many, the least and the largest, how often each comes,
    and the value next to it; None where there is no other.
    """

    count: int
    low: float
    low_count: int
    next_low: float | None
    high: float
    high_count: int
    next_high: float | None


class Moments:
    """Running moments over blocks of values."""

    def __init__(self, features: int) -> None:
        self._count, self._mean, self._squares, self._largest = np.zeros((4, features))
        self._whole, self._negative = np.ones(features, bool), np.zeros(features, bool)
        self._low, self._high = _Least(features), _Least(features)

    @property
    def count(self) -> np.ndarray:
        """Finite values, float64 `(column)`."""
        return self._count

    @property
    def extremes(self) -> tuple[Extremes, ...]:
        ends = zip(self._count.tolist(), self._low.told, self._high.told, strict=True)
        return tuple(
            Extremes(int(count), low, times, after, -high, often, None if before is None else -before)
            for count, (low, times, after), (high, often, before) in ends
        )

    @property
    def whole(self) -> tuple[bool, ...]:
        return tuple(self._whole.tolist())

    @property
    def negative(self) -> tuple[bool, ...]:
        return tuple(self._negative.tolist())

    def add(self, values: np.ndarray) -> None:
        finite = np.isfinite(values)
        self._negative |= (values < 0).any(axis=0)
        self._whole &= ((np.floor(values) == values) | ~finite).all(axis=0)
        self._low.add(np.where(finite, values, np.inf))
        self._high.add(np.where(finite, -values, np.inf))
        with np.errstate(over="ignore", invalid="ignore"):  # what no dtype of ours holds
            self._add_moments(np.where(finite, values, 0.0), finite)

    def _add_moments(self, values: np.ndarray, finite: np.ndarray) -> None:
        """Chan, Golub & LeVeque's pairwise update (1983): no cancellation, whatever the offset."""
        count = finite.sum(axis=0)
        total = self._count + count
        mean = values.sum(axis=0) / np.maximum(count, 1)
        shift = mean - self._mean
        squares = (np.where(finite, values - mean, 0.0) ** 2).sum(axis=0)
        self._squares += squares + shift**2 * self._count * count / np.maximum(total, 1)
        self._mean += shift * count / np.maximum(total, 1)
        self._count = total
        self._largest = np.maximum(self._largest, np.abs(values).max(axis=0, initial=0.0))

    def mean_std_largest(self) -> tuple[tuple[float, ...], ...]:
        std = np.sqrt(self._squares / np.maximum(self._count, 1))
        return tuple(tuple(map(float, column)) for column in (self._mean, std, self._largest))


class _Least:
    """The least value of each column, how often it comes, and the next one, over blocks `(step, column)`; inf: none."""

    def __init__(self, columns: int) -> None:
        self._value, self._next, self._times = (
            np.full(columns, np.inf),
            np.full(columns, np.inf),
            np.zeros(columns, int),
        )

    def add(self, values: np.ndarray) -> None:
        if not len(values):
            return
        value = values.min(axis=0)
        for column in np.flatnonzero(value <= self._next):  # few, after the first blocks
            own, least = values[:, column], min(value[column], self._value[column])
            others = [
                self._value[column],
                self._next[column],
                own[own > value[column]].min(initial=np.inf),
                value[column],
            ]
            self._next[column] = min((one for one in others if one > least), default=np.inf)
            times = self._times[column] if self._value[column] == least else 0
            self._times[column] = times + (own == least).sum()
            self._value[column] = least

    @property
    def told(self) -> list[tuple[float, int, float | None]]:
        rows = zip(self._value.tolist(), self._times.tolist(), self._next.tolist(), strict=True)
        return [(value, times, after if np.isfinite(after) else None) for value, times, after in rows]
