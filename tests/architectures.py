"""Small models of the kinds that are published for time series, each with a twin in float64 of the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

LENGTH, FEATURES = 12, 3
_registered = keras.saving.register_keras_serializable("architectures")


def source_of(*shape: int) -> Any:
    return keras.Input(shape or (LENGTH, FEATURES))


def convolution() -> keras.Model:
    source = source_of()
    hidden = layers.Conv1D(6, 3, padding="same", activation="gelu")(source)
    hidden = layers.MaxPooling1D(2)(layers.BatchNormalization()(hidden))
    hidden = layers.Conv1D(4, 3, activation="tanh")(hidden)
    return keras.Model(source, layers.Dense(2)(layers.GlobalAveragePooling1D()(hidden)))


def transposed_convolution() -> keras.Model:
    source = source_of()
    hidden = layers.Conv1D(6, 4, strides=2, padding="same", activation="tanh")(source)
    hidden = layers.Conv1DTranspose(5, 4, strides=2, padding="same", activation="tanh")(hidden)
    return keras.Model(source, layers.Conv1D(1, 1)(hidden))


def transformer() -> keras.Model:
    source = source_of()
    hidden = layers.Dense(8)(source)
    for _ in range(2):
        attended = layers.MultiHeadAttention(2, 4, dropout=0.1)(hidden, hidden)
        hidden = layers.LayerNormalization()(hidden + layers.Dropout(0.1)(attended))
        inner = layers.Dense(8)(layers.Dropout(0.1)(layers.Dense(16, "gelu")(hidden)))
        hidden = layers.LayerNormalization()(hidden + layers.Dropout(0.1)(inner))
    return keras.Model(source, layers.Dense(2)(layers.GlobalAveragePooling1D()(hidden)))


def temporal_convolution() -> keras.Model:
    """TCN: residual blocks of dilated causal convolutions."""
    source = hidden = source_of()
    for dilation in (1, 2, 4):
        inner = hidden
        for _ in range(2):
            inner = layers.Conv1D(6, 2, padding="causal", dilation_rate=dilation, activation="relu")(inner)
            inner = layers.SpatialDropout1D(0.1)(inner)
        hidden = layers.ReLU()(inner + layers.Conv1D(6, 1)(hidden))
    return keras.Model(source, layers.Dense(1)(hidden[:, -1]))


def n_beats() -> keras.Model:
    source = source_of()
    rest, total = layers.Flatten()(source), 0.0
    for _ in range(3):
        hidden = layers.Dense(16, "relu")(layers.Dense(16, "relu")(rest))
        rest = rest - layers.Dense(LENGTH * FEATURES)(layers.Dense(4)(hidden))
        total = total + layers.Dense(5)(layers.Dense(4)(hidden))
    return keras.Model(source, total)


def decomposition() -> keras.Model:
    """DLinear: a moving average and what is left, a linear map of each."""
    source = source_of()
    trend = layers.AveragePooling1D(3, strides=1, padding="same")(source)
    parts = [layers.Dense(4)(layers.Permute((2, 1))(part)) for part in (trend, source - trend)]
    return keras.Model(source, layers.Permute((2, 1))(parts[0] + parts[1]))


def attention_after_lstm() -> keras.Model:
    source = source_of()
    hidden = layers.LSTM(6, return_sequences=True)(source)
    weights = layers.Softmax(axis=1)(layers.Dense(1)(layers.Dense(6, "tanh")(hidden)))
    return keras.Model(source, layers.Dense(2)(layers.Dot(1)([weights, hidden])))


def lstnet() -> keras.Model:
    """Steps that are a period apart are merged into the batch, and taken out of it again."""
    source, skip = source_of(), 4
    hidden = layers.Conv1D(6, 3, padding="causal", activation="relu")(source)
    apart = ops.transpose(ops.reshape(hidden, (-1, LENGTH // skip, skip, 6)), (0, 2, 1, 3))
    skipped = layers.GRU(4)(ops.reshape(apart, (-1, LENGTH // skip, 6)))
    both = layers.Concatenate()([layers.GRU(6)(hidden), ops.reshape(skipped, (-1, skip * 4))])
    linear = layers.Dense(1)(layers.Flatten()(source[:, -3:]))
    return keras.Model(source, layers.Dense(1)(both) + linear)


def deep_ar() -> keras.Model:
    source = source_of()
    hidden = layers.LSTM(6, return_sequences=True)(layers.LSTM(6, return_sequences=True)(source))
    return keras.Model(source, {"mu": layers.Dense(1)(hidden), "sigma": layers.Dense(1, "softplus")(hidden)})


def gru_d() -> keras.Model:
    """Values, and a mask of what was observed: others decay to a mean."""
    values, mask = keras.Input((LENGTH, FEATURES), name="values"), keras.Input((LENGTH, FEATURES), name="mask")
    decay = ops.exp(-ops.relu(layers.Dense(FEATURES)(1.0 - mask)))
    mean = ops.sum(values * mask, 1, keepdims=True) / ops.maximum(ops.sum(mask, 1, keepdims=True), 1.0)
    filled = mask * values + (1.0 - mask) * decay * mean
    return keras.Model([values, mask], layers.Dense(2)(layers.GRU(6)(layers.Concatenate()([filled, mask]))))


def encoder_decoder() -> keras.Model:
    source = source_of()
    last, *states = layers.LSTM(6, return_state=True)(source)
    hidden = layers.LSTM(6, return_sequences=True)(layers.RepeatVector(4)(last), initial_state=states)
    return keras.Model(source, layers.TimeDistributed(layers.Dense(2))(hidden))


def wavenet() -> keras.Model:
    source = source_of()
    hidden, skips = layers.Conv1D(6, 1)(source), []
    for dilation in (1, 2, 4):
        how: dict[str, Any] = {"padding": "causal", "dilation_rate": dilation}
        gated = layers.Conv1D(6, 2, activation="tanh", **how)(hidden)
        gated = gated * layers.Conv1D(6, 2, activation="sigmoid", **how)(hidden)
        skips.append(layers.Conv1D(6, 1)(gated))
        hidden = hidden + layers.Conv1D(6, 1)(gated)
    return keras.Model(source, layers.Conv1D(1, 1)(layers.ReLU()(layers.Add()(skips))))


def _gated_residual(hidden: Any, units: int) -> Any:
    inner = layers.Dense(units)(layers.Dense(units, "elu")(hidden))
    gated = layers.Dense(units)(inner) * layers.Dense(units, "sigmoid")(inner)
    return layers.LayerNormalization()(gated + layers.Dense(units)(hidden))


def fusion_transformer() -> keras.Model:
    """TFT: variables are selected and gated before and after what remembers and what attends."""
    source = source_of()
    weights = layers.Softmax()(_gated_residual(source, FEATURES))
    each = [_gated_residual(source[:, :, i : i + 1], 4) * weights[:, :, i : i + 1] for i in range(FEATURES)]
    hidden = layers.LSTM(4, return_sequences=True)(layers.Add()(each))
    attended = layers.MultiHeadAttention(2, 2)(hidden, hidden, use_causal_mask=True)
    return keras.Model(source, layers.Dense(3)(_gated_residual(attended + hidden, 4)[:, -1]))


@_registered
class ExponentialCell(layers.Layer):
    """A cell of xLSTM's: exponential gates, a normaliser and a stabiliser as further states."""

    def __init__(self, units: int, **more: Any) -> None:
        super().__init__(**more)
        self.units = units
        self.state_size = [units] * 4
        self.output_size = units

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 4 * self.units), name="kernel")
        self.recurrent = self.add_weight(shape=(self.units, 4 * self.units), name="recurrent")
        self.bias = self.add_weight(shape=(4 * self.units,), name="bias")

    def call(self, step: Any, states: Any) -> Any:
        hidden, cell, norm, most = states
        gates = ops.matmul(step, self.kernel) + ops.matmul(hidden, self.recurrent) + self.bias
        enter, forget, value, leave = ops.split(gates, 4, axis=-1)
        above = ops.maximum(forget + most, enter)
        enter, forget = ops.exp(enter - above), ops.exp(forget + most - above)
        cell, norm = forget * cell + enter * ops.tanh(value), forget * norm + enter
        hidden = ops.sigmoid(leave) * cell / ops.maximum(norm, 1e-3)
        return hidden, [hidden, cell, norm, above]

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


