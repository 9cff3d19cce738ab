"""What is differentiated is what `model.predict` computes, whatever the default of a layer's `training` is."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import sensitivity
from sensitivity.audit import audit, require_independent
from sensitivity.engine import Tuned
from sensitivity.errors import Refused
from sensitivity.model import Target
from sensitivity.setting import Setting
from tests.conftest import sequential, worst
from tests.describing import describe_call

SHAPE = (6, 2)


def windows_of(count: int = 5) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((count, *SHAPE)).astype("float32")


class Doubling(layers.Layer):
    """Trains by default, and gives twice as much then."""

    def call(self, inputs, training=True):
        return 2.0 * inputs if training else inputs


class Noisy(layers.Layer):
    """Trains by default, and is random then."""

    def call(self, inputs, training=True):
        return inputs + tf.random.normal(tf.shape(inputs)) if training else inputs


class Inherited(keras.Model):
    """Says to no layer whether it trains."""

    def __init__(self, *stages):
        super().__init__()
        self.stages, self.head = list(stages), layers.LSTM(3)

    def call(self, windows, training=None):
        for stage in self.stages:
            windows = stage(windows)
        return self.head(windows)


class Unaware(keras.Model):
    """Takes no `training`: by Keras' own rule its layers have their defaults in `predict`."""

    def __init__(self, stage):
        super().__init__()
        self.stage, self.head = stage, layers.LSTM(3)

    def call(self, windows):
        return self.head(self.stage(windows))


class Cell(layers.SimpleRNNCell):
    """A cell that trains by default."""

    def call(self, sequence, states, training=True):
        output, states = super().call(sequence, states, training=training)
        return (2.0 * output if training else output), states


def built_in_training(*stages):
    source = value = keras.Input(SHAPE)
    for stage in stages:
        value = stage(value, training=True)
    return keras.Model(source, layers.LSTM(3, return_sequences=True)(value))


MODELS = {
    "a default": lambda: sequential(SHAPE, Doubling(), layers.LSTM(3, return_sequences=True), layers.Dense(1)),
    "a random default": lambda: sequential(SHAPE, Noisy(), layers.LSTM(3)),
    "a default in a subclassed model": lambda: Inherited(Doubling(), Noisy()),
    "a default that predict keeps": lambda: Unaware(Doubling()),
    "a default of a cell": lambda: sequential(SHAPE, layers.RNN(Cell(3), return_sequences=True), layers.Dense(1)),
    "dropout built in training": lambda: built_in_training(layers.Dropout(0.5), layers.GaussianNoise(1.0)),
    "normalization built in training": lambda: built_in_training(layers.BatchNormalization()),
    "recurrent dropout": lambda: sequential(SHAPE, layers.LSTM(3, dropout=0.5, recurrent_dropout=0.5)),
}


SCANNED = ("a default", "a default of a cell", "dropout built in training", "recurrent dropout")


@pytest.mark.parametrize(
    ("name", "kernel"), [*((name, "batch_jacobian") for name in MODELS), *((name, "scan") for name in SCANNED)]
)
def test_jacobians_are_those_of_predict(name, kernel):
    keras.utils.set_random_seed(1)
    model, windows = MODELS[name](), windows_of(3)
    model(windows)
    pfor = {} if kernel == "scan" else {"experimental_use_pfor": False}
    found = sensitivity.jacobian(model, windows, kernel=kernel, windows_per_call=3, **pfor)
    step = 1e-2
    for feature in range(2):
        ahead, behind = (windows + sign * step * (np.arange(2) == feature) for sign in (1, -1))
        slope = (model.predict(ahead, verbose=0) - model.predict(behind, verbose=0)) / (2 * step)
        assert worst(found[..., feature].sum(-1), slope) < 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_the_audit_says_how_near_predictions_are_to_predict(name):
    keras.utils.set_random_seed(1)
    model = MODELS[name]()
    model(windows_of())
    target = Target(model, describe_call(model, SHAPE, of="output", dtype="float32"))
    require_independent(target, windows_of())
    kernel = Tuned(target, Setting("batch_jacobian", 5, experimental_use_pfor=False))
    assert audit(target, kernel, windows_of()).predict_error < 1e-5


class InItsOwnUnits(keras.Model):
    """Predicts in other units than it is trained in."""

    def predict_step(self, data):
        return 10.0 * super().predict_step(data)


class Shifted(keras.Model):
    def predict(self, x, **options):
        return super().predict(x, **options) + 1.0


@pytest.mark.parametrize("kind", [InItsOwnUnits, Shifted])
def test_a_model_whose_predict_does_more_is_refused_with_the_figure(kind):
    source = keras.Input(SHAPE)
    model = kind(source, layers.LSTM(2)(source))
    with pytest.raises(Refused, match=r"differs from its predict by [0-9.]+e"):
        sensitivity.jacobian(model, windows_of())
    kernel_target = Target(model, describe_call(model, SHAPE, of="output", dtype="float32"))
    kernel = Tuned(kernel_target, Setting("batch_jacobian", 5, experimental_use_pfor=False))
    with pytest.raises(Refused, match="predict_step"):
        audit(kernel_target, kernel, windows_of())


def test_a_layer_that_is_told_to_train_is_refused_where_predict_is_random():
    class Told(keras.Model):
        def __init__(self):
            super().__init__()
            self.drop, self.head = layers.Dropout(0.5, name="drop"), layers.LSTM(3)

        def call(self, windows, training=None):
            return self.head(self.drop(windows, training=True))

    model = Told()
    model(windows_of())
    with pytest.raises(Refused, match="'drop' answers differently each time"):
        sensitivity.jacobian(model, windows_of())
