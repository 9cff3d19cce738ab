"""SavedModels of several inputs: by each of them, the numbers of the Keras model in float64."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import sensitivity
from sensitivity.errors import Refused
from sensitivity.loading import cast
from sensitivity.saved_models import load_saved_model
from tests.conftest import worst

RANDOM = np.random.default_rng(0)
WEATHER = RANDOM.standard_normal((5, 6, 2)).astype("float32")
GIVEN = {
    "weather": WEATHER,
    "site": RANDOM.standard_normal((5, 3)).astype("float32"),
    "kind": RANDOM.integers(0, 4, (5, 1)),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Inputs by name, one of them whole numbers, with an LSTM on the way."""
    weather, site = keras.Input((6, 2), name="weather"), keras.Input((3,), name="site")
    kind = keras.Input((1,), name="kind", dtype="int32")
    beside = [layers.Dense(3, "tanh")(site), layers.Flatten()(layers.Embedding(4, 2)(kind))]
    both = layers.Concatenate()([layers.LSTM(3)(weather), *beside])
    model = keras.Model({"weather": weather, "site": site, "kind": kind}, layers.Dense(2)(both))
    path = tmp_path_factory.mktemp("two") / "saved"
    model.export(path, verbose=False)
    return model, load_saved_model(path)


@pytest.mark.parametrize("wrt", ["weather", "site"])
@pytest.mark.parametrize("product", ["jacobian", "hvp"])
def test_by_each_input(exported, wrt, product):
    model, loaded = exported
    compute, more = getattr(sensitivity, product), (GIVEN[wrt][:1],) if product == "hvp" else ()
    expected = compute(cast(model, "float64"), GIVEN, *more, wrt=wrt)
    assert worst(compute(loaded, GIVEN, *more, wrt=wrt), expected) < 1e-5
    assert loaded.bound == ""


def saved(call, *specs, path):
    module = tf.Module()
    module.called = tf.function(call, input_signature=specs, autograph=False)
    signature = module.called.get_concrete_function()
    tf.saved_model.save(module, str(path / "saved"), signatures={"serving_default": signature})
    return path / "saved"


def test_a_fixed_number_of_windows(tmp_path):
    specs = tf.TensorSpec((2, 6, 2), name="weather"), tf.TensorSpec((2, 2), name="depth")
    path = saved(lambda weather, depth: tf.reduce_sum(weather**2, 1) * depth, *specs, path=tmp_path)
    found = sensitivity.jacobian(load_saved_model(path), {"weather": WEATHER, "depth": WEATHER[:, 0]}, wrt="depth")
    assert worst(found, (WEATHER**2).sum(1)[:, :, None] * np.eye(2)) < 1e-6


def test_different_numbers_of_windows_are_refused(tmp_path):
    specs = tf.TensorSpec((2, 2), name="one"), tf.TensorSpec((3, 2), name="other")
    path = saved(lambda one, other: one + other[:2], *specs, path=tmp_path)
    with pytest.raises(Refused, match="2 and 3 windows at a time"):
        load_saved_model(path)


def test_a_number_beside_the_windows_is_refused(tmp_path):
    specs = tf.TensorSpec((None, 2), name="windows"), tf.TensorSpec((), name="rate")
    path = saved(lambda windows, rate: rate * windows, *specs, path=tmp_path)
    with pytest.raises(Refused, match="without a function of windows"):
        load_saved_model(path)


def test_whole_numbers_alone_are_refused(tmp_path):
    specs = tf.TensorSpec((None, 2), "int32", "one"), tf.TensorSpec((None, 2), "int32", "other")
    path = saved(lambda one, other: tf.cast(one + other, "float32"), *specs, path=tmp_path)
    with pytest.raises(Refused, match="int32"):
        load_saved_model(path)


class Keywords(tf.Module):
    """What is taken by keyword alone: a flag of training, and an input that may be left out."""

    @tf.function(autograph=False)
    def __call__(self, x, *, training=True, site=None):
        found = 100.0 * x[:, 0] if training else x[:, 0]
        return found if site is None else found * site


def keywords(path, *traces):
    module = Keywords()
    for trace in traces:
        module.__call__.get_concrete_function(tf.TensorSpec((None, 6, 2), name="x"), **trace)
    tf.saved_model.save(module, str(path / "saved"))
    return load_saved_model(path / "saved")


@pytest.mark.parametrize("traces", [({"training": False},), ({"training": True}, {"training": False})])
def test_a_flag_that_is_taken_by_keyword(traces, tmp_path):
    loaded = keywords(tmp_path, *traces)
    assert [tensor.name for tensor in loaded.inputs] == ["x"]
    expected = np.zeros((5, 2, 6, 2))
    expected[:, range(2), 0, range(2)] = 1
    np.testing.assert_array_equal(sensitivity.jacobian(loaded, WEATHER), expected)


def test_an_input_that_is_taken_by_keyword(tmp_path):
    site = {"training": False, "site": tf.TensorSpec((None, 2), name="site")}
    loaded = keywords(tmp_path, site, {"training": False})
    given = {"x": WEATHER, "site": WEATHER[:, 1]}
    found = sensitivity.jacobian(loaded, given, wrt="x")
    assert worst(found[:, [0, 1], 0, [0, 1]], given["site"]) < 1e-6
    assert worst(sensitivity.jacobian(loaded, given, wrt="site")[:, [0, 1], [0, 1]], WEATHER[:, 0]) < 1e-6
