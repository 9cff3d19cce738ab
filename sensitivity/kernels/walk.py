"""One pass forward through a recurrence, and the walk back through it, step by step, for many rows at once.

Shapes: B samples (windows, or spans of steps of windows), T steps, O outputs a step, R rows of adjoints. A row belongs
to an output, and has one adjoint for each state of each cell: `(B, R, width)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from ..calls import WINDOW, Call, evaluate
from ..cells import over_rows
from ..recurrence import Recurrence
from ..walks import MATRICES

# Rows are added in segments of a walk: n rows in k segments cost n/2k rows a step too many, and k compilations of all
# calls that a step is pulled back through.
WASTE = 0.1  # of a step's work, that is worth no further segment
MOST_SEGMENTS, MOST_CALLS = 8, 24  # segments; segments × calls
Adjoints = list[list[tf.Tensor]]  # of each cell, of each of its states
Back = Callable[[tf.Tensor, Adjoints], tuple[Adjoints, tf.Tensor]]


@dataclass(frozen=True)
class Passed:
    """A forward pass: values (B, T, …) by number, and the traces (T, B, …) of the cells, call by call.

    held: values that do not depend on the source (B, …).
    spans: the first steps (N) of N spans of `length` steps of it, which may overlap and lie beyond its ends, where
    nothing that is derived means anything. They are its samples then, span by span, (N·B, …). None: the whole.
    """

    model: Recurrence
    values: dict[int, tf.Tensor]
    traces: dict[Call, list[Any]]
    held: dict[int, tf.Tensor]
    spans: tf.Tensor | None = None
    length: int = 0

    @property
    def batch(self) -> int:
        windows = self.values[WINDOW].shape[0]
        return windows if self.spans is None else windows * self.spans.shape[0]

    @property
    def steps(self) -> int:
        return self.values[WINDOW].shape[1] if self.spans is None else self.length

    @property
    def dtype(self) -> tf.DType:
        return self.values[WINDOW].dtype

    @property
    def features(self) -> int:
        return self.values[WINDOW].shape[2:].num_elements()

    @property
    def widths(self) -> list[tuple[int, ...]]:
        """Of the states of each cell, in the order of calls."""
        return [cell.widths for cells in self.model.cells.values() for cell in cells]

    def trace_at(self, trace: Any, s: tf.Tensor) -> Any:
        """The trace of a cell at one step: (samples, …)"""
        if self.spans is None:
            return tf.nest.map_structure(lambda part: part[s], trace)
        steps = self.inside(self.spans + s)
        return tf.nest.map_structure(lambda part: _merged(tf.gather(part, steps)), trace)

    def value_at(self, value: int, s: tf.Tensor) -> tf.Tensor:
        """A sequence at one step: (samples, 1, …), a shape that a slice of Python's would leave open."""
        sequence = self.values[value]
        batch, _, *rest = sequence.shape
        if self.spans is None:
            return tf.slice(sequence, [0, s, *(0 for _ in rest)], [batch, 1, *rest])
        found = tf.gather(sequence, self.inside(self.spans + s), axis=1)
        order = (1, 0, *range(2, len(found.shape)))
        return tf.reshape(tf.transpose(found, order), (self.batch, 1, *rest))

    def inside(self, steps: tf.Tensor) -> tf.Tensor:
        """Steps beyond the ends as the nearest that there is."""
        return tf.clip_by_value(steps, 0, self.values[WINDOW].shape[1] - 1)


def _merged(part: tf.Tensor) -> tf.Tensor:
    """(N, B, …) → (N·B, …)"""
    return tf.reshape(part, (-1, *part.shape[2:]))


def forward(model: Recurrence, source: tf.Tensor, held: dict[int, tf.Tensor]) -> Passed:
    """All steps of one layer, then all of the next."""
    passed = Passed(model, {WINDOW: source} | {value: held[value] for value in model.beside}, {}, held)
    for call in model.calls:
        if not call.has_state:
            evaluate([call], passed.values)
            continue
        sequence, traces = passed.values[call.inputs[0]], []
        for cell in model.cells[call]:
            sequence, trace = cell.run(sequence)
            traces.append(trace)
        passed.values[call.outputs[0]] = sequence
        passed.traces[call] = traces
    return passed


def pulled_back(
    passed: Passed, s: tf.Tensor, seeds: dict[int, tf.Tensor], adjoints: Adjoints
) -> tuple[Adjoints, tf.Tensor]:
    """One step back.

    seeds: (B, R, width) by value, what enters at this step. adjoints: of the states after it. Returns those of the
    states before it, and of the window's step (B, R, features).
    """
    reached, left = dict(seeds), list(adjoints)
    before: Adjoints = []
    for call in reversed(passed.model.inner):
        if call.has_state:
            adjoint = reached.pop(call.outputs[0], None)
            for cell, trace in zip(reversed(passed.model.cells[call]), reversed(passed.traces[call]), strict=True):
                states, adjoint = cell.pull(passed.trace_at(trace, s), adjoint, left.pop())
                before.insert(0, states)
            pulled = [adjoint]
        else:
            inputs = [passed.value_at(value, s) for value in call.inputs]
            pulled = _pulled_through(call, inputs, [reached.pop(value, None) for value in call.outputs])
        for value, adjoint in zip(call.inputs, pulled, strict=True):
            reached[value] = reached[value] + adjoint if value in reached else adjoint
    return before, reached[WINDOW]


