"""How far back a recurrent layer's state remembers: the norm of its state-to-state Jacobian by lag.

With z_t the state after step t, the Jacobian over a lag is the product of those of single steps,

    ∂z_T/∂z_t = J_T · J_{T-1} ··· J_{t+1},        J_s = ∂z_s/∂z_{s-1},

whose norm falls or grows about exponentially with T - t: gradients vanish or explode with it, whatever the loss
(Bengio, Simard & Frasconi 1994, "Learning long-term dependencies with gradient descent is difficult"; Pascanu, Mikolov
& Bengio 2013, "On the difficulty of training recurrent neural networks"). The product is built from the left, row by
row of z_T, and divided by its Frobenius norm after each step, whose logarithm is kept.

An LSTM's z is (h, c). Its memory is c, which passes from step to step by the forget gate alone; h is read from it anew
at every step. So ∂(h, c)_T/∂(h, c)_t tells how long the layer remembers, and ∂h_T/∂h_t, with c_t held, how much of that
goes through the recurrent kernel. h and c are taken as they are, without scaling one to the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
import tensorflow as tf

from ..cells import AnyCell, Cell, Gated, is_gated
from ..errors import Refused
from ..layers import as_graph, keras
from ..progress import progress_of_long
from .decay import Decay
from .given import Watch, checked, thinned
from .halves import Half, halves_of
from .spectral import Largest

Norm = Literal["spectral", "frobenius"]
States = Literal["all", "hidden"]
ROOM = 256 << 20  # bytes that the walks of one call take, about
_BLOCKS = 6  # that are there at once, of the size of a product
_NO_XLA = (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, tf.errors.NotFoundError)


def jacobian_decay(
    model: keras.Model,
    windows: Any,
    layer: str | keras.Layer | None = None,
    *,
    norm: Norm = "spectral",
    states: States = "all",
    most_windows: int = 32,
) -> tuple[Decay, ...]:
    """|∂z_T/∂z_t| of a recurrent layer by lag T - t, from 0 to the number of its steps less one, on real windows.

    model: functional, sequential, or any that calls the layer once. windows: `(batch, lag, feature)`, or whatever the
        model takes, in its units; of more than `most_windows`, so many are taken, evenly chosen.
    layer: an LSTM, GRU, SimpleRNN, or Bidirectional of these: its name, or itself; None where there is only one.
    norm: "spectral", the largest singular value, by how much a change of the state can grow; or "frobenius", the root
        of the sum of squares, which is never smaller and costs less.
    states: "all", the full state, of an LSTM (h, c); or "hidden", h alone, with c_t held. The same of other layers.

    Returns a `Decay` of each pass over time, forward before backward. Of T the last step of a pass: a backward one
    ends at the window's oldest step. Computed in the model's dtype; norms of any size, also where they are beyond it.
    Raises `Refused` for a layer that is not found, not recurrent, called several times or with masked steps, and for
    windows that the model does not take.
    """
    _require("norm", norm, get_args(Norm))
    _require("states", states, get_args(States))
    halves = halves_of(model, layer)
    model, source = checked(model, windows)
    chosen = thinned(source, most_windows)
    found = _walked(Watch(model, halves), [_Walk(half, norm, states) for half in halves], chosen)
    return tuple(
        Decay(half.name, half.direction, _quantity(half, norm, states), "norm", logs, len(source), first=1)
        for half, logs in zip(halves, found, strict=True)
    )


def _require(key: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise Refused(key, given=given, allowed=", ".join(allowed), remedy="name one of these")


def _quantity(half: Half, norm: str, states: str) -> str:
    of = "(h, c)" if isinstance(half.rnn.cell, keras.layers.LSTMCell) and states == "all" else "h"
    held = ", c held" if isinstance(half.rnn.cell, keras.layers.LSTMCell) and states == "hidden" else ""
    return f"|∂{of} at the last step / ∂{of} at a lag{held}|, {norm} norm"


def _walked(watch: Watch, walks: list[_Walk], windows: np.ndarray) -> list[np.ndarray]:
    """Log norms `(window, lag)` of each walk. Windows go through in calls of one size, the last one filled up."""
    sequences, _ = watch(windows[:1])
    size = min(len(windows), *(walk.windows_per_call(*sequences.shape[1:]) for walk in walks))
    found: list[list[np.ndarray]] = [[] for _ in walks]
    starts = range(0, len(windows), size)
    with progress_of_long(len(starts) * len(walks) * sequences.shape[1], "steps", warm=False) as moved:
        for start in starts:
            part = windows[start : start + size]
            filled = np.concatenate([part, np.repeat(part[-1:], size - len(part), 0)])
            sequences, states = watch(filled)
            for walk, begun, logs in zip(walks, states, found, strict=True):
                logs.append(walk(sequences, begun, moved)[: len(part)])
    return [np.concatenate(logs) for logs in found]


class _Walk:
    """One pass forward over the steps of a half, and the way back with the product of the Jacobians of its steps."""

    def __init__(self, half: Half, norm: str, states: str) -> None:
        self._half, self._norm = half, norm
        self._gated = is_gated(half.rnn.cell)
        self._widths = keras.tree.flatten(half.rnn.cell.state_size)
        self._rows = self._widths[0] if states == "hidden" else sum(self._widths)
        self._run, self._back = _compiled(self._forward), _compiled(self._step_back)

    def windows_per_call(self, steps: int, inputs: int) -> int:
        states, dtype = sum(self._widths), np.dtype(self._half.rnn.compute_dtype)
        passed = steps * (inputs + self._widths[0] * (len(self._half.gates) + 4))
        return max(1, ROOM // ((passed + _BLOCKS * self._rows * states) * dtype.itemsize))

    def __call__(self, sequences: tf.Tensor, states: list[tf.Tensor], moved: Callable[[int], None]) -> np.ndarray:
        """sequences `(window, step, input)` in the order of time → log norms `(window, lag)`

        moved: is told of steps that are done.
        """
        largest = Largest() if self._norm == "spectral" else None
        trace = self._run(sequences, states)
        windows, steps, _ = sequences.shape
        product = tf.eye(self._rows, sum(self._widths), batch_shape=[windows], dtype=sequences.dtype)
        scale, found = np.zeros(windows), [self._log_norm(product.numpy(), largest)]
        moved(1)
        for step in range(steps - 1, 0, -1):
            product, frobenius = self._back(trace, tf.constant(step), product)
            with np.errstate(divide="ignore"):
                scale = scale + np.log(frobenius.numpy().astype("float64"))
            found.append(scale + self._log_norm(product.numpy(), largest))
            moved(1)
        return np.stack(found, 1)

    def _cell(self, states: list[tf.Tensor], inputs: int) -> Cell:
        cell = self._half.rnn.cell
        return Gated(cell, lambda _: states) if self._gated else AnyCell(cell, lambda _: states, inputs)

    def _forward(self, sequences: tf.Tensor, states: list[tf.Tensor]) -> Any:
        along = sequences[:, ::-1] if self._half.rnn.go_backwards else sequences
        return self._cell(states, sequences.shape[-1]).run(along)[1]

    def _step_back(self, trace: Any, step: tf.Tensor, product: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The product (B, R, S) times the Jacobian of one step, divided by its Frobenius norm (B), and that."""
        at = tf.nest.map_structure(lambda part: tf.gather(part, step), trace)
        states = tf.split(product, self._widths, -1)
        before, _ = self._cell([], self._half.rnn.cell.kernel.shape[0]).pull(at, None, states)
        product = tf.concat(before, -1)
        size = tf.norm(product, axis=(1, 2))
        return product / tf.where(size > 0, size, tf.ones_like(size))[:, None, None], size

    def _log_norm(self, products: np.ndarray, largest: Largest | None) -> np.ndarray:
        """(B, R, S) → (B), by the columns of as many states as there are rows. largest: None for Frobenius norms."""
        values = products[..., : self._rows].astype("float64")
        with np.errstate(divide="ignore"):
            return np.log(np.linalg.norm(values, axis=(1, 2)) if largest is None else largest(values))


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """By XLA; without it from the first call on that it cannot compile."""
    graph = as_graph(function, jit_compile=True)

    def called(*args: Any) -> Any:
        nonlocal graph
        try:
            return graph(*args)
        except _NO_XLA:
            graph = as_graph(function)
            return graph(*args)

    return called
