"""Layers of which every sample has weights of its own, in one call for all samples.

Dense, convolutional and recurrent layers use their weights in products z = x·W alone. With W + δ of each sample, z is
x·W for all samples at once, and x·δ more. So the derivative by δ is a product of two tensors that are there anyway,
summed over all steps at once: Σ_t x_t ⊗ ∂y/∂z_t.

Within a recurrent loop, x is the state h, which depends on δ in turn. Where δ is zero, (h + dh)·δ is h·δ to first
order: the layer is run, what its states then give is added to the products of a second run, and so on for each order
of derivatives that is wanted.

Shapes: B samples, and k·B in the batch that a layer is called on, where steps are samples, too; T steps, I inputs,
U units, G numbers that all gates of a cell take.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from .cells import Gated, is_gated
from .fitness import Unfit
from .layers import calls_wrapped, keras

Own = Mapping[str, tf.Tensor]  # δ (B, *shape) by name of the layer's variable
Call = Callable[..., tf.Tensor]


def is_known(layer: keras.Layer) -> bool:
    """Whether it uses its weights in such products."""
    if getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None):
        return False
    if type(layer) is keras.layers.Conv1D:
        return layer.groups == 1 and layer.data_format == "channels_last"
    return type(layer) is keras.layers.Dense or (isinstance(layer, keras.layers.RNN) and is_gated(layer.cell))


def weighed(layer: keras.Layer, call: Call, own: Own, order: int) -> Call:
    """The call of a known layer, with δ more than its weights; right where δ is zero, in derivatives up to `order`."""
    if isinstance(layer, keras.layers.RNN):
        return _recurrent(layer, call, own, order)
    before = layer.activation
    entering = _patches if type(layer) is keras.layers.Conv1D else _itself

    def with_more(inputs: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
        def activation(sums: tf.Tensor) -> tf.Tensor:
            if "kernel" in own:
                sums += _product(entering(layer, inputs), own["kernel"])
            if "bias" in own:
                sums += _each(own["bias"], sums)
            return sums if before is None else before(sums)

        with _having(layer, activation=activation):
            return call(inputs, *args, **kwargs)

    return with_more


def _product(inputs: tf.Tensor, own: tf.Tensor) -> tf.Tensor:
    """(k·B, …, I) and (B, …, O) → (k·B, …, O): each sample's rows by its own matrix (I, O)"""
    shape, samples, columns = inputs.shape, own.shape[0], own.shape[-1]
    if None in shape or shape[0] % samples:
        raise Unfit(f"a layer is called on a batch of {shape[0]}, which are no steps of {samples} samples")
    rows = tf.reshape(inputs, (samples, -1, shape[-1]))
    products = tf.matmul(rows, tf.reshape(own, (samples, shape[-1], columns)))
    return tf.reshape(products, (*shape[:-1], columns))


