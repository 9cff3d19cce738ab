"""Intervals for statistics of a record whose neighbouring windows resemble each other.

A record comes as *leaves*, consecutive equal stretches of time with sums that add up, some of them empty. A resample
takes blocks of consecutive leaves at random (the circular block bootstrap; Politis & Romano 1992) and counts how often
it took each; its statistic is the same function of sums as the record's, weighted by these counts.

That alone gives intervals that are too short, for three reasons, and each has its remedy here:

- Block lengths that estimate a variance best leave much bias in it; intervals want longer ones (Sun, Phillips & Jin
  2008, Econometrica 76): `LONGER` times the length of Politis & White.
- What is correlated across a block's edge is lost. `Resampling.inflation` makes up for it: the root of a flat-top
  estimate of the variance of the mean, which loses little (Politis & Romano 1995), by the one that blocks give.
- A variance from few blocks is uncertain: quantiles of t with blocks − 1 degrees of freedom in place of the normal
  ones, and blocks / (blocks − 1) for the variance (Hesterberg 2015, The American Statistician 69).

Measured by `tests/benchmarks/intervals.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

LONGER = 1.5
LEAST_BLOCKS = 4  # from fewer no interval is told
ENOUGH_BLOCKS = 6  # blocks are not made longer than leaves this many
MOST_INFLATION = 2.0
MOST_CELLS = 1024  # of more, as many evenly spaced ones say how long blocks are
BLOCK_QUANTILE = 0.9  # blocks are long enough for nine of ten cells, the others cost little width
MOST_SHIFT = 0.5  # of normal quantiles by what resamples say of bias


@dataclass(frozen=True, eq=False)
class Resampling:
    """How a record is resampled, and what an interval has to know of it.

    `weights` `(resample, leaf)` int32: how often a resample takes a leaf; every row sums to the number of leaves.
    `block`: length of a block in leaves. `leaves`: how many leaves hold data, or what they are worth (`spread`).
    `inflation`: what deviations from the point are multiplied by, at least 1. `seed`: what the weights were drawn from.
    """

    weights: np.ndarray
    block: int
    leaves: float
    inflation: float
    seed: int

    @property
    def blocks(self) -> float:
        """How many blocks of data there are."""
        return self.leaves / self.block

    def stretch(self, level: float) -> float:
        """What deviations of a percentile interval are multiplied by; NaN where there are too few blocks."""
        if self.blocks < LEAST_BLOCKS:
            return np.nan
        tail = (1 + level) / 2
        student = special.stdtrit(self.blocks - 1, tail) * np.sqrt(self.blocks / (self.blocks - 1))
        return float(self.inflation * student / special.ndtri(tail))


def resampling(
    kinds: Sequence[np.ndarray], counts: np.ndarray, resamples: int = 1000, seed: int = 0, least: int = 1
) -> Resampling:
    """How to resample a record with `counts` `(leaf, cell)` or `(leaf,)` of windows in its leaves.

    `kinds`: leaf means `(leaf, cell)` of each quantity that statistics are made of, in its unit: J and |J|, say, since
    sizes may depend on the past where signs do not. The kind with the longest blocks counts. `least`: leaves that are
    known to depend on each other, which a block has at least.
    """
    influences = [_influence(means, counts) for means in kinds]
    lengths = [_block_length(influence, counts) for influence in influences]
    block = min(max(least, *lengths), len(counts))
    return Resampling(
        weights=weights(len(counts), block, resamples, seed),
        block=block,
        leaves=_filled(counts),
        inflation=_inflation(influences[int(np.argmax(lengths))], block),
        seed=seed,
    )


def block_length(means: np.ndarray, counts: np.ndarray) -> int:
    """Leaves in a block, from leaf means `(leaf, cell)` (NaN where empty) and counts `(leaf, cell)` or `(leaf,)`.

    `LONGER` times the length by Politis & White (2004, Econometric Reviews 23) for circular blocks, as corrected by
    Patton, Politis & White (2009, ibid. 28), in each cell; of these the `BLOCK_QUANTILE`, cells that are constant left
    out; never so long that fewer than `ENOUGH_BLOCKS` blocks of data remain, where there are as many leaves.
    """
    return _block_length(_influence(means, counts), counts)


def spread(counts: np.ndarray, block: int) -> float:
    """How many leaves would make as many blocks of data as there are: of counts `(leaf,)`, all of them where all
    leaves have as many, and `block` where one has them all.

    (Σw)² / Σw², w the counts of circular blocks (Kish 1965, Survey Sampling): windows of a kind that is rare, but comes
    all along the record, are worth more than as many in a row.
    """
    whole = np.append(0, np.resize(counts, len(counts) + block - 1)).cumsum(dtype=np.float64)
    blocks = whole[block:] - whole[:-block]
    return float(np.square(blocks.sum()) / max(np.square(blocks).sum(), np.finfo(float).tiny))


def weights(leaves: int, block: int, resamples: int, seed: int) -> np.ndarray:
    """`(resample, leaf)` int32: how often each leaf is taken by as many circular blocks as make up `leaves` leaves.

    Each row sums to `leaves`: what the last block has too much is left out. The same for the same arguments.
    """
    starts = np.random.default_rng(seed).integers(0, leaves, (resamples, -(-leaves // block), 1))
    taken = (starts + np.arange(block)).reshape(resamples, -1)[:, :leaves] % leaves
    rows = np.arange(resamples)[:, None] * leaves
    return np.bincount((taken + rows).ravel(), minlength=resamples * leaves).reshape(resamples, leaves).astype(np.int32)


def interval(
    point: np.ndarray, replicates: np.ndarray, resampling: Resampling, level: float = 0.9
) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the interval that holds the truth with probability `level`: float64 of `point`'s dims and unit.

    `point` `(…)`: the record's statistic; `replicates` `(resample, …)`: those of the resamples. The bias-corrected
    percentile interval (Efron 1987, JASA 82), its deviations from the point stretched by `resampling.stretch`: so it
    may reach beyond the values that the statistic can take.

    Replicates that are not finite are left out. Where they are more than exp(−`LEAST_BLOCKS`) of all, what there is
    of data lies within so few blocks that resamples miss it: then, with too few blocks, and where the point is not
    finite, the ends are NaN. No bootstrap is good for eigenvalues that are nearly equal, nor for extremes.
    """
    point = np.asarray(point, np.float64)
    ordered = np.sort(np.where(np.isfinite(replicates), replicates, np.nan).astype(np.float64), axis=0)
    finite = np.isfinite(ordered).sum(axis=0)
    told = (finite >= (1 - np.exp(-LEAST_BLOCKS)) * len(ordered)) & (finite > 0) & np.isfinite(point)
    shift, normal = 2 * _bias(point, ordered, finite), special.ndtri((1 + level) / 2)
    stretch = resampling.stretch(level)
    low, high = (
        np.where(told, point + stretch * (_quantile(ordered, finite, special.ndtr(shift + side)) - point), np.nan)
        for side in (-normal, normal)
    )
    return low, high


