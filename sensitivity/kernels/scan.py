"""Recurrent models: one walk back through time for all outputs at once.

The model is one causal cell. With z_s the states of all its recurrent layers after step s, x_s the window's step:

    z_s = f(z_{s-1}, x_s)        y_t = g(z_t, x_t)

so y_t depends on x_s only through the states between, and by the chain rule, for s < t,

    ∂y_t/∂x_s = ∂g/∂z_t · J_t · J_{t-1} ··· J_{s+1} · ∂f/∂x_s,        J_r = ∂f/∂z_{r-1} at step r.

The adjoints a_{t,s} = ∂y_t/∂z_s are built from the left, a_{t,t} = ∂g/∂z_t and a_{t,s-1} = a_{t,s}·J_s: every row t is
pulled back through the same step s, and gives ∂y_t/∂x_s on the way. So

1. run forward once over all steps, layer by layer, and keep the states and what pulling back needs (`cells`);
2. differentiate g at all steps at once: a row's seeds;
3. walk from the last step to the first with all rows side by side; row t is seeded as the walk passes t, so that nothing
   is ever computed above the diagonal. The set of rows grows in a few segments, of static shapes.

Cost: with U units and n = T·O rows (O outputs a step), T·n/2 row-steps of 4·U·(U + I) multiplications and additions
for an LSTM of I inputs (2·U·(U + I) for a GRU), plus, a step, matrices that cost about as much as ten rows; the tape
takes 16·U·(U + I) for each of T·n, and its lists beside. Memory: the states of T steps, the adjoints of one, the result.
With one output a window (a head after the last step) all rows are seeded there, and the walk is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from ..cells import over_rows
from ..model import CallFacts, Target
from ..recurrence import WINDOW, Call, Recurrence, evaluate, recurrence
from ..setting import Setting

SEGMENTS = 8  # of the walk in which rows are added: more of them waste less work, and compile longer
_ZERO = tf.UnconnectedGradients.ZERO


def why_not(facts: CallFacts, *, pfor: bool, xla: bool) -> str | None:
    return None if facts.scan else facts.no_scan


def build(target: Target, setting: Setting):
    facts = target.facts
    model = recurrence(target.model, facts.input_shape, target.of)

    def scan(windows: tf.Tensor, first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        passed = _forward(model, windows)
        rows = setting.outputs_per_call or facts.target_size
        prediction = model.read(passed.values)
        block = (_every_step if model.is_sequence else _last_step)(model, passed, first, rows)
        shape = (setting.windows_per_call, rows, *facts.input_shape)
        return tf.reshape(prediction, (-1, *facts.target_shape)), tf.reshape(block, shape)

    return scan


# ---- forward -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Passed:
    """A forward pass. values: (B, T, …) by number. traces: of each recurrent call's cells, with the cells."""

    values: dict[int, tf.Tensor]
    traces: dict[Call, list[tuple[Any, Any]]]

    @property
    def steps(self) -> int:
        return self.values[WINDOW].shape[1]

    @property
    def batch(self) -> int:
        return self.values[WINDOW].shape[0]


def _forward(model: Recurrence, windows: tf.Tensor) -> _Passed:
    passed = _Passed({WINDOW: windows}, {})
    for call in model.calls:
        if not call.is_recurrent:
            evaluate([call], passed.values)
            continue
        sequence, traced = passed.values[call.inputs[0]], []
        for cell in model.cells[call]:
            sequence, trace = cell.run(sequence)
            traced.append((cell, trace))
        passed.values[call.outputs[0]] = sequence
        passed.traces[call] = traced
    return passed


# ---- seeds -------------------------------------------------------------------------------------------


def _seeds_of_every_step(model: Recurrence, passed: _Passed) -> dict[int, tf.Tensor]:
    """∂y_t by the sources at t, of all steps at once: (T, B, O, width) each."""
    batch, steps = passed.batch, passed.steps
    alone = {v: tf.reshape(passed.values[v], (batch * steps, 1, *passed.values[v].shape[2:])) for v in model.sources}
    found = _derivatives(model, alone)
    return {
        value: tf.transpose(tf.reshape(seed, (batch, steps, *seed.shape[1:])), (1, 0, 2, 3))
        for value, seed in found.items()
    }


