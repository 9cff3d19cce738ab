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
TARGETS = {"target_count": "count", "target_total": "total", "target_squares": "total_squares"}
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
    groups, starts = np.unique(codes[order], return_index=True)
    block = Block(np.ascontiguousarray(jacobian), prediction, inputs, order, np.append(starts, len(order)))
    found: dict[str, np.ndarray] = {}
    if {*MOMENTS, *HISTOGRAM} & {*needs}:
        found |= _moments(block.jacobian, block)
    if {*HISTOGRAM} & {*needs}:
        found |= _histogram(block, found)
    if {*INPUTS} & {*needs}:
        found |= _inputs(block)
    if {*TARGETS} & {*needs}:
        assert prediction is not None
        moments = _moments(np.ascontiguousarray(prediction), block)
        found |= {name: moments[field] for name, field in TARGETS.items()}
    if {*PRODUCTS} & {*needs}:
        found |= _products(block)
    return Part(groups, {name: found[name] for name in needs})


def _moments(values: np.ndarray, block: Block) -> dict[str, np.ndarray]:
    cells = flat(values)
    found = {name: np.zeros((block.groups, cells.shape[1]), kind or values.dtype) for name, kind in MOMENTS.items()}
    found["least"][:], found["largest"][:] = np.inf, -np.inf
    loops.add_moments(cells, block.order, block.borders, *found.values())
    return {name: field.reshape(block.groups, *values.shape[1:]) for name, field in found.items()}


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
    inputs = _in_rows(block.inputs if block.inputs.shape[1] == 1 else np.repeat(block.inputs, outputs, axis=1))
    predictions = flat(np.ascontiguousarray(block.prediction))
    found = {name: np.zeros((block.groups, *values.shape[1:]), kind) for name, kind in INPUTS.items()}
    loops.add_inputs(values, inputs, predictions, block.order, block.borders, *found.values())
    return {name: field.reshape(block.groups, *block.shape) for name, field in found.items()}


def _in_rows(inputs: np.ndarray) -> np.ndarray:
    """`(window, target, lag, feature)` → `(window, target, source)`: no copy where a window's steps lie together."""
    windows, targets, lags, features = inputs.shape
    size, (window, target, lag, feature) = inputs.itemsize, inputs.strides
    if inputs.size and feature == size and lag == features * size:
        shape, strides = (windows, targets, lags * features), (window, target, size)
        return np.lib.stride_tricks.as_strided(inputs, shape, strides, writeable=False)
    return np.ascontiguousarray(inputs).reshape(windows, targets, lags * features)


def _products(block: Block) -> dict[str, np.ndarray]:
    steps, outputs, *source = block.shape
    size = math.prod(source)
    found = np.zeros((block.groups, steps, outputs, size, size))
    complete = np.zeros((block.groups, steps, outputs), np.int64)
    with one_thread():
        for group, step, output in np.ndindex(*complete.shape):
            rows = block.order[block.borders[group] : block.borders[group + 1]]
            for start in range(0, len(rows), PRODUCT_ROWS):
                tile = _rows(block.jacobian, rows[start : start + PRODUCT_ROWS])[:, step, output].reshape(-1, size)
                found[group, step, output] += _gram(tile, complete[group, step], output)
    return {"products": found.reshape(block.groups, *block.shape, *source), "complete": complete}


def _rows(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """A view where the rows, which rise, are consecutive."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return values[rows[0] : rows[-1] + 1]
    return values[rows]


def _gram(tile: np.ndarray, complete: np.ndarray, output: int) -> np.ndarray:
    """Σ J Jᵀ over rows `(window, source)` that are finite: in the block's dtype, if that holds the products."""
    with np.errstate(invalid="ignore", over="ignore"):  # infinities of either sign
        whole = np.isfinite(tile.sum(axis=1))
    if not whole.all():
        tile = tile[np.isfinite(tile).all(axis=1)]
    complete[output] += len(tile)
    largest = max(np.abs(tile.max(initial=0)), np.abs(tile.min(initial=0)))
    if largest and not SAFE[0] < largest < SAFE[1]:
        tile = tile.astype(np.float64)
    return tile.T @ tile


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