def _bias(point: np.ndarray, ordered: np.ndarray, finite: np.ndarray) -> np.ndarray:
    """How far the point is from the replicates' median, as a normal quantile `(…)`; ties count by half."""
    below = ((ordered < point).sum(axis=0) + (ordered <= point).sum(axis=0)) / 2
    return np.clip(special.ndtri((below + 0.5) / (finite + 1)), -MOST_SHIFT, MOST_SHIFT)


def _quantile(ordered: np.ndarray, finite: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Quantiles `(…)` of the first `finite` of `ordered` `(resample, …)`, a `share` for each; linear in between."""
    place = np.clip(share * (finite + 1) - 1, 0, np.maximum(finite - 1, 0))
    before = np.floor(place).astype(int)
    after = np.minimum(before + 1, np.maximum(finite - 1, 0))
    lower, upper = (np.take_along_axis(ordered, at[None], axis=0)[0] for at in (before, after))
    return lower + (place - before) * (upper - lower)


def _influence(means: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """What each leaf moves its cell's mean by, times leaves: `(leaf, cell)` float64, zero where a leaf is empty, also
    for that cell alone (NaN).

    The weighted mean's deviations c (m − m̄) / c̄, in units of the deviation of each cell; constant cells left out.
    """
    cells = np.arange(0, means.shape[1], max(1, -(-means.shape[1] // MOST_CELLS)))
    counts = np.broadcast_to(counts.reshape(len(counts), -1), means.shape)[:, cells].astype(np.float64)
    counts = np.where(np.isnan(means[:, cells]), 0, counts)
    values = np.where(counts > 0, means[:, cells], 0).astype(np.float64)
    average = (counts * values).sum(axis=0) / np.maximum(counts.sum(axis=0), 1)
    found = counts * (values - average)
    size, noise = found.std(axis=0), 1e-6 * np.abs(counts * values).max(axis=0, initial=0)
    kept = np.isfinite(size) & (size > noise)
    return found[:, kept] / size[kept]


def _filled(counts: np.ndarray) -> int:
    return int((counts.reshape(len(counts), -1) > 0).any(axis=1).sum())


def _block_length(influence: np.ndarray, counts: np.ndarray) -> int:
    if not influence.shape[1]:
        return 1
    found = LONGER * np.quantile(_politis_white(influence), BLOCK_QUANTILE)
    return int(max(1, min(np.ceil(found), _filled(counts) // ENOUGH_BLOCKS)))


def _politis_white(influence: np.ndarray) -> np.ndarray:
    """The length `(cell,)` that estimates the variance best: (2 G² / D)^⅓ n^⅓ with D = 4/3 g(0)²."""
    slope, variance = _flat_top(influence)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.cbrt(1.5 * np.square(slope / variance) * len(influence))
    return np.where(variance > 0, np.maximum(found, 1), 1)


def _inflation(influence: np.ndarray, block: int) -> float:
    """Root of the flat-top variance by that of circular blocks: the median over cells, 1 to `MOST_INFLATION`."""
    if not influence.shape[1]:
        return 1.0
    wrapped = np.concatenate([np.zeros_like(influence[:1]), influence, influence[: block - 1]]).cumsum(axis=0)
    blocks = np.square(wrapped[block:] - wrapped[:-block]).mean(axis=0) / block
    ratio = np.maximum(_flat_top(influence)[1], 0) / np.maximum(blocks, np.finfo(float).tiny)
    return float(np.clip(np.median(np.sqrt(ratio)), 1, MOST_INFLATION))


def _flat_top(influence: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """G = Σ |k| λ(k) R(k) and g(0) = Σ λ(k) R(k), both `(cell,)`, R the autocovariances of `influence`.

    λ is the trapezoid of Politis & Romano (1995, Journal of Time Series Analysis 16): 1 up to m and falling to 0 at
    2m, with m the first lag that a run of small autocorrelations follows (Politis 2003, Journal of
    Nonparametric Statistics 15).
    """
    leaves = len(influence)
    run = max(5, int(np.ceil(np.sqrt(np.log10(leaves)))))
    most = int(np.ceil(np.sqrt(leaves))) + run
    covariances = _autocovariances(influence, most + run)
    loud = np.abs(covariances[1:]) > 2 * np.sqrt(np.log10(leaves) / leaves) * covariances[0]
    quiet = ~np.lib.stride_tricks.sliding_window_view(loud, run, axis=0).any(axis=-1)
    last = np.where(quiet.any(axis=0), np.maximum(quiet.argmax(axis=0), 1), most)
    lags = np.arange(1, most + 1)[:, None]
    parts = np.clip(2 * (1 - lags / np.minimum(2 * last, most)), 0, 1) * covariances[1 : most + 1]
    return 2 * (lags * parts).sum(axis=0), covariances[0] + 2 * parts.sum(axis=0)


def _autocovariances(values: np.ndarray, most: int) -> np.ndarray:
    """`(lag, cell)` for lags 0 to `most` of centred `values` `(leaf, cell)`."""
    size = len(values) + most
    power = np.abs(np.fft.rfft(values, size, axis=0)) ** 2
    return np.fft.irfft(power, size, axis=0)[: most + 1] / len(values)
