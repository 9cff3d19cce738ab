"""Cells, recurrent ones and causal convolutions, run forward over all steps and pulled back one step at a time.

A cell is run once, which gives its outputs and a trace: what `pull` needs of each step, time first. `pull` is the
vector-Jacobian product of one step for many rows at once. Shapes: T steps, B windows, R rows of adjoints, I inputs of
the cell, U units.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from .layers import keras
from .tracing import numbers_of
from .walks import FEW_ROWS

_ZERO = tf.UnconnectedGradients.ZERO


class Cell(Protocol):
    """widths: of the states. output_width: U. saved: numbers a step that running keeps, beside inputs and outputs.
    matrices: numbers of those that are formed at each step to pull many rows back. work: numbers that a step computes
    on the way, and a row in pulling it back.
    """

    widths: tuple[int, ...]
    output_width: int
    saved: int
    matrices: int
    work: int

    def run(self, inputs: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """inputs (B, T, I) → outputs (B, T, U), and the trace: tensors (T, B, …) in any structure."""
        ...

    def pull(self, at: Any, output: tf.Tensor | None, states: list[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Adjoints of one step's output (B, R, U) and states after it → of the states before it, and of its input.

        at: the trace at this step. output: None where nothing but the states is reached from later on.
        """
        ...


def cells_of(layer: keras.Layer, inputs: int) -> list[Cell]:
    """The cells of a recurrent layer, those of `StackedRNNCells` one after another; of a convolution itself.

    inputs: numbers that it takes a step.
    """
    if isinstance(layer, keras.layers.Conv1D):
        return [Delayed(layer)]
    stacked = isinstance(layer.cell, keras.layers.StackedRNNCells)
    cells = layer.cell.cells if stacked else [layer.cell]

    def initial(index: int) -> Callable[[int], list[tf.Tensor]]:
        def states(batch: int) -> list[tf.Tensor]:
            every = layer.get_initial_state(batch_size=batch)
            return [tf.cast(s, cell.compute_dtype) for s in keras.tree.flatten(every[index] if stacked else every)]

        cell = cells[index]
        return states

    found: list[Cell] = []
    for index, cell in enumerate(cells):
        found.append(Gated(cell, initial(index)) if is_gated(cell) else AnyCell(cell, initial(index), inputs))
        inputs = found[-1].output_width
    return found


# ---- cells whose units see each other through one matrix only ----------------------------------------


def _lstm(cell: Any, gates: list[tf.Tensor], states: list[tf.Tensor]) -> list[tf.Tensor]:
    i, f, c, o = gates
    carry = cell.recurrent_activation(f) * states[1] + cell.recurrent_activation(i) * cell.activation(c)
    return [cell.recurrent_activation(o) * cell.activation(carry), carry]


def _gru(cell: Any, gates: list[tf.Tensor], states: list[tf.Tensor]) -> list[tf.Tensor]:
    z, r, of_input, of_state = gates
    z, r = cell.recurrent_activation(z), cell.recurrent_activation(r)
    return [z * states[0] + (1 - z) * cell.activation(of_input + r * of_state)]


def _simple(cell: Any, gates: list[tf.Tensor], states: list[tf.Tensor]) -> list[tf.Tensor]:
    return [cell.activation(gates[0])]


_GATED: dict[type, tuple[int, Callable[..., list[tf.Tensor]]]] = {
    keras.layers.LSTMCell: (4, _lstm),
    keras.layers.GRUCell: (4, _gru),
    keras.layers.SimpleRNNCell: (1, _simple),
}


def is_gated(cell: Any) -> bool:
    """Whether a step is φ(W·x + R·h + b, states) with a φ that treats each unit alone."""
    if type(cell) not in _GATED or not getattr(cell, "reset_after", True):
        return False
    names = ("activation", "recurrent_activation")
    return all(_is_unitwise(getattr(cell, name, None), cell.units, cell.compute_dtype) for name in names)


def _is_unitwise(activation: Any, units: int, dtype: str) -> bool:
    """Whether each number is mapped alone: a softmax is not, nor is an activation with weights of its own.

    Tried by moving each unit in turn, for small numbers and for large ones. One that has no derivative at all, such as
    a rounding, does not count either.
    """
    if activation is None or isinstance(activation, keras.Layer):
        return activation is None
    numbers = tf.linspace(tf.constant(-2.1, dtype), 1.7, units)[None]
    others = ~tf.eye(units, dtype="bool")
    try:
        for scale in (1.0, 1e3):
            with tf.GradientTape() as tape:
                tape.watch(numbers)
                found = activation(scale * numbers)
            moved = activation(scale * (numbers + tf.eye(units, dtype=dtype)))
            same = np.isclose(moved, found, rtol=1e-5, atol=1e-6, equal_nan=True)
            if not same[others.numpy()].all() or tape.gradient(found, numbers) is None:
                return False
    except Exception:  # whatever a user's function raises: its cell is differentiated as a whole
        return False
    return True


