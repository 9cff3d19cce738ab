"""Sums over windows, by group: what every statistic is made of. Sums of parts add up to the sums of the whole.

So neither blocks nor their order change an answer, beyond rounding in float64. J is a derivative, x the input that it
belongs to, y the prediction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from . import histogram, loops
from .blas import one_thread
from .loops import flat

TARGET = ("output_step", "output")
CELL = (*TARGET, "lag", "feature")
MOMENTS = {
    "count": np.int64,  # of finite J
    "total": np.float64,
    "total_abs": np.float64,
    "total_squares": np.float64,
    "least": None,  # of the block's dtype
    "largest": None,
    "positive": np.int64,
    "negative": np.int64,
}
INPUTS = {
    "input_count": np.int64,
    "input_total": np.float64,  # Σ J·x
    "input_abs": np.float64,
    "elastic_count": np.int64,
    "elastic_total": np.float64,  # Σ J·x/y
    "elastic_abs": np.float64,
}
TARGETS = {"target_count": np.int64, "target_total": np.float64, "target_squares": np.float64}  # of finite y
TOTALS = ("total", "total_abs", "total_squares")
SIGNS = ("positive", "negative")
HISTOGRAM = ("histogram", "tops")
PRODUCTS = ("products", "complete")
DIMS = {
    **dict.fromkeys((*MOMENTS, *INPUTS, "tops"), CELL),
    **dict.fromkeys((*TARGETS, "complete"), TARGET),
    "histogram": (*CELL, "bin"),
    "products": (*CELL, "lag_2", "feature_2"),  # Σ J Jᵀ over windows that have every J of their target
}
SAFE = (1e-15, 1e15)  # sizes whose products float32 holds
PRODUCT_ROWS = 8192


@dataclass(frozen=True)
class Part:
    """groups: int64 `(group)`, rising. sums: by name, `(group, *DIMS[name])`."""

    groups: np.ndarray
    sums: dict[str, np.ndarray]

    def __sizeof__(self) -> int:
        """With what it holds: Dask's workers mind how large a result is that they keep or fetch."""
        return object.__sizeof__(self) + self.groups.nbytes + sum(field.nbytes for field in self.sums.values())


@dataclass(frozen=True)
class Block:
    """Windows of the store: J `(window, output_step, output, lag, feature)`, y `(window, output_step, output)`, and x
    `(window, 1 or output_step, lag, feature)`; `order` and `borders` as in `loops`.
    """

    jacobian: np.ndarray
    prediction: np.ndarray | None
    inputs: np.ndarray | None
    order: np.ndarray
    borders: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one group's cells."""
        return self.jacobian.shape[1:]

    @property
    def groups(self) -> int:
        return len(self.borders) - 1