def _derivatives(model: Recurrence, sources: dict[int, tf.Tensor]) -> dict[int, tf.Tensor]:
    """∂ outputs / ∂ sources (N, 1, …), each sample alone: (N, outputs, width)"""
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(sources)
        outputs = model.read(sources)
        outputs = tf.reshape(outputs, (outputs.shape[0], -1))
    found = {v: tape.batch_jacobian(outputs, source, unconnected_gradients=_ZERO) for v, source in sources.items()}
    return {value: tf.reshape(seed, (*outputs.shape, -1)) for value, seed in found.items()}


# ---- backward ----------------------------------------------------------------------------------------


def _pulled_back(
    model: Recurrence, passed: _Passed, s: tf.Tensor, seeds: dict[int, tf.Tensor], adjoints: list[list[tf.Tensor]]
) -> tuple[list[list[tf.Tensor]], tf.Tensor | None]:
    """One step back for R rows.

    seeds: (B, R, width) by value, what enters at this step. adjoints: (B, R, width) of each cell's states after it.
    Returns those before it, and the adjoint of the window's step (B, R, features).
    """
    reached = dict(seeds)
    before: list[list[tf.Tensor]] = []
    left = list(adjoints)
    for call in reversed(model.inner):
        if call.is_recurrent:
            adjoint = reached.pop(call.outputs[0], None)
            for cell, trace in reversed(passed.traces[call]):
                at = tf.nest.map_structure(lambda part: None if part is None else part[s], trace)
                states, adjoint = cell.pull(at, adjoint, left.pop())
                before.insert(0, states)
            pulled = [adjoint]
        else:
            inputs = [_at(passed.values[value], s) for value in call.inputs]
            pulled = _pulled_through(call, inputs, [reached.pop(value, None) for value in call.outputs])
        for value, adjoint in zip(call.inputs, pulled, strict=True):
            reached[value] = reached[value] + adjoint if value in reached else adjoint
    return before, reached[WINDOW]


def _at(sequence: tf.Tensor, s: tf.Tensor) -> tf.Tensor:
    """(B, T, …) → (B, 1, …), a shape that a slice of Python's would leave open"""
    batch, _, *rest = sequence.shape
    return tf.slice(sequence, [0, s, *(0 for _ in rest)], [batch, 1, *rest])


def _pulled_through(call: Call, inputs: list[tf.Tensor], adjoints: list[tf.Tensor | None]) -> list[tf.Tensor]:
    """Adjoints (B, R, width) of a call's outputs at one step → of its inputs (B, 1, …) there."""
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(inputs)
        outputs = call(*inputs)
    reached = [(output, adjoint) for output, adjoint in zip(outputs, adjoints, strict=True) if adjoint is not None]

    def one_row(rows: list[tf.Tensor]) -> list[tf.Tensor]:
        shaped = [tf.reshape(row, output.shape) for row, (output, _) in zip(rows, reached, strict=True)]
        found = tape.gradient([output for output, _ in reached], inputs, shaped, unconnected_gradients=_ZERO)
        return [tf.reshape(part, (part.shape[0], -1)) for part in found]

    return over_rows(one_row, [adjoint for _, adjoint in reached])


def _no_adjoints(model: Recurrence, passed: _Passed, rows: int) -> list[list[tf.Tensor]]:
    """Zeros for each cell's states, in order."""
    dtype = passed.values[WINDOW].dtype
    every = [cell for cells in model.cells.values() for cell in cells]
    return [[tf.zeros((passed.batch, rows, width), dtype) for width in cell.widths] for cell in every]


def _emitted(passed: _Passed, rows: int) -> tf.TensorArray:
    """What the walk gives, step by step: adjoints of the window's steps (B, R, features)."""
    window = passed.values[WINDOW]
    features = window.shape[2:].num_elements()
    return tf.TensorArray(window.dtype, passed.steps, element_shape=(passed.batch, rows, features))


