"""Trends that outliers do not make: the median of slopes between periods, and whether it may be chance.

A trend is the median of the slopes of all pairs of periods (Theil 1950; Sen 1968, JASA 63), with seasons of the pairs
within each season (Hirsch, Slack & Smith 1982, Water Resources Research 18). Its test is that of Mann and Kendall:
S counts pairs that rise minus pairs that fall; its interval takes the slopes that lie as far from the median in order
as S lies from zero by chance (Sen 1968).

By chance means here: where neighbouring periods may resemble each other. `Trend` says by which variance of S.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

LEAST_PERIODS = 4
LEAST_PAIRS = LEAST_PERIODS * (LEAST_PERIODS - 1) // 2
BLOCK_SLOPES = 1 << 21  # held at once, 16 MiB
LOUD = 1.96  # autocorrelations beyond this by √n are not chance (5 %)
MOST_CORRELATION = 0.95


@dataclass(frozen=True, eq=False)
class Trend:
    """Trends of cells, arrays of the dims `(cell…)`.

    `slope`, `low`, `high` float64, in units of the values per unit of the positions: the median slope and the ends of
    its interval. `p_value` float64: how probable so clear a trend is where there is none, two-sided, with continuity
    corrected for. `periods` int64: how many have a value. NaN below `LEAST_PERIODS` periods or as many pairs as those
    have; ends are NaN, too, where even the steepest of all slopes are not far enough out.

    Without seasons, the variance of S is Kendall's, with ties, times a correction for serial correlation after Hamed
    & Rao (1998, Journal of Hydrology 204), never below 1: at p < 0.05 some 3 to 5 % of series of independent periods
    have a trend, but 8 to 9 % of 20 periods that depend on each other by ρ = 0.5. With seasons it is that of Hirsch &
    Slack (1984, Water Resources Research 20): seasons of one year may depend on each other, years not.
    """

    slope: np.ndarray
    low: np.ndarray
    high: np.ndarray
    p_value: np.ndarray
    periods: np.ndarray


def theil_sen(
    values: np.ndarray,
    positions: np.ndarray,
    level: float = 0.95,
    seasons: np.ndarray | None = None,
    *,
    serial: bool = True,
) -> Trend:
    """The trends of `values` `(period, cell…)`, NaN where missing, along increasing `positions` `(period,)`.

    `level`: with which probability the intervals hold the true slope. `seasons` `(period,)` int: numbers that increase
    within a year, a new year wherever they do not. `serial`: periods, evenly spaced, may depend on those before;
    seasons have a variance of their own.
    """
    cells = np.asarray(values, np.float64).reshape(len(values), math.prod(np.shape(values)[1:]))
    rows, columns = _places(np.zeros(len(cells), int) if seasons is None else np.asarray(seasons))
    where = _table(np.asarray(positions, np.float64), rows, columns)
    step = max(1, BLOCK_SLOPES // max(1, len(where) * where.size // 2))
    parts = [
        _trends(_table(cells[:, start : start + step], rows, columns), where, level, serial and seasons is None)
        for start in range(0, max(1, cells.shape[1]), step)
    ]
    shape = np.shape(values)[1:]
    return Trend(*(np.concatenate(part).reshape(shape) for part in zip(*parts, strict=True)))


def _places(seasons: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which row (year) and column (season) of a table each period has: `(period,)` each."""
    columns = np.unique(seasons, return_inverse=True)[1]
    return np.r_[0, np.cumsum(np.diff(seasons) <= 0)][: len(seasons)], columns