def sums_of(
    jacobian: np.ndarray,
    codes: np.ndarray,
    needs: Sequence[str],
    prediction: np.ndarray | None = None,
    inputs: np.ndarray | None = None,
) -> Part:
    """The sums `needs` names of one block, by `codes` int64 `(window)`; windows with a code below zero do not count."""
    order = np.argsort(codes, kind="stable")
    order = order[np.searchsorted(codes[order], 0) :]
    ordered = codes[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    block = Block(np.ascontiguousarray(jacobian), prediction, inputs, order, np.append(starts, len(order)))
    found: dict[str, np.ndarray] = {}
    if {*MOMENTS, *HISTOGRAM, *PRODUCTS} & {*needs}:
        found |= _moments(block, needs)
    if {*HISTOGRAM} & {*needs}:
        found |= _histogram(block, found)
    if {*INPUTS} & {*needs}:
        found |= _inputs(block)
    if {*TARGETS} & {*needs}:
        found |= _targets(block)
    if {*PRODUCTS} & {*needs}:
        found |= _products(block, found)
    return Part(ordered[starts], {name: found[name] for name in needs})


def _moments(block: Block, needs: Sequence[str]) -> dict[str, np.ndarray]:
    cells = flat(block.jacobian)
    found = {name: np.zeros((block.groups, cells.shape[1]), kind or cells.dtype) for name, kind in MOMENTS.items()}
    found["least"][:], found["largest"][:] = np.inf, -np.inf
    signs, sizes = bool({*SIGNS} & {*needs}), bool({*TOTALS} & {*needs})
    loops.add_moments(cells, block.order, block.borders, signs, sizes, *found.values())
    return {name: field.reshape(block.groups, *block.shape) for name, field in found.items()}


def _targets(block: Block) -> dict[str, np.ndarray]:
    assert block.prediction is not None
    values = block.prediction[block.order].astype(np.float64)
    finite = np.isfinite(values)
    values[~finite] = 0
    with np.errstate(over="ignore"):
        terms = zip(TARGETS.items(), (finite, values, np.square(values)), strict=True)
    if not block.groups:
        return {name: np.zeros((0, *values.shape[1:]), kind) for (name, kind), _ in terms}
    return {name: np.add.reduceat(term, block.borders[:-1], axis=0, dtype=kind) for (name, kind), term in terms}


def _histogram(block: Block, moments: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    sizes = np.maximum(np.abs(moments["least"]), np.abs(moments["largest"]))
    tops = histogram.exponents(np.where(moments["count"] > 0, sizes, 0))
    counts = histogram.counted(block.jacobian, block.order, block.borders, tops)
    return {"histogram": counts, "tops": tops}


def _inputs(block: Block) -> dict[str, np.ndarray]:
    assert block.inputs is not None
    assert block.prediction is not None
    windows, steps, outputs, *source = block.jacobian.shape
    values = block.jacobian.reshape(windows, steps * outputs, math.prod(source))
    predictions = flat(np.ascontiguousarray(block.prediction))
    inputs, by_window, by_step = _in_line(block.inputs)
    if by_step and outputs > 1:  # a step's outputs have its inputs
        inputs, by_window, by_step = _in_line(np.repeat(block.inputs, outputs, axis=1))
    found = {name: np.zeros((block.groups, *values.shape[1:]), kind) for name, kind in INPUTS.items()}
    strides = np.array([by_window, by_step])
    loops.add_inputs(values, inputs, strides, predictions, block.order, block.borders, *found.values())
    return {name: field.reshape(block.groups, *block.shape) for name, field in found.items()}


def _in_line(inputs: np.ndarray) -> tuple[np.ndarray, int, int]:
    """`(window, 1 or target, lag, feature)` → all entries, flat, and how far it is from one window's to the next one's,
    and from one target's (0 of 1): no copy where a window's steps lie together.
    """
    windows, targets, lags, features = inputs.shape
    size, (window, target, lag, feature) = inputs.itemsize, inputs.strides
    apart = window % size == target % size == 0 and window >= 0 and target >= 0
    if not (inputs.size and apart and feature == size and lag == features * size):
        inputs = np.ascontiguousarray(inputs)
        window, target = targets * lags * features * size, lags * features * size
    by_window, by_target = window // size, target // size if targets > 1 else 0
    last = (windows - 1) * by_window + (targets - 1) * by_target + lags * features if inputs.size else 0
    return np.lib.stride_tricks.as_strided(inputs, (last,), (size,), writeable=False), by_window, by_target


def _products(block: Block, moments: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    steps, outputs, *source = block.shape
    size = math.prod(source)
    found = np.zeros((block.groups, steps, outputs, size, size))
    complete = np.zeros((block.groups, steps, outputs), np.int64)
    with one_thread():
        for group, step, output in np.ndindex(*complete.shape):
            rows = block.order[block.borders[group] : block.borders[group + 1]]
            facts = {name: moments[name][group, step, output] for name in ("count", "least", "largest")}
            for start in range(0, len(rows), PRODUCT_ROWS):
                tile = _rows(block.jacobian, rows[start : start + PRODUCT_ROWS])[:, step, output].reshape(-1, size)
                gram, windows = _gram(tile, (facts["count"] == len(rows)).all(), _wide(facts))
                found[group, step, output] += gram
                complete[group, step, output] += windows
    return {"products": found.reshape(block.groups, *block.shape, *source), "complete": complete}


def _rows(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """A view where the rows, which rise, are consecutive."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return values[rows[0] : rows[-1] + 1]
    return values[rows]


def _wide(moments: dict[str, np.ndarray]) -> bool:
    """Whether products of what there is need float64."""
    known = moments["count"] > 0
    largest = max(abs(moments["least"][known].min(initial=0)), abs(moments["largest"][known].max(initial=0)))
    return bool(largest) and not SAFE[0] < largest < SAFE[1]


def _gram(tile: np.ndarray, whole: bool, wide: bool) -> tuple[np.ndarray, int]:
    """Σ J Jᵀ over rows `(window, source)` that are finite, and how many; in the block's dtype, or in float64."""
    if not whole:
        tile = tile[np.isfinite(tile).all(axis=1)]
    if wide:
        tile = tile.astype(np.float64)
    return tile.T @ tile, len(tile)


def merged(parts: Iterable[Part]) -> Part:
    """The sums of all windows that are in one of the parts."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    groups = np.unique(np.concatenate([part.groups for part in parts]))
    places = [np.searchsorted(groups, part.groups) for part in parts]
    found: dict[str, np.ndarray] = {}
    for name in parts[0].sums:
        if name == "histogram":
            found |= histogram.merged(len(groups), places, [part.sums for part in parts])
        elif name != "tops":
            found[name] = _merged(name, len(groups), places, [part.sums[name] for part in parts])
    return Part(groups, found)


def _merged(name: str, groups: int, places: list[np.ndarray], fields: list[np.ndarray]) -> np.ndarray:
    into = np.full((groups, *fields[0].shape[1:]), EMPTY.get(name, 0), fields[0].dtype)
    for place, field in zip(places, fields, strict=True):
        if name == "least":
            into[place] = np.minimum(into[place], field)
        elif name == "largest":
            into[place] = np.maximum(into[place], field)
        else:
            into[place] += field
    return into


EMPTY = {"least": np.inf, "largest": -np.inf}


def cell_bytes(needs: Sequence[str], source: int) -> int:
    """Bytes that the sums of one group take for each J of a window; `source`: how many of these one target has."""
    sizes = dict.fromkeys(DIMS, 8) | {"histogram": histogram.BYTES, "products": 8 * source}
    return sum(sizes[name] for name in needs)
