"""Long sequences: blocks of steps are walked back side by side, then joined by matrix products.

In one walk every row is pulled back through every step before it, T·O/2 rows a step on average. But the rows pass from
block to block through the S states alone: for an output t of block I and a step s of an earlier block J,

    ∂y_t/∂x_s = P_t · Φ_{I-1} ··· Φ_{J+1} · Q_s        P_t = ∂y_t/∂z before I   (O, S)
                                                       Φ_K = ∂z after K/∂z before K   (S, S)
                                                       Q_s = ∂z after J/∂x_s   (S, features)

All three come from one walk over each block, in which S rows for the states after it begin beside its outputs' rows.
The blocks do not depend on each other, so they are walked at the same time, as samples of a batch. That is S + n·O/2
rows a step for blocks of n steps, whatever T is, and matrix products of S·(S + n·features) for every pair of blocks.
Outputs that see only the last `lags` steps need only the nearest blocks.

Shapes: B windows, N blocks of n steps, O outputs a step, S numbers in all states of all cells.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from .walk import Adjoints, Passed, climbed_down


@dataclass(frozen=True)
class _Blocks:
    """own: outputs by their own block's window (B, N, n·O, n·F). before: outputs by the states before their block
    (B, N, n·O, S). across: states after a block by those before it (B, N, S, S). into: by its window (B, N, S, n·F).
    """

    own: tf.Tensor
    before: tf.Tensor
    across: tf.Tensor
    into: tf.Tensor

    @property
    def count(self) -> int:
        return self.own.shape[1]


def all_lags(passed: Passed, seeds: dict[int, tf.Tensor], length: int) -> tf.Tensor:
    """Every output by every step: (B, T·O, T, features). seeds: (T, B, O, width) by value."""
    blocks = _walked_in_blocks(passed, seeds, length)
    later, columns = blocks.before[:, :0, 0], []
    for block in reversed(range(blocks.count)):
        column = tf.concat([blocks.own[:, block], later @ blocks.into[:, block]], 1)
        columns.append(tf.pad(column, [[0, 0], [block * blocks.own.shape[2], 0], [0, 0]]))
        later = tf.concat([blocks.before[:, block], later @ blocks.across[:, block]], 1)
    outputs = blocks.own.shape[2] // length
    every = tf.reshape(tf.stack(columns[::-1], 2), (passed.batch, -1, blocks.count * length, passed.features))
    return every[:, : passed.steps * outputs, : passed.steps]


def some_lags(passed: Passed, seeds: dict[int, tf.Tensor], length: int, lags: int) -> tf.Tensor:
    """Every output by the last `lags` steps up to its own, oldest first, zero before the window: (B, T, O, lags, F)."""
    outputs, features = next(iter(seeds.values())).shape[2], passed.features
    blocks = _walked_in_blocks(passed, seeds, length)
    count, wanted = blocks.count, -(-(lags - 1) // length) + 1
    depth = min(count, wanted)
    later, near = blocks.before, [blocks.own]
    for distance in range(1, depth):
        later = later[:, 1:]
        found = later @ blocks.into[:, : count - distance]
        near.append(tf.pad(found, [[0, 0], [distance, 0], [0, 0], [0, 0]]))
        later = later @ blocks.across[:, : count - distance]
    near += [tf.zeros_like(blocks.own)] * (wanted - depth)
    beside = tf.reshape(tf.stack(near[::-1], 3), (passed.batch, count, length, outputs, -1, features))
    by_lag = _sheared(tf.transpose(beside, (0, 1, 3, 5, 2, 4)), lags)
    return tf.reshape(tf.transpose(by_lag, (0, 1, 4, 2, 5, 3)), (passed.batch, -1, outputs, lags, features))[
        :, : passed.steps
    ]


def reached(
    passed: Passed, seeds: dict[int, tf.Tensor], first: tf.Tensor, count: int, lags: int
) -> tuple[Passed, dict[int, tf.Tensor]]:
    """What `count` outputs from step `first` on see within `lags` lags: as many steps, and lags - 1 before them.

    Where those would be before the window they are zeros, and what is derived by them means nothing.
    """

    def cut(part: tf.Tensor, axis: int) -> tf.Tensor:
        before = [[0, 0] if i != axis else [lags - 1, 0] for i in range(len(part.shape))]
        sizes = [count + lags - 1 if i == axis else size for i, size in enumerate(part.shape)]
        return tf.slice(tf.pad(part, before), [first if i == axis else 0 for i in range(len(sizes))], sizes)

    def in_time(trace: Any) -> Any:
        return tf.nest.map_structure(lambda part: cut(part, 0), trace)

    values = {number: cut(value, 1) for number, value in passed.values.items()}
    traces = {call: [in_time(trace) for trace in traces] for call, traces in passed.traces.items()}
    return Passed(passed.model, values, traces), {value: cut(seed, 0) for value, seed in seeds.items()}


def _sheared(square: tf.Tensor, lags: int) -> tf.Tensor:
    """(…, n, W), steps up to a block's end by each of its n outputs → (…, n, lags), steps up to the output's own.

    Row i begins at column W - n + i + 1 - lags: one further from row to row, as in a matrix of W + 1 columns.
    """
    *rest, length, width = square.shape
    offset = width - length + 1 - lags
    flat = tf.reshape(square, (*rest, length * width))
    flat = tf.pad(flat, [*([0, 0] for _ in rest), [0, offset + length]])[..., offset : offset + length * (width + 1)]
    return tf.reshape(flat, (*rest, length, width + 1))[..., :lags]


def _walked_in_blocks(passed: Passed, seeds: dict[int, tf.Tensor], length: int) -> _Blocks:
    batch, count, states = passed.batch, -(-passed.steps // length), sum(map(sum, passed.widths))
    folded = _folded(passed, length)
    seeds = {value: _folded_time_first(seed, batch, length) for value, seed in seeds.items()}
    adjoints, emitted = climbed_down(folded, seeds, tf.range(length), _identity(folded, states))
    by_states = tf.concat([state for cell in adjoints for state in cell], -1)
    by_window = tf.transpose(emitted.stack(), (1, 2, 0, 3))
    by_states = tf.reshape(by_states, (batch, count, -1, states))
    by_window = tf.reshape(by_window, (batch, count, by_states.shape[2], length * passed.features))
    return _Blocks(
        own=by_window[:, :, :-states],
        before=by_states[:, :, :-states],
        across=by_states[:, :, -states:],
        into=by_window[:, :, -states:],
    )


def _identity(folded: Passed, states: int) -> Adjoints:
    """A row for each number of the states, of which it is the derivative."""
    parts = iter(tf.split(tf.eye(states, dtype=folded.dtype), [width for cell in folded.widths for width in cell], 1))
    return [[tf.tile(next(parts)[None], (folded.batch, 1, 1)) for _ in cell] for cell in folded.widths]


def _folded(passed: Passed, length: int) -> Passed:
    """The blocks as samples: values (B·N, n, …), traces (n, B·N, …); what is beyond the last step is zero."""

    def batch_first(value: tf.Tensor) -> tf.Tensor:
        _, steps, *rest = value.shape
        padded = tf.pad(value, [[0, 0], [0, -steps % length], *([0, 0] for _ in rest)])
        return tf.reshape(padded, (-1, length, *rest))

    values = {number: batch_first(value) for number, value in passed.values.items()}
    fold = functools.partial(_folded_time_first, batch=passed.batch, length=length)
    traces = {call: [tf.nest.map_structure(fold, t) for t in traces] for call, traces in passed.traces.items()}
    return Passed(passed.model, values, traces)


def _folded_time_first(part: tf.Tensor, batch: int, length: int) -> tf.Tensor:
    """(T, B, …) → (n, B·N, …)"""
    steps, _, *rest = part.shape
    padded = tf.pad(part, [[0, -steps % length], [0, 0], *([0, 0] for _ in rest)])
    apart = tf.reshape(padded, (-1, length, batch, *rest))
    order = (1, 2, 0, *range(3, len(apart.shape)))
    return tf.reshape(tf.transpose(apart, order), (length, -1, *rest))
