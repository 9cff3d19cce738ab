"""Derivatives by weights against float64 tapes, sample by sample, on models of each kind; and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import sensitivity
from sensitivity.errors import Refused
from sensitivity.kept import kept_with
from sensitivity.loading import cast
from tests.conftest import sequential, worst

WINDOWS = np.random.default_rng(3).standard_normal((5, 6, 2)).astype("float32")
CLOSE, CLOSE_IN_FLOAT64 = 1e-5, 1e-6
PLAIN = {"kernel": "batch_jacobian", "windows_per_call": 5, "experimental_use_pfor": False}  # not timed


def with_weights(model: keras.Model) -> keras.Model:
    random = np.random.default_rng(1)
    model.set_weights([random.uniform(-0.5, 0.5, weight.shape) for weight in model.get_weights()])
    return model


def net(*parts: keras.Layer) -> keras.Model:
    return with_weights(sequential((6, 2), *parts))


def attention() -> keras.Model:
    inputs = keras.Input((6, 2))
    seen = layers.MultiHeadAttention(2, 2, name="attention")(inputs, inputs)
    return with_weights(keras.Model(inputs, layers.Dense(1)(layers.Flatten()(layers.LayerNormalization()(seen)))))


@keras.saving.register_keras_serializable("tests")
class TimeFirst(keras.layers.Layer):
    """A dense layer that is called on (time, batch, feature)."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.dense = layers.Dense(2, "tanh", name="inner")

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.dense.build(shape)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.transpose(self.dense(tf.transpose(inputs, (1, 0, 2))), (1, 0, 2))


MODELS = {
    "dense": lambda: net(layers.Flatten(), layers.Dense(4, "tanh"), layers.Dense(2)),
    "conv": lambda: net(
        layers.Conv1D(3, 3, strides=2, padding="same", activation="tanh"),
        layers.Conv1D(2, 2, dilation_rate=2, padding="causal"),
        layers.Flatten(),
        layers.Dense(2),
    ),
    "lstm": lambda: net(layers.LSTM(2, return_sequences=True), layers.SimpleRNN(2), layers.Dense(1)),
    "gru": lambda: net(
        layers.GRU(3, return_sequences=True, go_backwards=True), layers.TimeDistributed(layers.Dense(2))
    ),
    "bidirectional": lambda: net(layers.Bidirectional(layers.LSTM(2), name="both"), layers.Dense(1)),
    "attention": attention,
    "masked": lambda: net(layers.Masking(), layers.GRU(2), layers.Dense(2)),
    "time first": lambda: net(TimeFirst(), layers.Flatten(), layers.Dense(1)),
}
WAYS = {"attention": "side by side", "masked": "one by one", "time first": "side by side"}


