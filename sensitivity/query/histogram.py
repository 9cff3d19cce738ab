"""Histograms of derivatives of any size: bins of equal relative width, down to 2⁻²³ of the largest.

A floating-point number's bits, read as an integer, rise with its size; with all but `KEPT` bits of the mantissa cut off
they number bins that are 2⁻ᴷᴱᴾᵀ of their lower edge wide, at most. Each cell has `OCTAVES` doublings of such bins below
its largest entry, on either side of a middle bin for what is smaller. Parts with other tops are shifted, whole bins at
a time, so that any split gives the same counts (the idea of HdrHistogram, and of DDSketch, arXiv 1908.10693).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import DTypeLike

from . import loops

KEPT, OCTAVES = 5, 24
SIDE = OCTAVES << KEPT
BINS = 2 * SIDE + 1
BYTES = 4 * BINS
ERROR = 2.0 ** -(KEPT + 1)  # of a quantile, relative
_MANTISSA = {4: 23, 8: 52}
_INTEGER: dict[int, Any] = {4: np.int32, 8: np.int64}


def exponents(sizes: np.ndarray) -> np.ndarray:
    """The exponent of absolute values, as their dtype stores it: int32."""
    kind = sizes.dtype.itemsize
    return (np.ascontiguousarray(sizes).view(_INTEGER[kind]) >> _MANTISSA[kind]).astype(np.int32)


def _bases(tops: np.ndarray) -> np.ndarray:
    """The number of each cell's middle bin, counting bins from zero up."""
    return np.maximum((tops - OCTAVES + 1) << KEPT, 1) - 1


def counted(values: np.ndarray, order: np.ndarray, borders: np.ndarray, tops: np.ndarray) -> np.ndarray:
    """Entries of a block `(window, …)` by bin: int32 `(group, …, bin)`; tops: int32 `(group, …)`."""
    kind, groups = values.dtype.itemsize, len(borders) - 1
    whole = _INTEGER[kind]
    bits = loops.flat(values).view(whole)
    counts = np.zeros((groups, bits.shape[1], BINS + 1), np.int32)
    bases = _bases(tops).reshape(groups, bits.shape[1]).astype(np.int32)
    loops.add_histogram(bits, order, borders, bases, counts, whole(np.iinfo(whole).max), whole(_MANTISSA[kind] - KEPT))
    return counts[..., :BINS].reshape(groups, *values.shape[1:], BINS)


def merged(groups: int, places: Sequence[np.ndarray], parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """`histogram` and `tops` of all parts, whose groups go to `places` of `groups`."""
    shape = parts[0]["tops"].shape[1:]
    tops = np.zeros((groups, *shape), np.int32)
    for place, part in zip(places, parts, strict=True):
        tops[place] = np.maximum(tops[place], part["tops"])
    most = sum(int(part["histogram"].max(initial=0)) for part in parts)  # in a bin: billions of windows pass int32
    kinds = [part["histogram"].dtype for part in parts]
    counts = np.zeros((groups, *shape, BINS), np.result_type(*kinds, np.min_scalar_type(-most - 1)))
    for place, part in zip(places, parts, strict=True):
        shifts = (_bases(tops[place]) - _bases(part["tops"])).reshape(len(place), math.prod(shape))
        for i, group in enumerate(place):
            loops.add_shifted(part["histogram"][i].reshape(-1, BINS), counts[group].reshape(-1, BINS), shifts[i])
    return {"histogram": counts, "tops": tops}


def shifted(counts: np.ndarray, tops: np.ndarray, into: np.ndarray) -> np.ndarray:
    """Histograms `(…, bin)` with tops `(…)` in the bins of higher tops."""
    found = np.zeros_like(counts)
    shifts = (_bases(into) - _bases(tops)).reshape(-1)
    loops.add_shifted(np.ascontiguousarray(counts).reshape(-1, BINS), found.reshape(-1, BINS), shifts)
    return found


def quantile(counts: np.ndarray, tops: np.ndarray, at: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Quantiles `(…, at)` of histograms `(…, bin)`, for rising shares: the middle of the bin that a rank is in.

    The rank is that of NumPy's "inverted_cdf"; a value is off by `ERROR` of itself at most, or by 2⁻²³ of the largest
    entry. NaN where nothing was counted.
    """
    rows = np.ascontiguousarray(counts).reshape(-1, BINS)
    places = np.empty((len(rows), len(at)), np.int64)
    loops.find_quantiles(rows, np.asarray(at, float), places)
    places = places.reshape(*counts.shape[:-1], len(at))
    return np.where(places >= 0, middles(places, tops[..., None], dtype), np.nan)


def smallest(tops: xr.DataArray, dtype: str) -> xr.DataArray:
    """What is told apart from zero, in cells with these tops: float64."""
    places = np.full(tops.shape, SIDE + 1)
    return tops.copy(data=_edge(places, tops.values, np.dtype(dtype), 0))


def middles(places: np.ndarray, tops: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """The middle of each bin: float64, 0 for the middle one."""
    low, high = (_edge(places, tops, dtype, further) for further in (0, 1))
    return np.sign(places - SIDE) * (low + high) / 2


def _edge(places: np.ndarray, tops: np.ndarray, dtype: DTypeLike, further: int) -> np.ndarray:
    kind = np.dtype(dtype).itemsize
    rank = np.abs(places - SIDE)
    keys = _bases(tops) + rank + further
    bits = np.minimum(keys, (np.int64(1) << (8 * kind - 1 - _MANTISSA[kind] + KEPT)) - 1).astype(np.int64)
    values = (bits << (_MANTISSA[kind] - KEPT)).astype(_INTEGER[kind]).view(np.dtype(dtype)).astype(np.float64)
    return np.where((rank > 0) & np.isfinite(values), values, np.where(rank > 0, np.finfo(dtype).max, 0.0))
