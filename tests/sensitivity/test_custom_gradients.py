"""`tf.custom_gradient` and `tf.stop_gradient` in Keras models: every kernel gives what is written, the scan too."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import sensitivity
from sensitivity.audit import audit, few
from sensitivity.engine import Tuned
from sensitivity.kernels import KERNELS, why_not
from sensitivity.model import Target
from sensitivity.setting import Setting
from tests.conftest import sequential, tape_jacobian, worst
from tests.describing import describe_call

SHAPE = (4, 2)
WINDOWS = np.random.default_rng(0).standard_normal((4, *SHAPE)).astype("float32")

pytestmark = pytest.mark.usefixtures("one_segment")


@tf.custom_gradient
def halved(x):
    """Straight through, at half the slope."""
    return tf.tanh(x), lambda upstream: 0.5 * upstream


@tf.custom_gradient
def clipped(x):
    return x, lambda upstream: tf.clip_by_norm(upstream, 0.01, axes=[-1])


@tf.custom_gradient
def clipped_together(x):
    return x, lambda upstream: tf.clip_by_norm(upstream, 0.01)


@keras.saving.register_keras_serializable("test_custom_gradients")
def at_half_slope(x):
    return halved(x)


def half_stopped(x):
    return tf.concat([tf.stop_gradient(x[..., :1]), x[..., 1:]], -1)


class Passes(layers.Layer):
    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, inputs):
        return self.function(inputs)


class OwnCell(layers.Layer):
    """A recurrent cell that stops the gradient of what it remembers, and halves that of its input."""

    state_size = 3

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1] + 3, 3))

    def call(self, inputs, states):
        both = tf.concat([halved(inputs), half_stopped(states[0])], -1)
        after = tf.tanh(tf.matmul(both, tf.convert_to_tensor(self.kernel)))
        return after, [after]


def stack(function, sequences=True):
    first, last = layers.LSTM(3, return_sequences=True), layers.GRU(3, return_sequences=sequences)
    return sequential(SHAPE, first, Passes(function), last, layers.Dense(2))


MODELS = {
    "halved": lambda: stack(halved),
    "half stopped": lambda: stack(half_stopped),
    "halved, last step": lambda: stack(halved, sequences=False),
    "a head that stops": lambda: sequential(SHAPE, layers.LSTM(3), Passes(half_stopped), layers.Dense(2)),
    "activation": lambda: sequential(SHAPE, layers.SimpleRNN(3, activation=halved, return_sequences=True)),
    "a cell": lambda: sequential(SHAPE, layers.RNN(OwnCell(), return_sequences=True), layers.Dense(2)),
    "no recurrence": lambda: sequential(SHAPE, layers.Dense(3), Passes(halved), layers.Flatten(), layers.Dense(2)),
}


def rows_by_hand(model) -> np.ndarray:
    """By a tape for each output of each window alone."""
    found = []
    for window in WINDOWS:
        source = tf.constant(window[None])
        size = int(np.prod(model(source).shape))
        rows = []
        for row in range(size):
            with tf.GradientTape() as tape:
                tape.watch(source)
                output = tf.reshape(model(source), (-1,))[row]
            rows.append(tape.gradient(output, source, unconnected_gradients=tf.UnconnectedGradients.ZERO)[0])
        found.append(tf.stack(rows))
    return tf.stack(found).numpy()


def by_every_kernel(model) -> dict[str, np.ndarray]:
    facts = describe_call(model, SHAPE, of="output", dtype="float32")
    target = Target(model, facts)
    able = [name for name in KERNELS if why_not(name, facts) is None]
    settings = {name: Setting(name, 4, experimental_use_pfor=name == "scan") for name in able}
    found = {name: Tuned(target, setting)(WINDOWS)[1] for name, setting in settings.items()}
    return {name: part.reshape(4, facts.target_size, *SHAPE) for name, part in found.items()}


@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_gives_the_gradient_as_it_is_written(name):
    model = MODELS[name]()
    expected, found = rows_by_hand(model), by_every_kernel(model)
    assert {"batch_jacobian", "forward"} <= set(found)
    assert ("scan" in found) == (name != "no recurrence")
    for kernel, jacobian in found.items():
        assert worst(jacobian, expected) < 1e-5, kernel


@pytest.mark.parametrize(("function", "together"), [(clipped, None), (clipped_together, 1)])
def test_clipping_inside_a_recurrent_stack_is_left_to_plain_gradients(function, together):
    model = stack(function)
    facts = describe_call(model, SHAPE, of="output", dtype="float32")
    assert (facts.scan, facts.together) == (None, together)
    assert set(by_every_kernel(model)) == {"gradient"}
    found, report = sensitivity.jacobian(model, WINDOWS, report=True)
    expected = rows_by_hand(model)
    assert worst(found.reshape(expected.shape), expected) < 1e-5
    assert worst(found, tape_jacobian(stack(tf.identity), WINDOWS)) > 0.01
    assert report.setting.kernel == "gradient"


def test_steps_are_clipped_one_by_one_where_the_model_takes_them_so():
    model = sequential(SHAPE, layers.TimeDistributed(Passes(clipped_together)), layers.Flatten(), layers.Dense(1))
    assert worst(sensitivity.jacobian(model, WINDOWS), rows_by_hand(model)) < 1e-5


def test_a_custom_gradient_that_mixes_steps_is_not_taken_apart_by_the_scan():
    @tf.custom_gradient
    def averaged(x):
        return x, lambda upstream: tf.zeros_like(upstream) + tf.reduce_mean(upstream, 1, keepdims=True)

    model = stack(averaged)
    found, report = sensitivity.jacobian(model, WINDOWS, report=True)
    expected = rows_by_hand(model)
    assert report.setting.kernel != "scan"
    assert worst(found.reshape(expected.shape), expected) < 1e-5


def test_the_audits_difference_in_float64_only_reports():
    model = sequential(SHAPE, layers.Flatten(), layers.Dense(2, activation=at_half_slope))
    target = Target(model, describe_call(model, SHAPE, of="output", dtype="float32"))
    found = audit(target, Tuned(target, Setting("batch_jacobian", 5)), few(WINDOWS))
    assert found.vjp_error < 1e-5
    assert found.difference_error is not None
    assert found.difference_error > 0.01