def _each(own: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """(B, O) → (k·B, 1, …, O)"""
    repeated = tf.repeat(own, like.shape[0] // own.shape[0], axis=0) if like.shape[0] != own.shape[0] else own
    return tf.reshape(repeated, (like.shape[0], *[1] * (len(like.shape) - 2), own.shape[-1]))


def _itself(layer: keras.Layer, inputs: tf.Tensor) -> tf.Tensor:
    return inputs


def _patches(layer: keras.Layer, inputs: tf.Tensor) -> tf.Tensor:
    """(k·B, T, I) → (k·B, steps, window·I): what each step of a convolution sees"""
    (width,), (stride,), (dilation,) = layer.kernel_size, layer.strides, layer.dilation_rate
    steps, reach = inputs.shape[1], (width - 1) * dilation
    pads = {"causal": (reach, 0), "valid": (0, 0)}.get(layer.padding)
    if pads is None:
        missing = max(0, (-(-steps // stride) - 1) * stride + reach + 1 - steps)
        pads = (missing // 2, missing - missing // 2)
    padded = tf.pad(inputs, [[0, 0], pads, [0, 0]])
    last = steps + sum(pads) - reach
    return tf.concat([padded[:, j * dilation : j * dilation + last : stride] for j in range(width)], -1)


# ---- recurrent layers --------------------------------------------------------------------------------


def _recurrent(layer: keras.Layer, call: Call, own: Own, order: int) -> Call:
    cell = _Cell(layer.cell, own)

    def with_more(inputs: tf.Tensor, initial_state: Any = None, mask: Any = None, training: Any = None) -> Any:
        if initial_state is not None or mask is not None:
            raise Unfit(f"layer {layer.name!r} has masked steps or states that are given")
        by_input, by_state = cell.by_input(inputs), None
        options = {"use_cudnn": False} if hasattr(layer, "use_cudnn") else {}
        with calls_wrapped([layer.cell], cell.stepping), _having(layer, **options):
            for run in range(order if cell.sees_own_states else 0):
                with _having(layer, return_sequences=True, return_state=False):
                    states = call(cell.sequence(by_input, by_state), training=training)
                before = tf.pad(states[:, :-1], [[0, 0], [1, 0], [0, 0]])
                before = before[:, ::-1] if layer.go_backwards else before
                by_state = cell.by_state(before if run else tf.stop_gradient(before))
            return call(cell.sequence(by_input, by_state), training=training)

    return with_more


class _Cell(Gated):
    """A cell that is given what its gates get from inputs, and what they get more from states, at each step."""

    def __init__(self, cell: Any, own: Own) -> None:
        super().__init__(cell, lambda batch: [])
        own = dict(own)
        bias = own.pop("bias", None)
        apart = bias is not None and len(bias.shape) == 3  # a GRU's, of inputs and of states
        self._own = own
        self._bias = bias[:, 0] if apart else bias
        self._state_bias = bias[:, 1] if apart else None
        self.sees_own_states = "recurrent_kernel" in own or apart

    def by_input(self, inputs: tf.Tensor) -> tf.Tensor:
        """(k·B, T, I) → (k·B, T, G)"""
        batch, steps, size = inputs.shape
        kernel = tf.convert_to_tensor(self._cell.kernel)
        found = tf.reshape(tf.matmul(tf.reshape(inputs, (batch * steps, size)), kernel), (batch, steps, -1))
        shared = self._biases()[0]
        found = found if shared is None else found + shared
        return self._with_more(found, inputs, "kernel", self._bias)

    def by_state(self, states: tf.Tensor) -> tf.Tensor:
        """(k·B, T, U) before each step → (k·B, T, G)"""
        nothing = tf.zeros((*states.shape[:2], self._cell.recurrent_kernel.shape[-1]), states.dtype)
        return self._with_more(nothing, states, "recurrent_kernel", self._state_bias)

    def _with_more(self, found: tf.Tensor, given: tf.Tensor, kernel: str, bias: tf.Tensor | None) -> tf.Tensor:
        if kernel in self._own:
            found += _product(given, self._own[kernel])
        return found if bias is None else found + _each(bias, found)

    def sequence(self, by_input: tf.Tensor, by_state: tf.Tensor | None) -> tf.Tensor:
        """What the layer is given, (k·B, T, G or 2·G)."""
        return by_input if by_state is None else tf.concat([by_input, by_state], -1)

    def stepping(self, cell: Any, call: Call) -> Call:
        """One step, in Keras' own order of adding."""
        recurrent = tf.convert_to_tensor(cell.recurrent_kernel)
        _, with_state, afterwards = self._biases()

        def step(given: tf.Tensor, states: list[tf.Tensor], training: Any = None) -> Any:
            by_input, *more = tf.split(given, given.shape[-1] // recurrent.shape[-1], -1)
            by_state = tf.matmul(states[0], recurrent)
            by_state = by_state if with_state is None else by_state + with_state
            gates = self._gates(by_input, by_state + more[0] if more else by_state)
            after = self._unit(cell, self._split(gates if afterwards is None else gates + afterwards), list(states))
            return after[0], after

        return step


@contextlib.contextmanager
def _having(layer: keras.Layer, **values: Any) -> Iterator[None]:
    """Within, the layer has these attributes, past Keras' tracking."""
    before = {name: getattr(layer, name) for name in values}
    try:
        for name, value in values.items():
            object.__setattr__(layer, name, value)
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(layer, name, value)