@dataclass(frozen=True)
class Reference:
    """A model, and its derivatives by all weights, one sample after the other, in float64."""

    model: keras.Model

    @cached_property
    def exact(self) -> keras.Model:
        return cast(self.model, "float64")

    @cached_property
    def rows(self) -> tf.types.experimental.PolymorphicFunction:
        """`(lag, feature)` → `(outputs, parameter)`"""
        variables = self.exact.trainable_variables

        @tf.function(autograph=False)
        def of_one(window: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape(persistent=True) as tape:
                outputs = tf.unstack(tf.reshape(self.exact(window[None]), (-1,)))
            found = [tape.gradient(one, variables, unconnected_gradients="zero") for one in outputs]
            return tf.stack([tf.concat([tf.reshape(part, (-1,)) for part in parts], 0) for parts in found])

        return of_one

    def all_rows(self) -> np.ndarray:
        return np.stack([self.rows(tf.constant(window)).numpy() for window in WINDOWS.astype("float64")])

    @cached_property
    def jacobian(self) -> np.ndarray:
        return self.all_rows()

    @cached_property
    def hessian(self) -> np.ndarray:
        """`(batch, outputs, parameter, parameter)` by central differences of gradients: to 1e-9 in float64."""
        columns = []
        for variable in self.exact.trainable_variables:
            kept = variable.numpy()
            for place in np.ndindex(kept.shape):
                sides = []
                for step in (1e-5, -1e-5):
                    moved = kept.copy()
                    moved[place] += step
                    variable.assign(moved)
                    sides.append(self.all_rows())
                columns.append((sides[0] - sides[1]) / 2e-5)
            variable.assign(kept)
        return np.stack(columns, -1)

    @property
    def sizes(self) -> list[int]:
        return [int(np.prod(variable.shape)) for variable in self.exact.trainable_variables]


def facts_of(model: keras.Model):
    return list(kept_with(model).facts.values())[-1]


@cache
def referred(name: str) -> Reference:
    return Reference(MODELS[name]())


@pytest.mark.parametrize("name", [name for name in MODELS if name != "bidirectional"])  # which is in float64
def test_jacobian_of_every_kind_of_model(name):
    exact = referred(name)
    found = sensitivity.jacobian(exact.model, WINDOWS, wrt="weights", **PLAIN)
    assert found.shape == (5, *exact.model.output_shape[1:], sum(exact.sizes))
    assert worst(found.reshape(exact.jacobian.shape), exact.jacobian) < CLOSE
    assert facts_of(exact.model).source.way == WAYS.get(name, "together")


def test_products_of_weights():
    exact = referred("dense")
    rows, random = exact.jacobian, np.random.default_rng(0)
    vectors = random.standard_normal((2, *exact.model.output_shape[1:]))
    found = sensitivity.vjp(exact.model, WINDOWS, vectors, wrt="weights", **PLAIN)
    assert worst(found, np.einsum("kr,nrp->nkp", vectors.reshape(2, -1), rows)) < CLOSE
    found = sensitivity.gradient_norm(exact.model, WINDOWS, wrt="weights", **PLAIN)
    gram = sensitivity.gram(exact.model, WINDOWS, wrt="weights", **PLAIN)
    assert worst(gram.reshape(5, *[rows.shape[1]] * 2), rows @ rows.swapaxes(1, 2)) < CLOSE
    parts = np.split(rows, np.cumsum(exact.sizes)[:-1], -1)
    assert found.shape == (5, *exact.model.output_shape[1:], len(parts))
    assert (
        worst(found.reshape(5, -1, len(parts)), np.stack([np.linalg.norm(part, axis=-1) for part in parts], -1)) < CLOSE
    )


@pytest.mark.parametrize("name", ["dense", "lstm"])
def test_jvp_of_weights(name):
    exact = referred(name)
    directions = np.random.default_rng(0).standard_normal((2, sum(exact.sizes)))
    found = sensitivity.jvp(exact.model, WINDOWS, directions, wrt="weights", **PLAIN)
    assert worst(found.reshape(5, -1, 2), np.einsum("nrp,kp->nrk", exact.jacobian, directions)) < CLOSE


@pytest.mark.parametrize("name", ["conv", "lstm"])
def test_hessian_of_weights_is_symmetric(name):
    exact = referred(name)
    found = sensitivity.hessian(exact.model, WINDOWS, wrt="weights", **PLAIN).reshape(exact.hessian.shape)
    assert worst(found, exact.hessian) < CLOSE
    assert worst(found.swapaxes(-1, -2), found) < 1e-6


def test_hvp_of_weights():
    exact = referred("conv")
    directions = np.random.default_rng(0).standard_normal((1, exact.hessian.shape[-1]))
    found = sensitivity.hvp(exact.model, WINDOWS, directions, wrt="weights", **PLAIN)
    assert (
        worst(found.reshape(5, -1, 1, directions.size), np.einsum("nrpq,kq->nrkp", exact.hessian, directions)) < CLOSE
    )


def test_float64_is_right_to_float64():
    exact = referred("bidirectional")
    found = sensitivity.jacobian(exact.exact, WINDOWS, wrt="weights", **PLAIN)
    assert found.dtype == "float64"
    assert worst(found.reshape(exact.jacobian.shape), exact.jacobian) < CLOSE_IN_FLOAT64
    names = [weight.name for weight in facts_of(exact.exact).source.weights]
    assert names[0].startswith("both/forward_lstm")
    assert [name.rpartition("/")[2] for name in names] == ["kernel", "recurrent_kernel", "bias"] * 2 + [
        "kernel",
        "bias",
    ]


def test_the_guides_hessian_by_a_dense_kernel():
    """TensorFlow's guide to advanced differentiation: a Hessian by a (5, 8) kernel is (5, 8, 5, 8), and symmetric."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5,)), layers.Dense(8, "relu", name="first"), layers.Dense(6, "relu")])
    windows = np.random.default_rng(0).standard_normal((7, 5)).astype("float32")
    mean = keras.Sequential([model, keras.layers.Lambda(lambda y: tf.reduce_mean(y**2, -1, keepdims=True))])
    found = sensitivity.hessian(mean, windows, wrt="weights:*first/kernel")
    assert found.shape == (7, 1, 5, 8, 5, 8)
    kernel = model.get_layer("first").kernel
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            loss = tf.reduce_mean(model(windows) ** 2)
        gradient = inner.gradient(loss, kernel.value)
    expected = outer.jacobian(gradient, kernel.value).numpy()
    assert worst(found.mean((0, 1)), expected) < CLOSE
    flat = found.reshape(7, 40, 40)
    assert worst(flat.swapaxes(1, 2), flat) < 1e-6


def test_one_weight_keeps_its_shape_and_an_inner_layer_may_be_the_target():
    exact = referred("dense")
    first, last = (layer.name for layer in exact.model.layers[1:])
    found = sensitivity.jacobian(exact.model, WINDOWS, wrt="weights:dense*/bias", **PLAIN)
    assert found.shape == (5, 2, 4 + 2)
    found = sensitivity.jacobian(exact.model, WINDOWS, wrt=f"weights:{first}/kernel", **PLAIN)
    assert found.shape == (5, 2, 12, 4)
    assert worst(found.reshape(5, 2, -1), exact.jacobian[..., :48]) < CLOSE
    found = sensitivity.jacobian(exact.model, WINDOWS, of=first, wrt=f"weights:{first}", **PLAIN)
    assert found.shape == (5, 4, 48 + 4)
    with pytest.raises(Refused, match="with a pattern of their names"):
        sensitivity.jacobian(exact.model, WINDOWS, of=first, wrt=f"weights:{last}")


def test_a_name_that_no_weight_has_is_refused():
    model = net(layers.Flatten(), layers.Dense(4, name="first"), layers.Dense(1, name="last"))
    with pytest.raises(Refused, match=r"pattern of their names: first/kernel, first/bias, last/kernel") as refused:
        sensitivity.jacobian(model, WINDOWS, wrt="weights:nothing")
    assert refused.value.key == "wrt"


def test_sums_of_many_numbers_keep_their_digits():
    model = net(layers.Flatten(), layers.Dense(30_000, name="wide"), layers.Dense(1))
    with tf.GradientTape() as tape:
        found = model(WINDOWS[:1])
    squares = [(np.asarray(part, "float64") ** 2).sum() for part in tape.gradient(found, model.trainable_weights)]
    gram = sensitivity.gram(model, WINDOWS[:1], wrt="weights", **PLAIN)
    assert abs(gram.item() / sum(squares) - 1) < 2e-6


def test_a_pattern_of_nothing_names_nothing():
    with pytest.raises(Refused, match="did you mean 'weights:head'"):
        sensitivity.jacobian(net(layers.Flatten(), layers.Dense(1, name="head")), WINDOWS, wrt="weights:")


def test_weights_that_do_not_matter_are_refused_and_so_are_lags():
    class Idle(keras.layers.Dense):
        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            return inputs

    model = net(layers.Flatten(), Idle(12, name="idle"), layers.Dense(1))
    with pytest.raises(Refused, match="does not depend on them"):
        sensitivity.jacobian(model, WINDOWS, wrt="weights:idle")
    with pytest.raises(Refused, match="max_lag"):
        sensitivity.jacobian(model, WINDOWS, wrt="weights", max_lag=2)
    with pytest.raises(Refused, match="attributions|input"):
        sensitivity.integrated_gradients(model, WINDOWS, wrt="weights")


def test_frozen_weights_are_none_of_them():
    model = net(layers.Flatten(), layers.Dense(4, name="first"), layers.Dense(1, name="last"))
    model.get_layer("first").trainable = False
    assert sensitivity.jacobian(model, WINDOWS, wrt="weights", **PLAIN).shape == (5, 1, 5)
    model.trainable = False
    with pytest.raises(Refused, match="no trainable weights"):
        sensitivity.jacobian(model, WINDOWS, wrt="weights")


def test_a_layer_may_be_called_weights():
    model = sequential((3,), layers.Dense(2, "tanh", name="weights"), layers.Dense(1))
    windows = np.random.default_rng(0).standard_normal((4, 3)).astype("float32")
    by_layer = sensitivity.jacobian(model, windows, wrt="weights")
    assert worst(by_layer, np.broadcast_to(model.get_weights()[2].T, (4, 1, 2))) < 1e-6
    assert sensitivity.jacobian(model, windows, wrt="weights:*").shape == (4, 1, 3 * 2 + 2 + 2 + 1)
    model = sequential((3,), layers.Dense(3, name="first"), layers.Dense(2, name="weights"), layers.Dense(1))
    with pytest.raises(Refused, match="'weights'"):  # which comes after it
        sensitivity.jacobian(model, windows, of="first", wrt="weights")