class Gated:
    """LSTM, GRU (`reset_after`), SimpleRNN: new states = φ(W·x + R·h + b, states), where φ treats each unit alone.

    So the derivative of state i by h is Σ_g diag(∂φ_i/∂gate_g)·R_gᵀ + diag(∂φ_i/∂h): one matrix (U, U) a step and
    window, whose diagonals are φ's own automatic derivatives.
    """

    def __init__(self, cell: Any, initial: Callable[[int], list[tf.Tensor]]) -> None:
        self._cell, self._initial = cell, initial
        self._gate_count, self._unit = _GATED[type(cell)]
        self.output_width = cell.units
        self.widths = (cell.units,) * (2 if type(cell) is keras.layers.LSTMCell else 1)
        self.saved = cell.units * (self._gate_count + len(self.widths))
        self.matrices = sum(self.widths) * (cell.kernel.shape[0] + cell.units)
        self.work = 0  # a few units' worth

    def run(self, inputs: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """In Keras' own order of adding: without XLA the outputs round as the model's, so kinks are passed alike."""
        batch, steps, _ = inputs.shape
        kernel, recurrent = tf.convert_to_tensor(self._cell.kernel), tf.convert_to_tensor(self._cell.recurrent_kernel)
        with_input, with_state, afterwards = self._biases()
        inputs = tf.transpose(inputs, (1, 0, 2))

        def step(s: tf.Tensor, carried: list[tf.Tensor]) -> list[tf.Tensor]:
            _, *states = carried
            by_input = _sum([tf.matmul(inputs[s], kernel), with_input])
            by_state = _sum([tf.matmul(states[0], recurrent), with_state])
            gates = _sum([self._gates(by_input, by_state), afterwards])
            return [gates, *self._unit(self._cell, self._split(gates), states)]

        nothing = tf.zeros((batch, self._gate_count * self.output_width), inputs.dtype)
        gates, *history = _loop(step, [nothing, *self._initial(batch)], steps)
        return tf.transpose(history[0][1:], (1, 0, 2)), (gates[1:], [states[:-1] for states in history])

    def pull(self, at: Any, output: tf.Tensor | None, states: list[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
        if output is not None:
            states = [states[0] + output, *states[1:]]
        rows = states[0].shape[1]
        if rows >= FEW_ROWS:
            return self._by_matrices(at, states)
        gates, before = (self._one_row if rows == 1 else self._few_rows)(at, states)
        hidden, inputs = self._through_weights(gates)
        return [_sum([hidden, before[0]]), *before[1:]], inputs

    def _by_matrices(self, at: Any, states: list[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Many rows: Σ_i a_i · M_iᵀ, for which matrices M_i (B, U + I, U) are formed."""
        by_gate, by_state = self._diagonals(at)
        weights = self._split(self._weights())
        terms = []
        for adjoint, diagonals in zip(states, zip(*by_gate, strict=True), strict=True):
            matrix = _sum(None if d is None else w * d[:, None] for w, d in zip(weights, diagonals, strict=True))
            terms.append(tf.matmul(adjoint, matrix, transpose_b=True))
        both, before = _sum(terms), [_weighted(states, diagonals) for diagonals in by_state]
        hidden, inputs = both[..., : self.output_width], both[..., self.output_width :]
        return [_sum([hidden, before[0]]), *before[1:]], inputs

    def _few_rows(self, at: Any, states: list[tf.Tensor]) -> tuple[list[Any], list[Any]]:
        """The adjoints (B, R, U) of the gates, and those of the states before the step beside what the gates give."""
        by_gate, by_state = self._diagonals(at)
        return [_weighted(states, d) for d in by_gate], [_weighted(states, d) for d in by_state]

    def _one_row(self, at: Any, states: list[tf.Tensor]) -> tuple[list[Any], list[Any]]:
        """The same by one vector-Jacobian product of φ: no diagonals, each of which would be one itself."""
        given, after, tape = self._taped(at)
        found = tape.gradient(after, given, [tf.squeeze(adjoint, 1) for adjoint in states])
        gates, before = ([None if a is None else a[:, None] for a in part] for part in found)
        return gates, before

    def _diagonals(self, at: Any) -> tuple[list[Any], list[Any]]:
        """φ's (B, U), of each new state, by gate and by state before the step; None where it does not depend on it."""
        given, after, tape = self._taped(at)
        by_gate, by_state = zip(*(tape.gradient(state, given) for state in after), strict=True)
        return list(zip(*by_gate, strict=True)), list(zip(*by_state, strict=True))

    def _taped(self, at: Any) -> tuple[Any, list[tf.Tensor], tf.GradientTape]:
        gates, before = at
        given = (self._split(gates), before)
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(given)
            after = self._unit(self._cell, *given)
        return given, after, tape

    def _through_weights(self, gates: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """The gates' adjoints, times the weights that all windows share: of h (B, R, U), of x (B, R, I)."""
        batch, rows, units = gates[0].shape
        flat = tf.reshape(tf.concat(gates, -1), (batch * rows, -1))
        both = tf.reshape(tf.matmul(flat, self._weights(), transpose_b=True), (batch, rows, -1))
        return both[..., :units], both[..., units:]

    def _weights(self) -> tf.Tensor:
        """R over W (U + I, G·U)."""
        kernel, recurrent = tf.convert_to_tensor(self._cell.kernel), tf.convert_to_tensor(self._cell.recurrent_kernel)
        return tf.concat([self._gates(None, recurrent), self._gates(kernel, None)], 0)

    def _gates(self, by_input: tf.Tensor | None, by_state: tf.Tensor | None) -> tf.Tensor:
        """The gates that W·x and R·h (…, columns) add up to, None being zero: (…, G·U).

        The GRU's candidate takes the two apart, as two gates.
        """
        if type(self._cell) is not keras.layers.GRUCell:
            return _sum([by_input, by_state])
        shared = 2 * self._cell.units
        common = _sum(None if part is None else part[..., :shared] for part in (by_input, by_state))
        own = [None if part is None else part[..., shared:] for part in (by_input, by_state)]
        nothing = tf.zeros_like(own[0] if own[1] is None else own[1])
        return tf.concat([common, *(nothing if part is None else part for part in own)], -1)

    def _biases(self) -> tuple[tf.Tensor | None, tf.Tensor | None, tf.Tensor | None]:
        """What is added to W·x, to R·h, and to their sum."""
        bias, kind = self._cell.bias, type(self._cell)
        if bias is None:
            return None, None, None
        if kind is keras.layers.GRUCell:
            return bias[0], bias[1], None
        last = kind is keras.layers.LSTMCell and self._cell.implementation != 1
        return (None, None, bias) if last else (bias, None, None)

    def _split(self, gates: tf.Tensor) -> list[tf.Tensor]:
        return tf.split(gates, self._gate_count, -1)


def _weighted(adjoints: list[tf.Tensor], diagonals: Any) -> Any:
    """Σ_i a_i·diag(d_i): adjoints (B, R, U) and diagonals (B, U) → (B, R, U), None of none"""
    return _sum(None if d is None else a * d[:, None] for a, d in zip(adjoints, diagonals, strict=True))


def _sum(terms: Any) -> Any:
    """Their sum, None being zero."""
    total = None
    for term in terms:
        total = term if total is None else total if term is None else total + term
    return total


# ---- any other cell ----------------------------------------------------------------------------------


class AnyCell:
    """A cell of which only `call(inputs, states)` is known: a step is pulled back by automatic differentiation."""

    def __init__(self, cell: Any, initial: Callable[[int], list[tf.Tensor]], inputs: int) -> None:
        self._cell, self._initial = cell, initial
        self._structure = cell.state_size
        self.widths = tuple(keras.tree.flatten(cell.state_size))
        self.output_width = getattr(cell, "output_size", None) or self.widths[0]
        self.saved, self.matrices = self.output_width + 2 * sum(self.widths), 0
        shapes = [(width,) for width in (inputs, *self.widths)]
        self.work = numbers_of(
            lambda x, *states: self._step(x, list(states)), shapes, [cell.compute_dtype] * len(shapes)
        )

    def run(self, inputs: tf.Tensor) -> tuple[tf.Tensor, Any]:
        batch, steps, _ = inputs.shape
        inputs = tf.transpose(inputs, (1, 0, 2))

        def step(s: tf.Tensor, carried: list[tf.Tensor]) -> list[tf.Tensor]:
            return self._step(inputs[s], carried[1:])

        nothing = tf.zeros((batch, self.output_width), inputs.dtype)
        outputs, *history = _loop(step, [nothing, *self._initial(batch)], steps)
        return tf.transpose(outputs[1:], (1, 0, 2)), (inputs, [states[:-1] for states in history])

    def _step(self, inputs: tf.Tensor, states: list[tf.Tensor]) -> list[tf.Tensor]:
        """The output, then the new states."""
        nested = keras.tree.pack_sequence_as(self._structure, states)
        given = list(nested) if isinstance(nested, (list, tuple)) else [nested]
        options = {"training": False} if isinstance(self._cell, keras.Layer) else {}
        output, after = self._cell(inputs, given, **options)
        if hasattr(self._cell, "reset_dropout_mask"):  # kept from one call to the next, as tensors of this graph
            self._cell.reset_dropout_mask()
            self._cell.reset_recurrent_dropout_mask()
        return [output, *keras.tree.flatten(after)]

    def pull(self, at: Any, output: tf.Tensor | None, states: list[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
        inputs, before = at
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch((inputs, before))
            found = self._step(inputs, before)
        given = states if output is None else [output, *states]

        def one_row(adjoints: list[tf.Tensor]) -> list[tf.Tensor]:
            return tape.gradient(found[-len(adjoints) :], [*before, inputs], adjoints, unconnected_gradients=_ZERO)

        *pulled, by_input = over_rows(one_row, given)
        return pulled, by_input


# ---- causal convolutions -----------------------------------------------------------------------------


class Delayed:
    """Conv1D with `padding="causal"`: y_s = φ(Σ_j W_j·x_{s-j·d} + b) for j from 0 to k - 1, whose state is the last
    (k - 1)·d inputs, the newest first.
    """

    def __init__(self, layer: keras.layers.Conv1D) -> None:
        self._layer = layer
        (count,), (self._dilation,) = layer.kernel_size, layer.dilation_rate
        self._delay, self._inputs = (count - 1) * self._dilation, layer.kernel.shape[1]
        self.widths: tuple[int, ...] = (self._delay * self._inputs,)
        self.output_width = layer.filters
        self.saved, self.matrices, self.work = layer.filters, 0, 0

    def run(self, inputs: tf.Tensor) -> tuple[tf.Tensor, Any]:
        padded = tf.pad(inputs, [[0, 0], [self._delay, 0], [0, 0]])
        kernel, bias = tf.convert_to_tensor(self._layer.kernel), self._layer.bias
        sums = _sum([tf.nn.conv1d(padded, kernel, 1, "VALID", dilations=self._dilation), bias])
        return self._layer.activation(sums), tf.transpose(sums, (1, 0, 2))

    def pull(self, at: Any, output: tf.Tensor | None, states: list[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
        (after,) = states
        newest, older = after[..., : self._inputs], after[..., self._inputs :]
        before = tf.pad(older, [[0, 0], [0, 0], [0, self._inputs]])
        if output is None:
            return [before], newest
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(at)
            activated = self._layer.activation(at)
        sums = output * tape.gradient(activated, at)[:, None]
        by_input, *by_older = (tf.matmul(sums, w, transpose_b=True) for w in reversed(tf.unstack(self._layer.kernel)))
        gap = tf.zeros((*sums.shape[:2], (self._dilation - 1) * self._inputs), sums.dtype)
        return [before + tf.concat([part for own in by_older for part in (gap, own)], -1)], newest + by_input


def is_causal(layer: Any) -> bool:
    """Whether a convolution sees its own and earlier steps alone, all of them, in a way that `Delayed` knows."""
    plain = layer.padding == "causal" and layer.groups == 1 and layer.strides == (1,) and layer.kernel_size != (1,)
    return plain and _is_unitwise(layer.activation, layer.filters, layer.compute_dtype)


# ---- of all of them ----------------------------------------------------------------------------------


def over_rows(function: Callable[[list[tf.Tensor]], list[tf.Tensor]], rows: list[tf.Tensor]) -> list[tf.Tensor]:
    """The function of each row, side by side: lists of (B, …) ↔ lists of (B, R, …)."""
    first = [tf.transpose(a, (1, 0, *range(2, len(a.shape)))) for a in rows]
    return [tf.transpose(a, (1, 0, *range(2, len(a.shape)))) for a in tf.vectorized_map(function, first)]


def _loop(step: Callable[..., list[tf.Tensor]], initial: list[tf.Tensor], steps: int) -> list[tf.Tensor]:
    """The states (T + 1, B, …) before, between and after the steps."""

    def written(s: tf.Tensor, arrays: list[tf.TensorArray], states: list[tf.Tensor]) -> list[tf.TensorArray]:
        return [array.write(s, state) for array, state in zip(arrays, states, strict=True)]

    def body(s: tf.Tensor, states: list[tf.Tensor], arrays: list[tf.TensorArray]) -> tuple[Any, ...]:
        after = step(s, states)
        return s + 1, after, written(s + 1, arrays, after)

    empty = [tf.TensorArray(state.dtype, steps + 1, element_shape=state.shape) for state in initial]
    arrays = written(tf.constant(0), empty, initial)
    begin = (tf.constant(0), initial, arrays)
    *_, arrays = tf.while_loop(lambda s, *_: s < steps, body, begin, parallel_iterations=1, maximum_iterations=steps)
    return [array.stack() for array in arrays]
