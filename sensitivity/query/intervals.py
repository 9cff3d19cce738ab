"""How sure a statistic is: intervals from resampled stretches of time, each of which keeps its own serial dependence.

The record is cut into leaves, equal stretches of time, the same ones for all sites and groups; sums are kept for each,
and a resample is a weighted sum of these. `bootstrap` says which weights, and what ends an interval has.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr

from ..errors import Refused
from . import histogram
from .blas import one_thread
from .bootstrap import Resampling, interval, resampling, spread, weights
from .conditions import Grouping
from .periods import Span, as_numbers, stretches
from .statistics import EXTREMES, Statistic
from .sums import CELL

LEAF = "leaf"
LEAVES = (512, 256, 128, 64, 32)
RESAMPLES, COSTLY_RESAMPLES, FEW_RESAMPLES = 1000, 200, 200
METHOD = "circular block bootstrap over stretches of equal time (leaves), bias-corrected percentiles, stretched"
FACTS = ("resamples", "leaves", "block")  # of a bootstrap: how many resamples, leaves, and leaves in a block
BATCH_BYTES = 128 << 20
REPLICATE_BYTES = 256 << 20
# Sums whose means over a leaf tell how long the record remembers.
_KINDS = (
    *(("total", "count"), ("total_abs", "count"), ("total_squares", "count"), ("positive", "count")),
    *(("input_total", "input_count"), ("elastic_total", "elastic_count"), ("target_total", "target_count")),
)


def leaves(dataset: xr.Dataset, count: int, span: Span | None = None) -> Grouping:
    """`count` equal stretches of a span of time, by default the dataset's; as many as windows, if these are fewer."""
    return stretches(dataset, min(count, max(1, dataset.sizes["time"])) if span is None else count, LEAF, span)


def overlap(dataset: xr.Dataset, leaf: Grouping) -> int:
    """How many leaves the steps of one window span, at least 1: windows that share steps depend on each other."""
    times = as_numbers(dataset["time"].values)
    between, width = np.diff(times), np.diff(as_numbers(leaf.labels[:2]))
    if not (between > 0).any() or not len(width):
        return 1
    length = dataset.attrs.get("length", int(dataset["lag"].max()) + 1) / dataset.attrs.get("stride", 1)
    return max(1, math.ceil(length * between[between > 0].min() / width[0] * (1 - 1e-3)))


@dataclass(frozen=True)
class Sure:
    """Intervals are asked for: of which `level`, and from which `seed` resamples are drawn."""

    level: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.5 <= self.level < 1:
            raise Refused("ci", given=self.level, allowed="from 0.5 to below 1", remedy="write 0.9 for 90 % intervals")
        if self.seed < 0:
            raise Refused("seed", given=self.seed, allowed="0 or more", remedy="leave it out")


def answered(statistic: Statistic, sums: xr.Dataset, sure: Sure) -> xr.Dataset:
    """A statistic from sums by leaf, with `NAME_low` and `NAME_high` beside each variable that is uncertain."""
    whole, apart = over_leaves(sums)
    point = statistic.finish(whole)
    if not uncertain(statistic, point):
        return point
    names = [name for name in sums.attrs["groupings"] if name in point.dims]  # some a statistic takes apart itself
    drawn = drawn_from(apart, sure.seed, resamples(statistic, point))
    ends = [_ends(statistic, point.sel(group), apart.sel(group), drawn, sure.level) for group in _groups(apart, names)]
    return _with_ends(point, _together(ends, apart, names), drawn)


def over_leaves(sums: xr.Dataset) -> tuple[xr.Dataset, xr.Dataset]:
    """The sums of all leaves together, and those of each, their histograms in bins of the whole."""
    whole: dict[Hashable, xr.DataArray] = {}
    apart: dict[Hashable, xr.DataArray] = {}
    for name, field in sums.data_vars.items():
        if name in ("least", "largest"):
            whole[name] = apart[name] = field.min(LEAF) if name == "least" else field.max(LEAF)
        elif name == "tops":
            whole[name] = apart[name] = field.max(LEAF)
        elif name == "histogram":
            shared = _in_shared_bins(field, sums["tops"])
            whole[name], apart[name] = shared.sum(LEAF), shared.astype(np.float32)  # exact to 16 million windows a leaf
        else:
            whole[name], apart[name] = field.sum(LEAF), field
    labels = sums.drop_vars(sums.data_vars)
    return labels.drop_dims(LEAF).assign(whole), labels.assign(apart)


