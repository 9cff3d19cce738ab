"""Which models are one causal cell, and which layer makes the others unfit."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf
from keras import layers, ops

from sensitivity.fitness import Unfit
from sensitivity.recurrence import recurrence
from sensitivity.sources import layer_named
from tests.conftest import in_training, sequential

SHAPE = (6, 3)


def functional(build) -> keras.Model:
    source = keras.Input(SHAPE)
    return keras.Model(source, build(source))


def states_handed_on(source):
    _, state = layers.GRU(4, return_state=True)(source)
    return layers.GRU(4, return_sequences=True)(source, initial_state=state)


class OwnLoop(layers.RNN):
    def call(self, sequences, initial_state=None, mask=None, training=False):
        return super().call(ops.flip(sequences, 1), initial_state, mask, training)


class Positions(layers.Layer):
    def call(self, inputs):
        return inputs + ops.cast(ops.arange(inputs.shape[1]), inputs.dtype)[None, :, None]


class Gaps(layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.supports_masking = True

    def compute_mask(self, inputs, previous=None):
        return ops.any(inputs != -999.0, -1)

    def call(self, inputs):
        return inputs * 1.0


@tf.custom_gradient
def opaque(inputs):
    def gradient(*_):
        raise NotImplementedError("no gradient for it")

    return inputs, gradient


class Opaque(layers.SimpleRNNCell):
    def call(self, sequence, states, training=False):
        output, after = super().call(opaque(sequence), states)
        return output, after


class Mixed(layers.Layer):
    """Mixes steps by weights that are zero as yet."""

    def build(self, shape):
        self.mixing = self.add_weight(shape=(shape[1], shape[1]), initializer="zeros")

    def call(self, inputs):
        return inputs + ops.einsum("ts,bsf->btf", self.mixing, inputs) if inputs.shape[1] > 1 else inputs


class GatedMean(layers.Layer):
    """Mixes steps once its gate opens, which is shut as yet."""

    def build(self, shape):
        self.gate = self.add_weight(shape=(), initializer=keras.initializers.Constant(-9.0))

    def call(self, inputs):
        return inputs + ops.relu(self.gate) * ops.mean(inputs, 1, keepdims=True)


class ByNorm(layers.Layer):
    """Mixes steps where numbers are large."""

    def call(self, inputs):
        return inputs / ops.maximum(10.0, ops.max(ops.abs(inputs), (1, 2), keepdims=True))


class Reshaped(layers.Layer):
    """Puts windows together again from whatever they were cut into."""

    def call(self, inputs):
        windows = ops.reshape(inputs, (-1, *SHAPE))
        return windows + ops.mean(windows, 1, keepdims=True)


class Picked(layers.Layer):
    """A row of its weights by number."""

    def build(self, shape):
        self.rows = self.add_weight(shape=(4, 2))

    def call(self, numbers):
        return tf.gather(self.rows, numbers)


def test_what_follows_the_last_step_may_be_integers():
    def largest(hidden):
        return layers.Dense(2)(hidden) + Picked()(ops.argmax(hidden, -1))

    model = functional(lambda x: largest(layers.LSTM(4)(x)))
    assert len(recurrence(model, SHAPE).head) == 4


UNFIT = {
    "lstm.*is called with a mask": lambda: sequential(SHAPE, Gaps(), layers.LSTM(2)),
    "greater.*gives bool, where only float32": lambda: functional(
        lambda x: layers.LSTM(2)(ops.where(x > 0, x, 0.1 * x))
    ),
    "in_training.*alone and alike": lambda: functional(
        lambda x: layers.LSTM(2)(in_training(layers.BatchNormalization())(x))
    ),
    "mixed.*alone and alike": lambda: sequential(SHAPE, Mixed(), layers.LSTM(2)),
    "gated_mean.*alone and alike": lambda: sequential(SHAPE, GatedMean(), layers.LSTM(2)),
    "by_norm.*alone and alike": lambda: sequential(SHAPE, ByNorm(), layers.LSTM(2)),
    "reshape.*alone and alike": lambda: functional(
        lambda x: layers.Dense(1)(ops.reshape(layers.LSTM(2, return_sequences=True)(x), (-1, 6, 2)))
    ),
    "reshaped.*alone and alike": lambda: sequential(SHAPE, Reshaped(), layers.LSTM(2)),
    "no channel axis": lambda: functional(
        lambda x: [layers.Flatten()(layers.Dense(1)(layers.GRU(2, return_sequences=True)(x))) for _ in range(2)]
    ),
    "bidirectional.*goes backwards too": lambda: sequential(SHAPE, layers.Bidirectional(layers.LSTM(2))),
    "lstm.*goes backwards": lambda: sequential(SHAPE, layers.LSTM(2, go_backwards=True)),
    "conv1d.*mixes neighbouring steps": lambda: sequential(SHAPE, layers.Conv1D(2, 2, padding="same"), layers.GRU(2)),
    "conv1d.*mixes neighbouring.steps": lambda: sequential(
        SHAPE, layers.Conv1D(2, 2, padding="causal", activation="softmax"), layers.GRU(2)
    ),
    "masking.*masks steps": lambda: sequential(SHAPE, layers.Masking(), layers.LSTM(2)),
    "multi_head_attention.*attends": lambda: functional(
        lambda x: layers.LSTM(2)(layers.MultiHeadAttention(1, 2)(x, x))
    ),
    "pooling.*pools steps": lambda: sequential(
        SHAPE, layers.LSTM(2, return_sequences=True), layers.GlobalAveragePooling1D()
    ),
    "flatten.*alone and alike": lambda: sequential(SHAPE, layers.LSTM(2, return_sequences=True), layers.Flatten()),
    "layer_normalization.*alone and alike": lambda: sequential(
        SHAPE, layers.LayerNormalization(axis=[1, 2]), layers.LSTM(2)
    ),
    "positions.*alone and alike": lambda: sequential(SHAPE, Positions(), layers.LSTM(2)),
    "gru.*begins with states that it is given": lambda: functional(states_handed_on),
    "hands its states on": lambda: functional(lambda x: layers.GRU(4, return_state=True)(x)[1]),
    "rnn.*cannot be walked back.*no gradient for it": lambda: sequential(SHAPE, layers.RNN(Opaque(3))),
    "has a loop of its own": lambda: sequential(SHAPE, OwnLoop(layers.GRUCell(2))),
    "repeat_vector|begins anew": lambda: sequential(SHAPE, layers.GRU(2), layers.RepeatVector(3), layers.GRU(2)),
    "mixes sequences with": lambda: functional(
        lambda x: layers.Dot((2, 1))([layers.GRU(2, return_sequences=True)(x), layers.GRU(2)(x)])
    ),
    "computes in float16": lambda: sequential(SHAPE, layers.GRU(2, dtype="mixed_float16")),
    "no recurrent layer": lambda: sequential(SHAPE, layers.Dense(2)),
    "some outputs are of every step": lambda: functional(
        lambda x: [layers.GRU(2, return_sequences=True)(x), layers.GRU(2)(x)]
    ),
}


def test_a_model_within_a_model_with_several_inputs_is_read_through():
    first, second = keras.Input(SHAPE), keras.Input(SHAPE)
    inner = keras.Model([first, second], layers.Subtract()([layers.Multiply()([first, first]), second]))
    model = functional(lambda x: layers.GRU(2)(inner([layers.Dense(3)(x), x])))
    kinds = [type(call.operation).__name__ for call in recurrence(model, SHAPE, "output").calls]
    assert kinds == ["Dense", "Multiply", "Subtract", "GRU"]


@pytest.mark.parametrize("reason", UNFIT)
def test_the_layer_that_makes_a_model_unfit_is_named(reason):
    with pytest.raises(Unfit, match=reason):
        recurrence(UNFIT[reason](), SHAPE, "output")


def test_models_without_a_graph_or_a_time_axis_are_unfit():
    class Written(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = layers.GRU(2)

        def call(self, inputs):
            return self.inner(inputs)

    with pytest.raises(Unfit, match="Python code"):
        recurrence(Written(), SHAPE, "output")
    flat = sequential((18,), layers.Reshape(SHAPE), layers.GRU(2))
    with pytest.raises(Unfit, match="no time axis"):
        recurrence(flat, (18,), "output")


def test_only_what_the_target_needs_is_judged():
    source = keras.Input(SHAPE)
    fit = layers.Dense(2, name="fit")(layers.LSTM(3)(source))
    unfit = layers.Dense(2, name="unfit")(layers.Bidirectional(layers.LSTM(3))(source))
    model = keras.Model(source, {"fit": fit, "unfit": unfit})
    found = recurrence(model, SHAPE, "fit")
    assert [call.operation.name for call in found.head] == ["fit"]
    assert not found.is_sequence
    with pytest.raises(Unfit, match="bidirectional"):
        recurrence(model, SHAPE, "unfit")


def test_a_graph_is_read_in_order_through_models_within_it():
    inner = sequential(SHAPE, layers.Dense(4, name="embed"), layers.GRU(5, return_sequences=True, name="deep"))
    model = sequential(SHAPE, inner, layers.Dense(2, name="out"))
    found = recurrence(model, SHAPE, "output")
    assert [call.operation.name for call in found.calls] == ["embed", "deep", "out"]
    assert [call.operation.name for call in found.inner] == ["embed", "deep"]
    assert [found.widths[value] for value in found.sources] == [5]
    assert found.is_sequence


def test_the_window_is_a_source_where_outputs_see_it_past_the_recurrent_layers():
    model = functional(lambda x: layers.Dense(2)(layers.Concatenate()([x, layers.GRU(4, return_sequences=True)(x)])))
    found = recurrence(model, SHAPE, "output")
    assert [found.widths[value] for value in found.sources] == [3, 4]


@pytest.mark.parametrize(
    "pick", [lambda h: h[:, -1], lambda h: h[:, -1, :], lambda h: ops.take(h, SHAPE[0] - 1, axis=1)]
)
def test_a_step_that_is_picked_is_the_last(pick):
    model = functional(lambda x: layers.Dense(1)(pick(layers.GRU(4, return_sequences=True)(x))))
    assert not recurrence(model, SHAPE, "output").is_sequence


def test_stacked_cells_follow_one_another():
    stack = layers.RNN(layers.StackedRNNCells([layers.LSTMCell(4), layers.GRUCell(3, reset_after=False)]))
    found = recurrence(sequential(SHAPE, stack), SHAPE, "output")
    (cells,) = found.cells.values()
    assert [type(cell).__name__ for cell in cells] == ["Gated", "AnyCell"]
    assert [cell.widths for cell in cells] == [(4, 4), (3,)]


# ---- from an inner layer on ----------------------------------------------------------------------------


def after(model: keras.Model, name: str, shape: tuple[int, ...] = SHAPE):
    return recurrence(model, shape, after=layer_named(model, name, "wrt", also=""))


def test_what_comes_after_a_layer_is_a_recurrence_of_its_own():
    inner = sequential(SHAPE, layers.LSTM(4, return_sequences=True, name="first"), layers.Dense(5, name="embed"))
    model = sequential(SHAPE, inner, layers.GRU(3, name="deep"), layers.Dense(2, name="out"))
    found = after(model, "first", (6, 4))
    assert [call.operation.name for call in found.calls] == ["embed", "deep"]
    assert [call.operation.name for call in found.head] == ["out"]


@pytest.mark.parametrize(
    ("model", "name", "shape", "said"),
    [
        (lambda: sequential(SHAPE, layers.LSTM(4, name="it"), layers.Dense(2)), "it", (4,), "no sequence"),
        (
            lambda: sequential(SHAPE, layers.LSTM(4, name="it", return_sequences=True), layers.Flatten()),
            "it",
            (6, 4),
            "no recurrent layer",
        ),
    ],
)
def test_a_layer_that_the_rest_does_not_begin_with(model, name, shape, said):
    with pytest.raises(Unfit, match=said):
        after(model(), name, shape)
