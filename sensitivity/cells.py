"""Recurrent cells, run forward over all steps and pulled back one step at a time.

A cell is run once, which gives its outputs and a trace: what `pull` needs of each step, time first. `pull` is the
vector-Jacobian product of one step for many rows at once. Shapes: T steps, B windows, R rows of adjoints, I inputs of
the cell, U units.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

from .layers import keras

FEW_ROWS = 8  # below, rows go through the gates one by one; from here on, a step's own matrices are worth forming
_ZERO = tf.UnconnectedGradients.ZERO


class Cell(Protocol):
    """widths: of the states. output_width: U. gates: pre-activations a unit, 0 where they are not known."""

    widths: tuple[int, ...]
    output_width: int
    gates: int

    def run(self, inputs: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """inputs (B, T, I) → outputs (B, T, U), and the trace: tensors (T, B, …) in any structure."""
        ...

    def pull(self, at: Any, output: tf.Tensor | None, states: list[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Adjoints of one step's output (B, R, U) and states after it → of the states before it, and of its input.

        at: the trace at this step. output: None where nothing but the states is reached from later on.
        """
        ...


def cells_of(layer: keras.layers.RNN) -> list[Cell]:
    """The layer's cells, those of `StackedRNNCells` one after another."""
    stacked = isinstance(layer.cell, keras.layers.StackedRNNCells)
    cells = layer.cell.cells if stacked else [layer.cell]

    def initial(index: int) -> Callable[[int], list[tf.Tensor]]:
        def states(batch: int) -> list[tf.Tensor]:
            every = layer.get_initial_state(batch_size=batch)
            return [tf.cast(s, cell.compute_dtype) for s in keras.tree.flatten(every[index] if stacked else every)]

        cell = cells[index]
        return states

    return [(Gated if is_gated(cell) else AnyCell)(cell, initial(index)) for index, cell in enumerate(cells)]


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
    """Whether each number is mapped alone: a softmax is not, nor is an activation with weights of its own."""
    if activation is None or isinstance(activation, keras.Layer):
        return activation is None
    numbers = tf.reshape(tf.linspace(tf.constant(-2.1, dtype), 1.7, 2 * units), (2, units))
    beside = tf.concat([[0.0], tf.ones(units - 1)], 0)  # the first of them is left as it is
    try:
        return bool(tf.reduce_all(activation(numbers)[:, 0] == activation(numbers + tf.cast(beside, dtype))[:, 0]))
    except Exception:  # whatever a user's function raises: its cell is differentiated as a whole
        return False