def xlstm() -> keras.Model:
    source = source_of()
    hidden = layers.RNN(ExponentialCell(5), return_sequences=True)(layers.Dense(4)(source))
    return keras.Model(source, layers.Dense(2)(layers.LayerNormalization()(hidden))[:, -1])


@_registered
class SelectiveScan(layers.Layer):
    """h ← exp(Δ·A)·h + Δ·B·x, y = C·h, with Δ, B and C of each step's own input."""

    def __init__(self, states: int, **more: Any) -> None:
        super().__init__(**more)
        self.states = states

    def build(self, shape: Any) -> None:
        width = shape[-1]
        self.step_size, self.enter, self.leave = (layers.Dense(n) for n in (width, self.states, self.states))
        for layer in (self.step_size, self.enter, self.leave):
            layer.build(shape)
        self.decay = self.add_weight(shape=(width, self.states), name="decay")

    def call(self, source: Any) -> Any:
        sizes = tf.nn.softplus(self.step_size(source))
        steps = [tf.transpose(x, (1, 0, 2)) for x in (source, sizes, self.enter(source), self.leave(source))]
        first = tf.zeros_like(steps[0][0][:, :, None] * self.decay)

        def turn(state: Any, given: Any) -> Any:
            x, size, enter, _ = given
            return tf.exp(-size[:, :, None] * tf.exp(self.decay)) * state + (size * x)[:, :, None] * enter[:, None]

        states = tf.scan(turn, tuple(steps), first)
        return tf.transpose(tf.reduce_sum(states * steps[3][:, :, None], -1), (1, 0, 2))

    def compute_output_shape(self, shape: Any) -> Any:
        return shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "states": self.states}