def _in_shared_bins(counts: xr.DataArray, tops: xr.DataArray) -> xr.DataArray:
    shared = tops.max(LEAF).broadcast_like(tops).transpose(*tops.dims)
    return counts.copy(data=histogram.shifted(counts.values, tops.values, shared.values))


def drawn_from(apart: xr.Dataset, seed: int, count: int) -> Resampling:
    """How the record is resampled: as all groups and cells together say; of two runs, as that with longer blocks."""
    counts = apart[_counting(apart)]
    runs = [dim for dim in counts.dims if dim not in (LEAF, *CELL, *apart.attrs["groupings"])]
    sides = [apart.isel({dim: place}) for dim in runs for place in range(apart.sizes[dim])] or [apart]
    least = int(apart.attrs.get("overlap", 1))
    found = max((_drawn_from(one, seed, least) for one in sides), key=lambda one: one.block)
    filled = int((counts > 0).any([dim for dim in counts.dims if dim != LEAF]).sum())
    return replace(found, weights=weights(apart.sizes[LEAF], found.block, count, seed), leaves=filled)


def _drawn_from(apart: xr.Dataset, seed: int, least: int) -> Resampling:
    """From its first leaf that is not empty to the last."""
    kinds, sizes = [], np.zeros(apart.sizes[LEAF])
    for total, number in _KINDS:
        if total in apart and number in apart:
            sums, counts = (_by_leaf(apart[name], apart) for name in (total, number))
            kinds.append(_means(sums, counts))
            sizes = np.maximum(sizes, counts.max(axis=1))
    if "products" in apart:
        squares = _diagonal(apart["products"])
        counts = _by_leaf(apart["complete"].broadcast_like(squares), apart)
        kinds.append(_means(_by_leaf(squares, apart), counts))
        sizes = np.maximum(sizes, counts.max(axis=1))
    filled = np.flatnonzero(sizes)
    span = slice(filled[0], filled[-1] + 1) if len(filled) else slice(None)
    return resampling([means[span] for means in kinds], sizes[span], 1, seed, least)


def _means(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)


def _diagonal(products: xr.DataArray) -> xr.DataArray:
    front = [dim for dim in products.dims if dim not in ("lag", "feature", "lag_2", "feature_2")]
    lags, features = products.sizes["lag"], products.sizes["feature"]
    size = lags * features
    matrix = products.transpose(*front, "lag", "feature", "lag_2", "feature_2").values
    values = np.diagonal(matrix.reshape(*matrix.shape[: len(front)], size, size), axis1=-2, axis2=-1)
    return xr.DataArray(values.reshape(*values.shape[:-1], lags, features), dims=(*front, "lag", "feature"))


def _by_leaf(field: xr.DataArray, sums: xr.Dataset) -> np.ndarray:
    """`(leaf, cell)`, groups added up."""
    groups = [dim for dim in sums.attrs["groupings"] if dim != LEAF]
    values = field.sum(groups).transpose(LEAF, ...).values
    return values.reshape(len(values), -1).astype(float)


def resamples(statistic: Statistic, point: xr.Dataset) -> int:
    """As many as there is room for, up to a thousand; fewer where each costs eigenvectors."""
    most = COSTLY_RESAMPLES if {"products", "histogram"} & {*statistic.needs} else RESAMPLES
    room = REPLICATE_BYTES // max(1, point.nbytes)
    return max(min(most, FEW_RESAMPLES), min(most, room))


def _groups(sums: xr.Dataset, names: list[str]) -> Iterator[dict[str, object]]:
    for place in np.ndindex(*(sums.sizes[name] for name in names)):
        yield {name: sums[name].values[i] for name, i in zip(names, place, strict=True)}


def _ends(statistic: Statistic, point: xr.Dataset, apart: xr.Dataset, drawn: Resampling, level: float) -> xr.Dataset:
    """Of one group, which says how much there is of it."""
    replicates = replicated(statistic, apart, drawn.weights)
    own = replace(drawn, leaves=_spread(apart, statistic.sides, drawn.block))
    found: dict[str, Any] = {}
    for name in uncertain(statistic, point):
        values = replicates[name].transpose("resample", *point[name].dims)
        low, high = interval(point[name].values, values.values, own, level)
        found |= {f"{name}_low": (point[name].dims, low), f"{name}_high": (point[name].dims, high)}
    return xr.Dataset(found)


