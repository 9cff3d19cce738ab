"""The loops over every derivative of a block, compiled: each entry is looked at once, in the cache, for all sums.

Blocks are `(window, cell)`, a cell being one combination of output step, output, lag and feature. `order` int64 names
a block's windows group by group, `borders` int64 `(group + 1)` where in it each group begins. Only finite
entries count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

ROWS, CELLS = 128, 512  # of a tile whose keys stay in a core's cache
APART = 32  # keys between rows: rows a power of two apart would share few lines of a cache


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once a machine, where there is a place to keep it, and once a process where there is none."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder that can be written
        return numba.njit(nogil=True)(function)


def flat(values: np.ndarray) -> np.ndarray:
    """`(window, …)` → `(window, cell)`."""
    return values.reshape(len(values), math.prod(values.shape[1:]))


@_compiled
def add_moments(
    values, order, borders, signs, sizes, count, total, total_abs, total_squares, least, largest, positive, negative
):
    """Add a block to sums `(group, cell)`: int64 counts, float64 sums, extremes in the block's dtype.

    signs, sizes: whether counts of signs, and sums, are wanted; else they are left as they are.
    """
    cells = values.shape[1]
    for group in range(len(borders) - 1):
        for first in range(0, cells, CELLS):
            last = min(cells, first + CELLS)
            counts, lows, highs = count[group, first:last], least[group, first:last], largest[group, first:last]
            totals, abs_totals, squares = (
                total[group, first:last],
                total_abs[group, first:last],
                total_squares[group, first:last],
            )
            above, below = positive[group, first:last], negative[group, first:last]
            for place in range(borders[group], borders[group + 1]):
                row = values[order[place], first:last]
                _add_extremes(row, counts, lows, highs)
                if sizes:
                    _add_sums(row, totals, abs_totals, squares)
                if signs:
                    _add_signs(row, above, below)


@_compiled
def _add_sums(row, total, total_abs, total_squares):
    for cell in range(len(row)):
        value = np.float64(row[cell])
        exact = value if value - value == 0 else 0.0
        total[cell] += exact
        total_abs[cell] += abs(exact)
        total_squares[cell] += exact * exact


@_compiled
def _add_signs(row, positive, negative):
    for cell in range(len(row)):
        value = row[cell]
        finite = value - value == 0
        positive[cell] += finite & (value > 0)
        negative[cell] += finite & (value < 0)


@_compiled
def _add_extremes(row, count, least, largest):
    for cell in range(len(row)):
        value = row[cell]
        finite = value - value == 0
        count[cell] += finite
        low, high = least[cell], largest[cell]
        least[cell] = value if finite & (value < low) else low
        largest[cell] = value if finite & (value > high) else high


@_compiled
def add_inputs(
    values, inputs, strides, predictions, order, borders, count, total, total_abs, elastic_count, elastic, elastic_abs
):
    """Add J·x and J·x/y to sums `(group, target, source)`.

    values: `(window, target, source)`; predictions: y `(window, target)`; inputs: x, flat, `strides` of it from one
    window's to the next one's, and from one target's.
    """
    targets, sources = values.shape[1:]
    sums = np.empty((4, sources))
    for group in range(len(borders) - 1):
        for begin in range(borders[group], borders[group + 1], ROWS):
            windows = order[begin : min(begin + ROWS, borders[group + 1])]
            for target in range(targets):
                plain = count[group, target], total[group, target], total_abs[group, target]
                by_size = elastic_count[group, target], elastic[group, target], elastic_abs[group, target]
                if _all_added(values, inputs, strides, predictions, windows, target, sums):
                    _add_part(len(windows), sums[0], sums[1], *plain)
                    _add_part(len(windows), sums[2], sums[3], *by_size)
                    continue
                for window in windows:
                    start = window * strides[0] + target * strides[1]
                    row, x = values[window, target], inputs[start : start + sources]
                    _add_products(row, x, 1.0, *plain)
                    prediction = np.float64(predictions[window, target])
                    if prediction - prediction == 0 and prediction != 0:
                        _add_products(row, x, prediction, *by_size)


@_compiled
def _all_added(values, inputs, strides, predictions, windows, target, sums):
    """Whether all products of some windows are finite; then `sums` `(4, source)` are Σ J·x, Σ |J·x|, and both by y."""
    sources = values.shape[2]
    total, total_abs, elastic, elastic_abs = sums[0], sums[1], sums[2], sums[3]
    sums[:] = 0
    for window in windows:
        prediction = np.float64(predictions[window, target])
        if not (prediction - prediction == 0 and prediction != 0):
            return False
        start = window * strides[0] + target * strides[1]
        x = inputs[start : start + sources]
        _add_row(values[window, target], x, 1.0 / prediction, total, total_abs, elastic, elastic_abs)
    for source in range(sources):  # what is not finite stays so in a sum of sizes
        size = total_abs[source] + elastic_abs[source]
        if size - size != 0:
            return False
    return True


@_compiled
def _add_row(row, x, factor, total, total_abs, elastic, elastic_abs):
    for source in range(len(row)):
        product = np.float64(row[source]) * x[source]
        quotient = product * factor
        total[source] += product
        total_abs[source] += abs(product)
        elastic[source] += quotient
        elastic_abs[source] += abs(quotient)


@_compiled
def _add_part(windows, part, part_abs, count, total, total_abs):
    for source in range(len(part)):
        count[source] += windows
        total[source] += part[source]
        total_abs[source] += part_abs[source]


@_compiled
def _add_products(row, x, divisor, count, total, total_abs):
    for source in range(len(row)):
        product = np.float64(row[source]) * x[source] / divisor
        finite = product - product == 0
        exact = product if finite else 0.0
        count[source] += finite
        total[source] += exact
        total_abs[source] += abs(exact)


@_compiled
def add_histogram(bits, order, borders, bases, counts, mask, shift):
    """Count a block's entries in bins `(group, cell, 2 · side + 2)`, the last of which takes what is not finite.

    bits: the entries as signed integers of their size; `(bits & mask) >> shift`, less a cell's `bases` int32
    `(group, cell)`, is the rank of an entry's bin away from the middle one.
    """
    cells, side = bits.shape[1], np.int32(counts.shape[2] // 2 - 1)
    keys = np.empty((ROWS, CELLS + APART), np.int16)
    for group in range(len(borders) - 1):
        for begin in range(borders[group], borders[group + 1], ROWS):
            rows = min(ROWS, borders[group + 1] - begin)
            for first in range(0, cells, CELLS):
                last = min(cells, first + CELLS)
                for row in range(rows):
                    _keys(bits[order[begin + row], first:last], bases[group, first:last], mask, shift, side, keys[row])
                for column in range(last - first):
                    bins = counts[group, first + column]
                    for row in range(rows):
                        bins[keys[row, column]] += 1


@_compiled
def _keys(bits, bases, mask, shift, side, keys):
    for cell in range(len(bits)):
        stored = bits[cell]
        rank = max(np.int32((stored & mask) >> shift) - bases[cell], np.int32(0))
        signed = np.int32(-rank) if stored < 0 else rank
        keys[cell] = np.int32(2) * side + np.int32(1) if rank > side else side + signed


@_compiled
def add_shifted(counts, into, shifts):
    """Add bins `(cell, 2 · side + 1)` to others whose cells have a top that is `shifts` `(cell)` bins higher."""
    cells, bins = counts.shape
    side = bins // 2
    for cell in range(cells):
        shift = shifts[cell]
        for place in range(bins):
            rank = place - side
            moved = max(rank - shift, 0) if rank > 0 else min(rank + shift, 0)
            into[cell, side + moved] += counts[cell, place]


@_compiled
def find_quantiles(counts, shares, places):
    """The bin `(row, share)` that holds the entry of each rank; counts: `(row, bin)`; shares: rising; −1: of none."""
    rows, bins = counts.shape
    for row in range(rows):
        total = np.float64(0.0)
        for place in range(bins):
            total += counts[row, place]
        running, place = np.float64(0.0), -1
        for share in range(len(shares)):
            # A share times a count may be rounded above the whole number that it is.
            rank = max(np.ceil(shares[share] * total * (1 - 1e-12)), 1.0)
            while running < rank and place < bins - 1:
                place += 1
                running += counts[row, place]
            places[row, share] = place if total > 0 else -1