def mamba() -> keras.Model:
    source = source_of()
    hidden = layers.Dense(6)(source)
    for _ in range(2):
        inner = layers.DepthwiseConv1D(3, padding="same")(layers.Dense(6)(layers.LayerNormalization()(hidden)))
        inner = SelectiveScan(4)(ops.silu(inner)) * ops.silu(layers.Dense(6)(hidden))
        hidden = hidden + layers.Dense(6)(inner)
    return keras.Model(source, layers.Dense(1)(hidden[:, -1]))


@_registered
class Autoregressive(keras.Model):
    """Warms up on the window, and then goes on with what it predicts itself."""

    def __init__(self, ahead: int = 4, **more: Any) -> None:
        super().__init__(**more)
        self.ahead = ahead
        self.cell = layers.LSTMCell(6)
        self.warm = layers.RNN(self.cell, return_state=True)
        self.dense = layers.Dense(FEATURES)

    def build(self, shape: Any) -> None:
        self.warm.build(shape)
        self.dense.build((None, 6))

    def call(self, source: Any) -> Any:
        hidden, *states = self.warm(source)
        found = [self.dense(hidden)]
        for _ in range(self.ahead - 1):
            hidden, states = self.cell(found[-1], states)
            found.append(self.dense(hidden))
        return ops.stack(found, 1)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "ahead": self.ahead}


def autoregressive() -> keras.Model:
    model = Autoregressive()
    model.build((None, LENGTH, FEATURES))
    return model


def conv_lstm_1d() -> keras.Model:
    source = source_of(5, 6, 2)
    return keras.Model(source, layers.Dense(2)(layers.Flatten()(layers.ConvLSTM1D(3, 3, padding="same")(source))))


def conv_lstm_2d() -> keras.Model:
    source = source_of(4, 4, 4, 1)
    return keras.Model(source, layers.Dense(2)(layers.Flatten()(layers.ConvLSTM2D(2, 3, padding="same")(source))))


def mixture_density() -> keras.Model:
    source = source_of()
    hidden = layers.Dense(12, "tanh")(layers.Flatten()(source))
    parts = [layers.Dense(3, "softmax")(hidden), layers.Dense(3)(hidden), layers.Dense(3, "exponential")(hidden)]
    return keras.Model(source, layers.Concatenate()(parts))


def bidirectional() -> keras.Model:
    source = source_of()
    return keras.Model(source, layers.Dense(2)(layers.Bidirectional(layers.LSTM(5))(source)))


def convolution_before_bidirectional() -> keras.Model:
    source = source_of()
    hidden = layers.MaxPooling1D(2)(layers.Conv1D(6, 3, padding="same", activation="relu")(source))
    hidden = layers.Bidirectional(layers.LSTM(5, return_sequences=True))(hidden)
    return keras.Model(source, layers.Dense(2)(layers.Flatten()(hidden)))


def masking() -> keras.Model:
    source = source_of()
    hidden = layers.LSTM(5, return_sequences=True)(layers.Masking()(source))
    return keras.Model(source, layers.Dense(2)(layers.GRU(5)(hidden)))


ARCHITECTURES: dict[str, Callable[[], keras.Model]] = {
    build.__name__: build
    for build in (
        *(convolution, transposed_convolution, transformer, temporal_convolution, n_beats, decomposition),
        *(attention_after_lstm, lstnet, deep_ar, gru_d, encoder_decoder, wavenet, fusion_transformer, xlstm, mamba),
        *(autoregressive, conv_lstm_1d, conv_lstm_2d, mixture_density, bidirectional),
        *(convolution_before_bidirectional, masking),
    )
}


WRT = {"gru_d": "values"}  # of several inputs


@contextmanager
def in_float64() -> Iterator[None]:
    """Within, what Keras builds computes in float64."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def built(name: str) -> keras.Model:
    """The architecture of that name, with the same weights each time."""
    keras.utils.set_random_seed(1)
    return ARCHITECTURES[name]()


def twin(name: str, model: keras.Model) -> keras.Model:
    """The same model in float64; built anew, and not by the product."""
    with in_float64():
        found = ARCHITECTURES[name]()
    found.set_weights(model.get_weights())
    return found


def windows_of(name: str, model: keras.Model, count: int) -> Any:
    """`(count, *input)` in float32, or of several inputs a dictionary. Of a model that masks steps, some are masked."""
    random = np.random.default_rng(2)
    if name == "gru_d":
        values = random.standard_normal((count, LENGTH, FEATURES))
        mask = random.random(values.shape) < 0.7
        return {"values": (values * mask).astype("float32"), "mask": mask.astype("float32")}
    shape = (LENGTH, FEATURES) if name == "autoregressive" else tuple(model.input_shape[1:])
    windows = random.standard_normal((count, *shape)).astype("float32")
    if name == "masking":
        windows[: count // 2, :3] = 0
    return windows


def output_of(model: keras.Model, windows: Any) -> Any:
    """The outputs as `predict` has them, those of several heads one after another along the last axis."""
    found = model(windows, training=False)
    return tf.concat(list(found.values()), -1) if isinstance(found, dict) else found
