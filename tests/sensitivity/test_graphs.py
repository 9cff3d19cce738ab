"""Branches, models within models and subclassed models: every kernel that takes them gives the numbers of float64."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from sensitivity.engine import Tuned
from sensitivity.kernels import KERNELS, why_not
from sensitivity.loading import cast
from sensitivity.model import Target
from sensitivity.setting import Setting
from tests.conftest import tape_jacobian, worst
from tests.describing import describe_call

SHAPE = (4, 2)
WINDOWS = np.random.default_rng(0).standard_normal((3, *SHAPE)).astype("float32")

pytestmark = pytest.mark.usefixtures("one_segment")


def recurrent_branches():
    """Two recurrent branches and a skip, one of them a model of its own."""
    source, inner = keras.Input(SHAPE), keras.Input((None, 3))
    block = keras.Model(inner, layers.GRU(3, return_sequences=True)(layers.Dense(3, "elu")(inner)))
    wide = layers.Dense(3)(source)
    joined = layers.Add()([block(wide), layers.LSTM(3, return_sequences=True)(source), wide])
    return keras.Model(source, layers.Dense(1)(joined))


def mixed_branches():
    source = keras.Input(SHAPE)
    local = layers.Flatten()(layers.Conv1D(2, 2, activation="tanh")(source))
    both = layers.Concatenate()([local, layers.Bidirectional(layers.LSTM(2))(source)])
    return keras.Model(source, layers.Dense(2)(both))


def used_twice():
    """A model within it that is called twice, with the same weights."""
    source, inner = keras.Input(SHAPE), keras.Input((None, 2))
    block = keras.Model(inner, layers.LSTM(2, return_sequences=True)(inner))
    return keras.Model(source, layers.Dense(1)(block(block(source))))


def two_outputs():
    source = keras.Input(SHAPE)
    hidden = layers.GRU(3, return_sequences=True)(source)
    last = keras.Sequential([keras.Input((4, 3)), layers.LSTM(2), layers.Dense(2)])(hidden)
    return keras.Model(source, [last, layers.Dense(1, "softplus")(last)])


@keras.saving.register_keras_serializable("test_graphs")
class Subclassed(keras.Model):
    """A sequential model within a subclassed one, and a path beside it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = keras.Sequential([layers.LSTM(3), layers.Dense(2, "tanh")])
        self.beside = layers.Dense(2)

    def call(self, windows):
        return self.inner(windows) * self.beside(windows[:, -1])


def subclassed():
    model = Subclassed()
    model(WINDOWS)
    return model


MODELS = {
    "recurrent branches": (recurrent_branches, True),
    "mixed branches": (mixed_branches, False),
    "used twice": (used_twice, True),
    "two outputs": (two_outputs, True),
    "subclassed": (subclassed, False),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_gives_the_numbers_of_float64(name):
    build, scanned = MODELS[name]
    model = build()
    twin = cast(model, "float64")
    expected = tape_jacobian(lambda x: tf.concat(keras.tree.flatten(twin(x)), -1), WINDOWS.astype("float64"))
    target = Target(model, describe_call(model, SHAPE, of="output", dtype="float32"))
    able = {kernel for kernel in KERNELS if why_not(kernel, target.facts) is None}
    assert ("scan" in able) == scanned, target.facts.no_scan
    for kernel in able:
        setting = Setting(kernel, 3, experimental_use_pfor=kernel == "scan")
        found = Tuned(target, setting)(WINDOWS)[1]
        assert worst(found.reshape(expected.shape), expected) < 1e-5, kernel
