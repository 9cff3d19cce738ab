"""Models of half precision are computed in full, in process as in jobs, and it is said."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import sensitivity
from sensitivity.errors import Refused
from sensitivity.loading import cast, in_full_precision
from tests.conftest import sequential, tape_jacobian, worst
from tests.describing import describe_call

SHAPE = (5, 2)
WINDOWS = np.random.default_rng(0).standard_normal((4, *SHAPE)).astype("float32")
DRAWN = "glorot_uniform"  # Keras has no orthogonal matrices of bfloat16
POLICIES = ("mixed_float16", "mixed_bfloat16", "float16", "bfloat16")


@keras.saving.register_keras_serializable("test_precision")
class Scaled(keras.Model):
    """A subclassed model that has a configuration, and leaves dtypes to the policy in force."""

    def __init__(self, units: int, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.inner = keras.Sequential([layers.LSTM(units), layers.Dense(2)])

    def call(self, windows):
        return 2.0 * self.inner(windows)

    def get_config(self):
        return {"units": self.units}


class Stubborn(keras.Model):
    """One that is of half precision whatever its configuration says."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(2, dtype="mixed_float16")

    def call(self, windows):
        return self.inner(keras.ops.reshape(windows, (-1, 10)))


def functional(policy):
    source = keras.Input(SHAPE)
    hidden = layers.LSTM(3, return_sequences=True, recurrent_initializer=DRAWN, dtype=policy)(source)
    return keras.Model(source, layers.Dense(2, dtype=policy)(layers.Flatten(dtype=policy)(hidden)))


def mixed_with_full(policy):
    return sequential(SHAPE, layers.GRU(3, dtype=policy), layers.Dense(2, dtype="float32"))


def subclassed(policy):
    before = keras.config.dtype_policy()
    try:
        keras.config.set_dtype_policy(policy)
        model = Scaled(3)
        model(WINDOWS)
    finally:
        keras.config.set_dtype_policy(before)
    return model


def reference(model) -> np.ndarray:
    """In float64, from the weights as they are kept."""
    return tape_jacobian(cast(model, "float64"), WINDOWS.astype("float64"))


@pytest.mark.parametrize(
    ("build", "policy"),
    [*((functional, name) for name in POLICIES), (mixed_with_full, "mixed_float16"), (subclassed, "mixed_bfloat16")],
)
def test_half_precision_is_computed_in_full(build, policy):
    model = build(policy)
    found, report = sensitivity.jacobian(model, WINDOWS, report=True)
    assert found.dtype == "float32"
    assert worst(found, reference(model)) < 1e-5
    assert f"computed in float32: the model's policy is {policy}" in report.lost
    assert f"policy is {policy}" in str(report)


def test_new_weights_are_taken_over():
    model = mixed_with_full("mixed_float16")
    before = sensitivity.jacobian(model, WINDOWS)
    model.set_weights([2 * weight for weight in model.get_weights()])
    after, report = sensitivity.jacobian(model, WINDOWS, report=True)
    assert report.reused
    assert worst(after, reference(model)) < 1e-5
    assert worst(before, after) > 0.1


def test_a_model_of_half_precision_that_gets_a_layer_has_a_twin_with_it():
    model = sequential(
        SHAPE, layers.Flatten(), layers.Dense(3, dtype="mixed_float16"), layers.Dense(2, dtype="float32")
    )
    windows = np.random.default_rng(0).standard_normal((4, *SHAPE)).astype("float32")
    before = sensitivity.jacobian(model, windows)
    model.add(layers.Rescaling(3.0, dtype="float32"))
    assert worst(sensitivity.jacobian(model, windows), 3 * before) < 1e-6


@keras.saving.register_keras_serializable("test_precision")
class Remembering(layers.Layer):
    """Keeps a number that neither its weights nor its configuration have."""

    shift = 0.0

    def call(self, inputs):
        return inputs + self.shift


def test_a_layer_whose_copy_forgets_a_number_is_not_cast():
    model = sequential(SHAPE, Remembering(), layers.Flatten(), layers.Dense(2, "tanh"))
    assert cast(model, "float64") is not model
    model.layers[0].shift = 2.0
    with pytest.raises(Refused, match="its copy's predictions are off by"):
        cast(model, "float64")


def test_full_precision_is_taken_as_it_is():
    model = mixed_with_full("float32")
    assert in_full_precision(model, {}) is model
    assert describe_call(model, SHAPE, of="output", dtype="float32").lost == ()


def test_several_policies_are_all_named():
    model = sequential(SHAPE, layers.GRU(3, dtype="mixed_float16"), layers.Dense(2, dtype="mixed_bfloat16"))
    _, report = sensitivity.jacobian(model, WINDOWS, report=True)
    assert "computed in float32: the model's policies are mixed_bfloat16 and mixed_float16" in report.lost


@pytest.mark.parametrize("build", [Stubborn, lambda: Stubborn(dtype="float16")])
def test_what_cannot_be_rebuilt_is_refused(build):
    model = build()
    model(WINDOWS)
    with pytest.raises(Refused, match="mixed_float16") as refusal:
        sensitivity.jacobian(model, WINDOWS)
    assert refusal.value.key == "model"


def test_the_policy_in_force_is_left_as_it_was():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        sensitivity.jacobian(mixed_with_full("mixed_float16"), WINDOWS)
        assert keras.config.dtype_policy().name == "mixed_float16"
    finally:
        keras.config.set_dtype_policy("float32")