class Gated:
    """LSTM, GRU (`reset_after`), SimpleRNN: new states = φ(W·x + R·h + b, states), where φ treats each unit alone.

    So the derivative of state i by h is Σ_g diag(∂φ_i/∂gate_g)·R_gᵀ + diag(∂φ_i/∂h): one matrix (U, U) a step and
    window, whose diagonals are φ's own automatic derivatives.
    """

    def __init__(self, cell: Any, initial: Callable[[int], list[tf.Tensor]]) -> None:
        self._cell, self._initial = cell, initial
        self.gates, self._unit = _GATED[type(cell)]
        self.output_width = cell.units
        self.widths = (cell.units,) * (2 if type(cell) is keras.layers.LSTMCell else 1)

    def run(self, inputs: tf.Tensor) -> tuple[tf.Tensor, Any]:
        batch, steps, _ = inputs.shape
        weights, bias = self._weights()
        inputs = tf.transpose(inputs, (1, 0, 2))

        def step(s: tf.Tensor, carried: list[tf.Tensor]) -> list[tf.Tensor]:
            _, *states = carried
            gates = tf.matmul(tf.concat([states[0], inputs[s]], -1), weights) + bias
            return [gates, *self._unit(self._cell, self._split(gates), states)]

        nothing = tf.zeros((batch, self.gates * self.output_width), inputs.dtype)
        gates, *history = _loop(step, [nothing, *self._initial(batch)], steps)
        return tf.transpose(history[0][1:], (1, 0, 2)), (gates[1:], [states[:-1] for states in history])

    def pull(self, at: Any, output: tf.Tensor | None, states: list[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
        by_gate, by_state = self._diagonals(*at)
        if output is not None:
            states = [states[0] + output, *states[1:]]
        through = self._by_gates if states[0].shape[1] < FEW_ROWS else self._by_matrices
        product = through(states, by_gate)
        before = [_weighted(states, diagonals) for diagonals in by_state]
        hidden, inputs = product[..., : self.output_width], product[..., self.output_width :]
        before[0] = hidden if before[0] is None else before[0] + hidden
        return before, inputs

    def _diagonals(self, gates: tf.Tensor, states: list[tf.Tensor]) -> tuple[list[Any], list[Any]]:
        """(B, U) of each new state, by gate and by state before the step; None where it does not depend on it."""
        parts = self._split(gates)
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch((parts, states))
            after = self._unit(self._cell, parts, states)
        by_gate, by_state = zip(*(tape.gradient(state, (parts, states)) for state in after), strict=True)
        return list(zip(*by_gate, strict=True)), list(zip(*by_state, strict=True))

    def _by_matrices(self, states: list[tf.Tensor], by_gate: list[Any]) -> tf.Tensor:
        """Many rows: Σ_i a_i · M_iᵀ, for which matrices M_i (B, U + I, U) are formed. (B, R, U + I)"""
        weights = self._split(self._weights()[0])
        terms = []
        for adjoint, diagonals in zip(states, zip(*by_gate, strict=True), strict=True):
            matrix = _sum(w * d[:, None] for w, d in zip(weights, diagonals, strict=True) if d is not None)
            terms.append(tf.matmul(adjoint, matrix, transpose_b=True))
        return _sum(terms)

    def _by_gates(self, states: list[tf.Tensor], by_gate: list[Any]) -> tf.Tensor:
        """Few rows: the gates' adjoints (B, R, G·U), times the weights that all windows share. (B, R, U + I)"""
        batch, rows, _ = states[0].shape
        gates = tf.concat([_weighted(states, diagonals) for diagonals in by_gate], -1)
        product = tf.matmul(tf.reshape(gates, (batch * rows, -1)), self._weights()[0], transpose_b=True)
        return tf.reshape(product, (batch, rows, -1))

    def _weights(self) -> tuple[tf.Tensor, tf.Tensor]:
        """R over W (U + I, G·U), and b (G·U). The GRU's candidate sees the state by one gate, the input by another."""
        cell = self._cell
        kernel, recurrent = tf.convert_to_tensor(cell.kernel), tf.convert_to_tensor(cell.recurrent_kernel)
        bias = tf.zeros_like(kernel[0]) if cell.bias is None else tf.convert_to_tensor(cell.bias)
        if type(cell) is not keras.layers.GRUCell:
            return tf.concat([recurrent, kernel], 0), bias
        of_input, of_state = (bias[0], bias[1]) if cell.bias is not None else (bias, bias)
        units = cell.units

        def apart(weights: tf.Tensor, *, is_state: bool) -> tf.Tensor:
            common, own, none = (
                weights[..., : 2 * units],
                weights[..., 2 * units :],
                tf.zeros_like(weights[..., :units]),
            )
            return tf.concat([common, none, own] if is_state else [common, own, none], -1)

        both = tf.concat([apart(recurrent, is_state=True), apart(kernel, is_state=False)], 0)
        return both, apart(of_input, is_state=False) + apart(of_state, is_state=True)

    def _split(self, gates: tf.Tensor) -> list[tf.Tensor]:
        return tf.split(gates, self.gates, -1)


def _weighted(adjoints: list[tf.Tensor], diagonals: Any) -> Any:
    """Σ_i a_i·diag(d_i): adjoints (B, R, U) and diagonals (B, U) → (B, R, U), None of none"""
    return _sum(a * d[:, None] for a, d in zip(adjoints, diagonals, strict=True) if d is not None)


def _sum(terms: Any) -> Any:
    """Their sum; None of none."""
    total = None
    for term in terms:
        total = term if total is None else total + term
    return total


# ---- any other cell ----------------------------------------------------------------------------------


class AnyCell:
    """A cell of which only `call(inputs, states)` is known: a step is pulled back by automatic differentiation."""

    gates = 0

    def __init__(self, cell: Any, initial: Callable[[int], list[tf.Tensor]]) -> None:
        self._cell, self._initial = cell, initial
        self._structure = cell.state_size
        self.widths = tuple(keras.tree.flatten(cell.state_size))
        self.output_width = getattr(cell, "output_size", None) or self.widths[0]

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
        options = {"training": False} if getattr(self._cell, "_call_has_training_arg", False) else {}
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