def _table(values: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """`(period, …)` → `(year, season, …)`, NaN where there is no such period; `LEAST_PERIODS` years at least."""
    shape = rows.max(initial=LEAST_PERIODS - 1) + 1, columns.max(initial=0) + 1
    found = np.full((*shape, *values.shape[1:]), np.nan)
    found[rows, columns] = np.where(np.isfinite(values), values, np.nan)
    return found


def _trends(table: np.ndarray, where: np.ndarray, level: float, serial: bool) -> tuple[np.ndarray, ...]:
    """`Trend`'s arrays `(cell,)` of a table `(year, season, cell)`, its positions `(year, season)`."""
    earlier, later = np.triu_indices(len(table), 1)
    rises = table[later] - table[earlier]
    slopes = rises / (where[later] - where[earlier])[..., None]
    slopes = np.sort(slopes.reshape(where.shape[1] * len(earlier), table.shape[-1]), axis=0)
    periods, pairs = np.isfinite(table).sum(axis=(0, 1)), np.isfinite(slopes).sum(axis=0)
    told = (periods >= LEAST_PERIODS) & (pairs >= LEAST_PAIRS)
    slope = np.where(told, _ordered(slopes, (pairs - 1) // 2) / 2 + _ordered(slopes, pairs // 2) / 2, np.nan)
    signs = np.nan_to_num(np.sign(rises)).sum(axis=1)
    variance = _variance(signs, table)
    if serial:
        variance = variance * _correction(table[:, 0] - slope * where)
    return slope, *_ends(slopes, pairs, variance, level, told), _p_value(signs.sum(axis=0), variance, told), periods


def _ends(
    slopes: np.ndarray, pairs: np.ndarray, variance: np.ndarray, level: float, told: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Slopes that rank (pairs ∓ z √variance) / 2, the upper one plus 1, of `slopes` `(pair, cell)` in order."""
    reach = special.ndtri((1 + level) / 2) * np.sqrt(variance)
    first, last = (np.rint((pairs + side * reach) / 2).astype(int) for side in (-1, 1))
    told = told & (first >= 1) & (last < pairs)
    return np.where(told, _ordered(slopes, first - 1), np.nan), np.where(told, _ordered(slopes, last), np.nan)


def _ordered(slopes: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """The slope `(cell,)` of that rank, from zero; the nearest there is."""
    return np.take_along_axis(slopes, np.clip(rank, 0, len(slopes) - 1)[None], axis=0)[0]


def _p_value(score: np.ndarray, variance: np.ndarray, told: np.ndarray) -> np.ndarray:
    away = np.maximum(np.abs(score) - 1, 0) / np.sqrt(np.maximum(variance, np.finfo(float).tiny))
    return np.where(told, 2 * special.ndtr(-away), np.nan)


def _variance(signs: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The variance `(cell,)` of S: (Σ Z² + 4 Σ c²) / 3 over pairs of years and over years.

    Z sums the signs of a pair over seasons, c the ranks of a year in its season less their mean. Of one season this
    is n (n − 1) (2n + 5) / 18 less Kendall's terms for ties; between seasons it is the covariance by Dietz & Killeen
    that Hirsch & Slack take; a missing value has rank 0 and sign 0.
    """
    centred = _centred(table, np.isfinite(table)).sum(axis=1)
    return (np.square(signs).sum(axis=0) + 4 * np.square(centred).sum(axis=0)) / 3


def _correction(residuals: np.ndarray) -> np.ndarray:
    """What serial correlation multiplies the variance of S by `(cell,)`, from values `(period, cell)` less their trend.

    1 + 2 Σ (n − i) (n − i − 1) (n − i − 2) ρ(i) / (n (n − 1) (n − 2)), ρ the autocorrelations of ranks at lags i where
    they are not chance (Hamed & Rao). Few periods make few of them loud, and detrending makes all of them smaller, so
    the same with ρ(i) = ρⁱ (an AR(1) process, as in Yue & Wang 2004, Water Resources Management 18) and ρ(1) corrected
    for its bias, (2 + 4 ρ) / n (van Giersbergen 2005, Economics Letters 89), counts where it is more. Never below 1:
    what looks like negative correlation makes no trend clearer.
    """
    present = np.isfinite(residuals)
    products, pairs = _lagged(_centred(residuals, present)), np.rint(_lagged(present.astype(float)))
    count, lags = np.maximum(pairs[0], LEAST_PERIODS), np.arange(1, len(residuals))[:, None]
    seen = (pairs[0] / np.maximum(pairs[1:], 1)) * (1 - lags / len(residuals))  # 1 where no value is missing
    found = seen * products[1:] / np.maximum(products[0], np.finfo(float).tiny)
    loud = np.where(np.abs(found) > LOUD / np.sqrt(count), found, 0)
    first = np.clip((found[0] + 2 / count) / np.maximum(1 - 4 / count, 0.2), 0, MOST_CORRELATION)
    sums = [(_triples(pairs[1:]) * each).sum(axis=0) for each in (loud, np.where(products[0] > 0, first, 0) ** lags)]
    return 1 + 2 * np.maximum(0, np.maximum(*sums)) / _triples(count)


def _centred(values: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Ranks along the first dim less their mean, zero where a value is missing; ties share their mean rank."""
    from scipy import stats  # takes half a second, which only trends are worth

    ranks = stats.rankdata(np.where(present, values, np.inf), axis=0)
    return np.where(present, ranks - (present.sum(axis=0) + 1) / 2, 0)


def _triples(count: np.ndarray) -> np.ndarray:
    return count * (count - 1) * (count - 2)


def _lagged(values: np.ndarray) -> np.ndarray:
    """Σ v(t) v(t + i) `(lag, cell)` for all lags i."""
    power = np.abs(np.fft.rfft(values, 2 * len(values), axis=0)) ** 2
    return np.fft.irfft(power, 2 * len(values), axis=0)[: len(values)]