def _spread(apart: xr.Dataset, sides: tuple[str, tuple[int, int]] | None, block: int) -> float:
    """What leaves are worth: of a difference, those of the side that has less."""
    counts = apart[_counting(apart)]
    if sides is not None:
        counts = counts.isel({sides[0]: list(sides[1])})
    most = counts.max([dim for dim in counts.dims if dim in CELL]).transpose(..., LEAF).values
    return min(spread(one, block) for one in most.reshape(-1, most.shape[-1]))


def _counting(apart: xr.Dataset) -> str:
    return next(name for name in ("count", "complete", "input_count", "elastic_count") if name in apart)


def uncertain(statistic: Statistic, point: xr.Dataset) -> list[str]:
    """The variables that get an interval."""
    names = [str(name) for name in point.data_vars if name not in statistic.sure]
    return [name for name in names if name.endswith(statistic.ending)]


def changing(statistic: Statistic, point: xr.Dataset) -> list[str]:
    """The variables whose differences and trends are told: extremes, too."""
    return [str(name) for name in point.data_vars if name not in statistic.sure or name in EXTREMES]


def replicated(statistic: Statistic, apart: xr.Dataset, weights: np.ndarray) -> xr.Dataset:
    """The statistic of every resample, in batches: with a dimension `resample`."""
    size = sum(field.nbytes // max(1, field.sizes.get(LEAF, 1)) for field in apart.data_vars.values())
    batch = max(1, BATCH_BYTES // max(1, 2 * size))
    found = []
    for start in range(0, len(weights), batch):
        with one_thread():
            sums = {name: _weighted(field, weights[start : start + batch]) for name, field in apart.data_vars.items()}
        found.append(statistic.finish(apart.drop_vars(apart.data_vars).drop_dims(LEAF).assign(sums)))
    return xr.concat(found, "resample", data_vars="all", coords="minimal", compat="override")


def _weighted(field: xr.DataArray, weights: np.ndarray) -> xr.DataArray:
    """Sums of resamples; histograms, which are many and of whole numbers, in float32."""
    if LEAF not in field.dims:
        return field
    kind = np.float32 if "bin" in field.dims else np.float64
    apart = field.transpose(LEAF, ...)
    found = np.tensordot(weights.astype(kind), apart.values.astype(kind, copy=False), axes=1)
    return xr.DataArray(found, dims=("resample", *apart.dims[1:]))


def _together(ends: list[xr.Dataset], sums: xr.Dataset, names: list[str]) -> xr.Dataset:
    """Ends of all groups, which vary as in `_groups`, with the groups' dimensions in front."""
    shape = tuple(sums.sizes[name] for name in names)
    found: dict[Hashable, Any] = {}
    for name in ends[0].data_vars:
        parts = np.stack([one[name].values for one in ends])
        found[name] = ((*names, *ends[0][name].dims), parts.reshape(*shape, *parts.shape[1:]))
    return xr.Dataset(found)


def _with_ends(point: xr.Dataset, ends: xr.Dataset, drawn: Resampling) -> xr.Dataset:
    arranged: dict[Hashable, Any] = {}
    for name, field in point.data_vars.items():
        arranged[name] = field
        for end in (f"{name}_low", f"{name}_high"):
            if end in ends:
                arranged[end] = ends[end].transpose(*field.dims).variable
    facts = dict(zip(FACTS, (len(drawn.weights), drawn.leaves, drawn.block), strict=True))
    return xr.Dataset(arranged, coords=point.coords, attrs=point.attrs).assign_coords(facts)


def shaped(statistic: Statistic, shape: xr.Dataset, sure: Sure) -> xr.Dataset:
    """What `answered` will look like, from what the statistic alone looks like."""
    if not uncertain(statistic, shape):
        return shape
    arranged: dict[Hashable, Any] = {}
    for name, field in shape.data_vars.items():
        arranged[name] = field
        if name in uncertain(statistic, shape):
            ends = xr.full_like(field, math.nan, dtype=float)
            arranged |= {f"{name}_low": ends, f"{name}_high": ends}
    note = {"ci": sure.level, "ci_method": METHOD}
    return xr.Dataset(arranged, coords=shape.coords, attrs=shape.attrs | note).assign_coords(dict.fromkeys(FACTS, 0))
