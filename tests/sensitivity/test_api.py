from __future__ import annotations

import gc
import weakref

import keras
import numpy as np
import pytest
from keras import layers

import sensitivity
from sensitivity.errors import Refused
from tests.conftest import sequential, tape_jacobian, worst

SHAPE = (6, 2)


def windows_of(count: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((count, *SHAPE)).astype("float32")


def test_it_is_batch_jacobian_in_any_number_of_calls():
    model = sequential(SHAPE, layers.LSTM(3, return_sequences=True), layers.Dense(2))
    windows = windows_of(30)
    expected = tape_jacobian(model, windows)
    for memory in (None, "1GB", 120_000):
        found = sensitivity.jacobian(model, windows, memory)
        assert found.shape == (30, 6, 2, 6, 2)
        assert found.dtype == np.float32
        assert worst(found, expected) < 1e-5
    assert worst(sensitivity.jacobian(model, windows.tolist()), expected) < 1e-5


def test_a_second_call_compiles_nothing():
    model = sequential(SHAPE, layers.Flatten(), layers.Dense(1))
    sensitivity.jacobian(model, windows_of(8))
    kernels = dict(model._sensitivity_kernels)
    sensitivity.jacobian(model, windows_of(8))
    assert dict(model._sensitivity_kernels) == kernels


def test_kernels_die_with_their_model():
    model = sequential(SHAPE, layers.Flatten(), layers.Dense(1))
    sensitivity.jacobian(model, windows_of(3))
    gone = weakref.ref(model)
    del model
    keras.backend.clear_session()
    gc.collect()
    assert gone() is None


def test_one_of_several_outputs():
    source = keras.Input(SHAPE)
    flat = layers.Flatten()(source)
    model = keras.Model(source, {"a": layers.Dense(1, name="a")(flat), "b": layers.Dense(2, name="b")(flat)})
    both, b = sensitivity.jacobian(model, windows_of(2)), sensitivity.jacobian(model, windows_of(2), of="b")
    assert both.shape == (2, 1, 3, *SHAPE)
    np.testing.assert_allclose(both[:, 0, 1:], b, rtol=1e-6)


def test_float64_models_stay_float64():
    source = keras.Input(SHAPE, dtype="float64")
    model = keras.Model(source, layers.Dense(1, dtype="float64")(layers.Flatten(dtype="float64")(source)))
    found = sensitivity.jacobian(model, windows_of(2))
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found[0, 0].ravel(), model.get_weights()[0][:, 0])


def test_no_windows_give_no_jacobians():
    model = sequential(SHAPE, layers.Flatten(), layers.Dense(4))
    assert sensitivity.jacobian(model, windows_of(0)).shape == (0, 4, *SHAPE)


def test_a_memory_that_holds_no_window_is_refused_by_its_name():
    model = sequential(SHAPE, layers.Flatten(), layers.Dense(1))
    with pytest.raises(Refused, match="single window") as refusal:
        sensitivity.jacobian(model, windows_of(2), 10)
    assert refusal.value.key == "memory"


@pytest.mark.parametrize(
    ("windows", "memory"),
    [(np.zeros(3), None), (np.zeros((2, 5, 9)), None), (windows_of(2), "much"), (windows_of(2), 0)],
)
def test_bad_arguments_are_refused(windows, memory):
    model = sequential(SHAPE, layers.Flatten(), layers.Dense(1))
    with pytest.raises(Refused):
        sensitivity.jacobian(model, windows, memory)


def test_a_coupled_model_is_refused():
    source = keras.Input(SHAPE)
    model = keras.Model(source, layers.BatchNormalization(name="norm")(source, training=True))
    with pytest.raises(ValueError, match="'norm'"):
        sensitivity.jacobian(model, windows_of(4))


def test_only_public_names_are_offered():
    assert {"Job", "jacobian", "open_run", "query", "Refused"} <= set(dir(sensitivity))
    with pytest.raises(AttributeError):
        sensitivity.nothing  # noqa: B018
