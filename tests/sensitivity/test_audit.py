from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from sensitivity.audit import audit, require_independent
from sensitivity.engine import Tuned
from sensitivity.errors import Refused
from sensitivity.model import Target
from sensitivity.setting import Setting
from tests.conftest import in_training, sequential
from tests.describing import describe_call

SHAPE = (6, 2)


def windows_of(count: int = 5) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((count, *SHAPE)).astype("float32")


def through(*stages):
    source = value = keras.Input(SHAPE)
    for stage in stages:
        value = stage(value)
    return keras.Model(source, layers.Dense(1, name="head")(layers.Flatten()(value)))


def first_two_swapped(samples):
    return tf.concat([samples[1:2], samples[:1], samples[2:]], 0)


class Odd(layers.SimpleRNNCell):
    """A cell that adds what `disturbance` gives for its states."""

    def __init__(self, disturbance, **options):
        super().__init__(3, **options)
        self.disturbance = disturbance

    def call(self, sequence, states, training=False):
        output, states = super().call(sequence, states, training=training)
        return output + self.disturbance(states[0]), states


class Coupled(keras.Model):
    """Subclassed: the audit sees no graph, only calls."""

    def __init__(self):
        super().__init__()
        self.inner = through(lambda x: layers.BatchNormalization(name="deep_norm")(x, training=True))

    def call(self, windows):
        return self.inner(windows)


class Later(layers.Layer):
    """Knows which step it is by counting its calls."""

    count = 0

    def call(self, inputs):
        self.count += 1
        return inputs if self.count <= 3 else 2.0 * inputs

    def compute_output_shape(self, shape):
        return shape


class Rewound(keras.Model):
    def __init__(self):
        super().__init__()
        self.later, self.recurrent = Later(), layers.LSTM(3)
        self.steps = layers.TimeDistributed(self.later, name="later")

    def call(self, windows):
        self.later.count = 0
        return self.recurrent(self.steps(windows))


class Sparse(layers.Layer):
    def call(self, inputs):
        return tf.sparse.from_dense(inputs)


class Kept(layers.Layer):
    """Keeps what it computed first."""

    weights_by_step = None

    def call(self, inputs):
        if self.weights_by_step is None:
            self.weights_by_step = 2.0 * tf.constant(np.linspace(0, 1, 6)[:, None], "float32")
        return inputs * self.weights_by_step, None


class Staged(keras.Model):
    """Built before it is called, and subclassed: nothing is known of what it does but by calling it."""

    def __init__(self, *stages):
        super().__init__()
        self.stages, self.flat, self.head = stages, layers.Flatten(), layers.Dense(2)

    def build(self, shape):
        self.head.build((None, 12))
        self.built = True

    def call(self, windows):
        for stage in self.stages:
            windows = stage(windows)
        return self.head(self.flat(windows))


class Paired(layers.SimpleRNNCell):
    """A cell with a layer that is applied to each of two parts of its input."""

    def __init__(self):
        super().__init__(3)
        self.each = layers.TimeDistributed(layers.Dense(2))

    def call(self, sequence, states, training=False):
        pair = self.each(tf.stack([sequence, 0.5 * sequence], 1))
        return super().call(sequence + pair[:, 0] * pair[:, 1], states)


def above_0(x):
    return x > 0


UNUSUAL = {
    "sparse": lambda: Staged(Sparse(), tf.sparse.to_dense),
    "kept": lambda: Staged(Kept(), lambda pair: pair[0]),
    "booleans": lambda: through(
        lambda x: x * layers.Lambda(lambda y: tf.cast(y, "float32"))(layers.TimeDistributed(layers.Lambda(above_0))(x))
    ),
    "within a cell": lambda: sequential(SHAPE, layers.RNN(Paired())),
}


@pytest.mark.parametrize("model", UNUSUAL.values(), ids=UNUSUAL)
def test_layers_may_do_much(model):
    model = model()
    model.build((None, *SHAPE))
    target = Target(model, describe_call(model, SHAPE, of="output", dtype="float32"))
    require_independent(target, windows_of())
    assert np.isfinite(model(windows_of())).all()