def _last_step(model: Recurrence, passed: _Passed, first: tf.Tensor, rows: int) -> tf.Tensor:
    """A head after the last step: all rows begin there. (B, R, T, features)"""
    last = passed.steps - 1
    every = _derivatives(model, {v: passed.values[v][:, -1:] for v in model.sources})
    seeds = {v: tf.slice(seed, [0, first, 0], [passed.batch, rows, seed.shape[2]]) for v, seed in every.items()}
    adjoints, by_step = _pulled_back(model, passed, last, seeds, _no_adjoints(model, passed, rows))

    def step(s, adjoints, emitted):
        adjoints, by_step = _pulled_back(model, passed, s, {}, adjoints)
        return s - 1, adjoints, emitted.write(s, by_step)

    begin = (tf.constant(last - 1), adjoints, _emitted(passed, rows).write(last, by_step))
    *_, emitted = tf.while_loop(lambda s, *_: s >= 0, step, begin, parallel_iterations=1, maximum_iterations=last)
    return tf.transpose(emitted.stack(), (1, 2, 0, 3))


def _every_step(model: Recurrence, passed: _Passed, first: tf.Tensor, rows: int) -> tf.Tensor:
    """An output at every step: rows of the steps from that of output `first` on. (B, R, T, features)

    They are added segment by segment, in front, as the walk comes to their steps; below the first of them, none is.
    """
    seeds = _seeds_of_every_step(model, passed)
    outputs = next(iter(seeds.values())).shape[2]
    count = rows // outputs
    first = first // outputs
    adjoints, emitted, above = _no_adjoints(model, passed, 0), _emitted(passed, rows), count
    for segment in reversed(range(min(SEGMENTS, count))):
        below = count * segment // min(SEGMENTS, count)
        new = _no_adjoints(model, passed, (above - below) * outputs)
        adjoints = [
            [tf.concat(pair, 1) for pair in zip(*cell, strict=True)] for cell in zip(new, adjoints, strict=True)
        ]
        growing = _growing(model, passed, seeds, first + tf.range(below, count), rows)
        adjoints, emitted = _walked(growing, first + above - 1, first + below, adjoints, emitted)
        above = below
    if count < passed.steps:

        def back(s, adjoints):
            return _pulled_back(model, passed, s, {}, adjoints)

        adjoints, emitted = _walked(back, first - 1, 0, adjoints, emitted)
    return tf.transpose(emitted.stack(), (1, 2, 0, 3))


def _walked(back, high, low, adjoints, emitted):
    """`back` from step `high` down to step `low`."""

    def step(s, adjoints, emitted):
        adjoints, by_step = back(s, adjoints)
        return s - 1, adjoints, emitted.write(s, by_step)

    begin = (tf.convert_to_tensor(high), adjoints, emitted)
    _, adjoints, emitted = tf.while_loop(lambda s, *_: s >= low, step, begin, parallel_iterations=1)
    return adjoints, emitted


def _growing(model: Recurrence, passed: _Passed, seeds: dict[int, tf.Tensor], steps: tf.Tensor, rows: int):
    """One step back in a segment with the rows of `steps`, those beyond the walk's step being zero as yet."""

    def masked(condition: tf.Tensor, part: tf.Tensor, outputs: int) -> tf.Tensor:
        """Zero but in the rows of the steps where the condition holds."""
        shaped = tf.reshape(part, (part.shape[0], -1, outputs, part.shape[-1]))
        kept = tf.where(condition[:, None, None], shaped, tf.zeros((), part.dtype))
        return tf.reshape(kept, (part.shape[0], -1, part.shape[-1]))

    def back(s, adjoints):
        outputs = next(iter(seeds.values())).shape[2]
        entering = {value: masked(steps == s, seed[s], outputs) for value, seed in seeds.items()}
        adjoints, by_step = _pulled_back(model, passed, s, entering, adjoints)
        alive = steps >= s
        adjoints = [[masked(alive, part, outputs) for part in cell] for cell in adjoints]
        by_step = masked(alive, by_step, outputs)
        return adjoints, tf.pad(by_step, [[0, 0], [rows - by_step.shape[1], 0], [0, 0]])

    return back
