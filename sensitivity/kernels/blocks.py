"""Long sequences: parts of them are walked back side by side, as samples of a batch.

*Blocks.* In one walk every row is pulled back through every step before it, T·O/2 rows a step on average. But the rows
pass from block to block through the S states alone: for an output t of block I and a step s of an earlier block J,

    ∂y_t/∂x_s = P_t · Φ_{I-1} ··· Φ_{J+1} · Q_s        P_t = ∂y_t/∂z before I   (O, S)
                                                       Φ_K = ∂z after K/∂z before K   (S, S)
                                                       Q_s = ∂z after J/∂x_s   (S, features)

All three come from one walk over each block, in which S rows for the states after it begin beside its outputs' rows.
That is S + n·O/2 rows a step for blocks of n steps, whatever T is, and matrix products of n·O·S·(S + n·F)
multiplications for every pair of blocks. Outputs that see only the last `lags` steps need only the nearest blocks.

*Spans.* Where these are fewer than the states, n steps' outputs are walked back with the lags - 1 steps before them,
which the next span has too: (lags + n/2)·n·O row-steps for n steps, and none for states.

Shapes: B windows, N blocks or spans of n output steps each, which are N·B samples of a walk, O outputs a step, S
numbers in all states of all cells, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from .walk import Adjoints, Passed, climbed_down, no_adjoints

Seeds = Callable[[tf.Tensor], dict[int, tf.Tensor]]  # of steps (N, n): (n, N·B, O, width) by value


@dataclass(frozen=True)
class _Blocks:
    """own: outputs by their own block's window (N, B, n·O, n·F). before: outputs by the states before their block
    (N, B, n·O, S). across: states after a block by those before it (N, B, S, S). into: by its window (N, B, S, n·F).
    """

    own: tf.Tensor
    before: tf.Tensor
    across: tf.Tensor
    into: tf.Tensor


def all_lags(passed: Passed, seeds: Seeds, length: int, count: int, wanted: Sequence[int]) -> tf.Tensor:
    """Outputs by every step, those of the steps `wanted`, rising: (B, outputs, T, features)."""
    blocks = _walked_in_blocks(passed, seeds, length * tf.range(count), length)
    outputs = blocks.own.shape[2] // length
    later, columns, above = blocks.before[0, :, :0], [], len(wanted) * outputs
    for block in reversed(range(count)):
        rows = [(step - block * length) * outputs + i for step in wanted for i in range(outputs)]
        rows = [row for row in rows if 0 <= row < length * outputs]
        own, before = (_rows(part[block], rows) for part in (blocks.own, blocks.before))
        above -= len(rows)
        column = tf.concat([own, later @ blocks.into[block]], 1)
        columns.append(tf.pad(column, [[0, 0], [above, 0], [0, 0]]))
        later = tf.concat([before, later @ blocks.across[block]], 1)
    every = tf.stack(columns[::-1], 2)
    return tf.reshape(every, (*every.shape[:2], count * length, passed.features))[:, :, : passed.steps]


def _rows(part: tf.Tensor, rows: list[int]) -> tf.Tensor:
    return part if len(rows) == part.shape[1] else tf.gather(part, tf.constant(rows, "int32"), axis=1)


def last_lags_by_blocks(
    passed: Passed, seeds: Seeds, begin: tf.Tensor, length: int, count: int, lags: int
) -> tf.Tensor:
    """Outputs from step `begin` on by the last `lags` steps up to their own: (B, N·n, O, lags, features).

    Those of the first lags - 1 steps lack what is before `begin`.
    """
    blocks = _walked_in_blocks(passed, seeds, begin + length * tf.range(count), length)
    wanted = -(-(lags - 1) // length) + 1
    depth = min(count, wanted)
    later, near = blocks.before, [blocks.own]
    for distance in range(1, depth):
        later = later[1:]
        found = later @ blocks.into[: count - distance]
        near.append(tf.pad(found, [[distance, 0], [0, 0], [0, 0], [0, 0]]))
        later = later @ blocks.across[: count - distance]
    near += [tf.zeros_like(blocks.own)] * (wanted - depth)
    beside = tf.stack(near[::-1], 3)
    beside = tf.reshape(beside, (*beside.shape[:2], length, -1, wanted * length, passed.features))
    return _by_lag(tf.transpose(beside, (0, 1, 3, 5, 2, 4)), lags)


def last_lags_by_spans(passed: Passed, seeds: Seeds, firsts: tf.Tensor, length: int, lags: int) -> tf.Tensor:
    """Outputs of `length` steps from each of `firsts` (N) on by the last `lags` steps: (B, N·n, O, lags, features)."""
    spans = replace(passed, spans=firsts - (lags - 1), length=lags - 1 + length)
    found = seeds(firsts[:, None] + tf.range(length))
    _, emitted = climbed_down(spans, found, range(lags - 1, lags - 1 + length), no_adjoints(spans, 0))
    stacked = emitted.stack()
    apart = tf.reshape(stacked, (spans.steps, firsts.shape[0], -1, length, stacked.shape[2] // length, passed.features))
    return _by_lag(tf.transpose(apart, (1, 2, 4, 5, 3, 0)), lags)


def _by_lag(square: tf.Tensor, lags: int) -> tf.Tensor:
    """(N, B, O, F, n, W), steps up to a part's end → (B, N·n, O, lags, F), up to the output's own, oldest first"""
    count, batch, outputs, features, length, _ = square.shape
    turned = tf.transpose(_sheared(square, lags), (1, 0, 4, 2, 5, 3))
    return tf.reshape(turned, (batch, count * length, outputs, lags, features))


def _sheared(square: tf.Tensor, lags: int) -> tf.Tensor:
    """(…, n, W), steps up to a block's end by each of its n outputs → (…, n, lags), steps up to the output's own.

    Row i begins at column W - n + i + 1 - lags: one further from row to row, as in a matrix of W + 1 columns.
    """
    *rest, length, width = square.shape
    offset = width - length + 1 - lags
    flat = tf.reshape(square, (*rest, length * width))
    flat = tf.pad(flat, [*([0, 0] for _ in rest), [0, offset + length]])[..., offset : offset + length * (width + 1)]
    return tf.reshape(flat, (*rest, length, width + 1))[..., :lags]


def _walked_in_blocks(passed: Passed, seeds: Seeds, firsts: tf.Tensor, length: int) -> _Blocks:
    """Blocks of `length` steps that begin at `firsts` (N)."""
    blocks = replace(passed, spans=firsts, length=length)
    count, states = firsts.shape[0], sum(map(sum, passed.widths))
    found = seeds(firsts[:, None] + tf.range(length))
    adjoints, emitted = climbed_down(blocks, found, range(length), _identity(blocks, states))
    by_states = tf.concat([state for cell in adjoints for state in cell], -1)
    by_window = tf.transpose(emitted.stack(), (1, 2, 0, 3))
    rows = by_states.shape[1]
    by_states = tf.reshape(by_states, (count, -1, rows, states))
    by_window = tf.reshape(by_window, (count, -1, rows, length * passed.features))
    return _Blocks(
        own=by_window[:, :, :-states],
        before=by_states[:, :, :-states],
        across=by_states[:, :, -states:],
        into=by_window[:, :, -states:],
    )


def _identity(blocks: Passed, states: int) -> Adjoints:
    """A row for each number of the states, of which it is the derivative."""
    parts = iter(tf.split(tf.eye(states, dtype=blocks.dtype), [width for cell in blocks.widths for width in cell], 1))
    return [[tf.tile(next(parts)[None], (blocks.batch, 1, 1)) for _ in cell] for cell in blocks.widths]