@pytest.mark.parametrize(
    ("model", "name", "what"),
    [
        (
            lambda: through(in_training(layers.BatchNormalization(name="norm"))),
            "norm",
            "influence each other",
        ),
        (
            lambda: through(layers.Lambda(lambda x: x - tf.reduce_mean(x, axis=0, keepdims=True), name="centred")),
            "centred",
            "influence each other",
        ),
        (
            lambda: through(lambda x: x - keras.ops.mean(x, axis=0, keepdims=True), layers.Dense(2, name="next")),
            "next",
            "something before .* influence each other",
        ),
        (lambda: through(layers.Lambda(lambda x: x - x[-1:], name="last")), "last", "influence each other"),
        (lambda: through(layers.Lambda(lambda x: x - x[1:2], name="second")), "second", "influence each other"),
        (
            lambda: through(layers.Lambda(lambda x: x / tf.reduce_max(tf.abs(x)), name="largest")),
            "largest",
            "influence each other",
        ),
        (
            lambda: through(layers.Lambda(lambda x: x + tf.where(x[:1, :1, :1] > 0, np.nan, 0.0), name="poison")),
            "poison",
            "influence each other",
        ),
        (Coupled, "deep_norm", "influence each other"),
        (
            lambda: through(in_training(layers.Dropout(0.5, name="drop"))),
            "drop",
            "differently each time",
        ),
        (
            lambda: through(layers.RNN(Odd(lambda state: np.random.default_rng().normal(), name="drawn"))),
            "drawn",
            "differently each time",
        ),
        (
            lambda: through(layers.RNN(Odd(lambda state: tf.random.normal((3,), seed=1), name="seeded"))),
            "seeded",
            "differently each time",
        ),
        (
            lambda: through(layers.TimeDistributed(layers.Lambda(lambda x: tf.roll(x, 1, 0)), name="rolled")),
            "rolled",
            "influence each other",
        ),
        (
            lambda: through(layers.TimeDistributed(layers.Lambda(first_two_swapped), name="swapped")),
            "swapped",
            "influence each other",
        ),
        (lambda: Rewound(), "later", "influence each other"),
        (
            lambda: through(layers.RNN(Odd(lambda state: tf.reduce_mean(state, 0), name="levelled"))),
            "levelled",
            "influence each other",
        ),
    ],
)
def test_a_model_without_single_jacobians_is_refused_by_the_layers_name(model, name, what):
    model = model()
    target = Target(model, describe_call(model, SHAPE, of="output", dtype="float32"))
    with pytest.raises(Refused, match=what) as refusal:
        require_independent(target, windows_of())
    assert f"layer '{name}'" in str(refusal.value)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda x: tf.debugging.assert_less(x, -1e9) or x, "called"),
        (lambda x: tf.raw_ops.PreventGradient(input=x, message="no way back"), "differentiated"),
    ],
)
def test_a_model_that_fails_on_its_series_is_refused(function, what):
    kernel, target = kernel_and_target(through(layers.Flatten()))
    broken = keras.Model(target.model.inputs, layers.Lambda(function, output_shape=(1,))(target.model.outputs[0]))
    target = Target(broken, target.facts)

    def prove():
        require_independent(target, windows_of())
        audit(target, kernel, windows_of())

    with pytest.raises(Refused, match=f"fails when {what}"):
        prove()


def test_a_stateful_layer_is_refused_by_its_name():
    source = keras.Input(SHAPE, batch_size=5)
    model = keras.Model(source, layers.LSTM(2, stateful=True, name="memory")(source))
    with pytest.raises(Refused, match="layer 'memory' keeps its state"):
        require_independent(Target(model, None), windows_of())


def kernel_and_target(model):
    facts = describe_call(model, SHAPE, of="output", dtype="float32")
    target = Target(model, facts)
    return Tuned(target, Setting("batch_jacobian", 5, experimental_use_pfor=False)), target


@pytest.mark.parametrize(
    "model",
    [
        lambda: sequential(SHAPE, layers.LSTM(3, return_sequences=True), layers.Dense(2)),
        lambda: through(layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(4, activation="relu")),
        lambda: sequential((12,), layers.Dense(3, activation="tanh")),
    ],
)
def test_a_sound_model_passes_with_small_figures(model):
    model = model()
    shape = model.input_shape[1:]
    facts = describe_call(model, shape, of="output", dtype="float32")
    target = Target(model, facts)
    kernel = Tuned(target, Setting("batch_jacobian", 5, experimental_use_pfor=False))
    figures = audit(target, kernel, windows_of(3))
    assert figures.vjp_error < 1e-5
    assert figures.jvp_error < 1e-5
    assert figures.difference_error < 1e-3


def test_a_wrong_kernel_is_refused():
    kernel, target = kernel_and_target(through(layers.Dense(3)))
    with pytest.raises(Refused, match="vector-Jacobian product"):
        audit(target, lambda samples: (kernel(samples)[0], 1.001 * kernel(samples)[1]), windows_of())


@keras.saving.register_keras_serializable()
class StraightThrough(layers.Layer):
    def call(self, x):
        return tf.grad_pass_through(tf.round)(x)


def test_a_replaced_gradient_is_reported_not_refused():
    kernel, target = kernel_and_target(through(StraightThrough()))
    figures = audit(target, kernel, windows_of())
    assert figures.vjp_error < 1e-5
    assert figures.difference_error > 0.01


def test_a_model_without_a_float64_twin_is_audited_all_the_same():
    kernel, target = kernel_and_target(through(layers.Lambda(lambda x: tf.cast(x, tf.float32) * tf.constant(2.0))))
    assert audit(target, kernel, windows_of()).difference_error is None