def _pulled_through(call: Call, inputs: list[tf.Tensor], adjoints: list[tf.Tensor | None]) -> list[tf.Tensor]:
    """Adjoints (B, R, width) of a call's outputs at one step → of its inputs (B, 1, …) there, None being zero."""
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(inputs)
        outputs = call(*inputs)
    reached = [(output, adjoint) for output, adjoint in zip(outputs, adjoints, strict=True) if adjoint is not None]

    def one_row(rows: list[tf.Tensor]) -> list[tf.Tensor]:
        shaped = [tf.reshape(row, output.shape) for row, (output, _) in zip(rows, reached, strict=True)]
        zero = tf.UnconnectedGradients.ZERO
        found = tape.gradient([output for output, _ in reached], inputs, shaped, unconnected_gradients=zero)
        return [tf.reshape(part, (part.shape[0], -1)) for part in found]

    return over_rows(one_row, [adjoint for _, adjoint in reached])


# ---- the walk ----------------------------------------------------------------------------------------


def no_adjoints(passed: Passed, rows: int) -> Adjoints:
    return [[tf.zeros((passed.batch, rows, width), passed.dtype) for width in cell] for cell in passed.widths]


def emission(passed: Passed, rows: int, steps: int) -> tf.TensorArray:
    """What a walk gives, step by step: the adjoints of the window's steps (B, R, features); zeros where it was not."""
    return tf.TensorArray(passed.dtype, steps, element_shape=(passed.batch, rows, passed.features))


def walked(
    back: Back, high: Any, low: Any, adjoints: Adjoints, emitted: tf.TensorArray, oldest: int = 0
) -> tuple[Adjoints, tf.TensorArray]:
    """From step `high` down to step `low`. oldest: the step whose adjoints come first in what is emitted."""

    def step(s: tf.Tensor, adjoints: Adjoints, emitted: tf.TensorArray) -> tuple[Any, ...]:
        adjoints, by_step = back(s, adjoints)
        return s - 1, adjoints, emitted.write(s - oldest, by_step)

    begin = (tf.convert_to_tensor(high), adjoints, emitted)
    _, adjoints, emitted = tf.while_loop(lambda s, *_: s >= low, step, begin, parallel_iterations=1)
    return adjoints, emitted


def climbed_down(
    passed: Passed,
    seeds: dict[int, tf.Tensor],
    steps: Sequence[int] | tf.Tensor,
    adjoints: Adjoints,
) -> tuple[Adjoints, tf.TensorArray]:
    """A walk from the last of `steps` to the first of all, which takes up the rows of `steps` as it comes to them.

    seeds: (n, B, O, width) by value, of each of the `steps` (n), rising; their rows are added segment by segment, in
    front of those that `adjoints` begins with. Returns the adjoints before the first step, and the emission.
    """
    outputs, begun = next(iter(seeds.values())).shape[2], adjoints[0][0].shape[1]
    begins_at_0 = not tf.is_tensor(steps) and steps[0] == 0
    steps = tf.convert_to_tensor(steps)
    count = steps.shape[0]
    rows = count * outputs + begun
    emitted = emission(passed, rows, passed.steps)
    high, above = passed.steps - 1 if begun else steps[-1], count
    segments = _segments(count, outputs, begun, len(passed.model.inner))
    for segment in reversed(range(segments)):
        below = count * segment // segments
        new = no_adjoints(passed, (above - below) * outputs)
        adjoints = [_in_front(*cells) for cells in zip(new, adjoints, strict=True)]
        of_rows = tf.concat([tf.repeat(steps[below:], outputs), tf.fill([begun], passed.steps)], 0)
        of_rows = tf.ensure_shape(of_rows, [(count - below) * outputs + begun])
        back = _growing(passed, seeds, steps, of_rows, rows)
        adjoints, emitted = walked(back, high, steps[below], adjoints, emitted)
        high, above = steps[below] - 1, below
    if begins_at_0:
        return adjoints, emitted
    return walked(lambda s, adjoints: pulled_back(passed, s, {}, adjoints), high, 0, adjoints, emitted)


def _segments(count: int, outputs: int, begun: int, calls: int) -> int:
    """How many there are, in which the rows of `count` steps are added beside those that have begun."""
    added = count * outputs / 2
    wanted = math.ceil(added / (WASTE * (begun + added + MATRICES)))
    return max(1, min(wanted, count, MOST_SEGMENTS, max(3, MOST_CALLS // calls)))


def _in_front(new: list[tf.Tensor], old: list[tf.Tensor]) -> list[tf.Tensor]:
    return [tf.concat(pair, 1) for pair in zip(new, old, strict=True)]


def _growing(passed: Passed, seeds: dict[int, tf.Tensor], steps: tf.Tensor, of_rows: tf.Tensor, rows: int) -> Back:
    """One step back with rows of the steps `of_rows` (R), zero until the walk comes to them; emitting `rows` rows.

    seeds: (n, B, O, width) by value, of the `steps` (n).
    """

    def only(condition: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
        return tf.where(condition[:, None], part, tf.zeros((), part.dtype))

    def entering(seed: tf.Tensor, s: tf.Tensor) -> tf.Tensor:
        """(B, O, width) → (B, R, width), in the rows of step s alone"""
        repeats = -(-of_rows.shape[0] // seed.shape[1])
        return only(of_rows == s, tf.tile(seed, [1, repeats, 1])[:, : of_rows.shape[0]])

    def back(s: tf.Tensor, adjoints: Adjoints) -> tuple[Adjoints, tf.Tensor]:
        number = tf.minimum(tf.reduce_sum(tf.cast(steps < s, "int32")), steps.shape[0] - 1)
        seeded = {value: entering(seed[number], s) for value, seed in seeds.items()}
        adjoints, by_step = pulled_back(passed, s, seeded, adjoints)
        alive = of_rows >= s
        adjoints = [[only(alive, part) for part in cell] for cell in adjoints]
        return adjoints, tf.pad(only(alive, by_step), [[0, 0], [rows - of_rows.shape[0], 0], [0, 0]])

    return back
