"""Every kind of published model: taken, or refused for a good reason; its numbers are those of a tape in float64."""

from __future__ import annotations

from functools import cache
from itertools import cycle
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import sensitivity
from sensitivity.errors import Refused
from tests.architectures import ARCHITECTURES, WRT, built, output_of, twin, windows_of
from tests.conftest import worst

WINDOWS = 4
KERNELS = ("gradient", "batch_jacobian", "forward", "scan")
FEW = ("convolution", "transformer", "gru_d", "mamba")  # what every run of the tests has a look at
NAMES = [pytest.param(name, marks=() if name in FEW else pytest.mark.exhaustive) for name in ARCHITECTURES]


def tape(name: str, windows: Any, model: keras.Model) -> tuple[np.ndarray, np.ndarray]:
    """Predictions and Jacobian of the twin in float64, a gradient for each output number of all windows."""
    exact = twin(name, model)
    given = tf.nest.map_structure(lambda part: tf.constant(part, "float64"), windows)
    source = given[WRT[name]] if name in WRT else given
    with tf.GradientTape(persistent=True) as recorded:
        recorded.watch(source)
        found = output_of(exact, given)
        numbers = tf.unstack(tf.reshape(found, (WINDOWS, -1)), axis=1)
    rows = [recorded.gradient(number, source) for number in numbers]
    return found.numpy(), tf.reshape(tf.stack(rows, 1), (*found.shape, *source.shape[1:])).numpy()


@cache
def case(name: str) -> tuple[keras.Model, Any, np.ndarray, np.ndarray]:
    model = built(name)
    windows = windows_of(name, model, WINDOWS)
    return model, windows, *tape(name, windows, model)


def predicted(model: keras.Model, windows: Any) -> np.ndarray:
    found = model.predict(windows, verbose=0)
    return np.concatenate(list(found.values()), -1) if isinstance(found, dict) else found


@pytest.mark.parametrize("name", NAMES)
def test_the_jacobian_is_the_tapes_and_the_prediction_is_predicts(name):
    model, windows, prediction, jacobian = case(name)
    found, report = sensitivity.jacobian(model, windows, report=True, wrt=WRT.get(name, "input"))
    assert report.setting.kernel in KERNELS
    assert found.shape == jacobian.shape
    assert worst(found, jacobian) < 1e-5, str(report)
    told = report.beside["prediction"].reshape(prediction.shape)
    assert worst(told, prediction) < 1e-5
    assert worst(told, predicted(model, windows)) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_products_with_vectors_are_the_tapes(name):
    model, windows, prediction, jacobian = case(name)
    vectors = np.random.default_rng(3).standard_normal((2, *prediction.shape[1:]))
    found = sensitivity.vjp(model, windows, vectors, wrt=WRT.get(name, "input"))
    flat = jacobian.reshape(WINDOWS, vectors[0].size, -1)
    expected = np.einsum("ko,nos->nks", vectors.reshape(2, -1), flat).reshape(found.shape)
    assert worst(found, expected) < 1e-5


@pytest.mark.parametrize(("name", "kernel"), [*zip(ARCHITECTURES, cycle(KERNELS), strict=False)])
@pytest.mark.exhaustive
def test_a_kernel_that_is_asked_for_gives_these_numbers_or_says_why_not(name, kernel):
    model, windows, _, jacobian = case(name)
    knobs = {} if kernel in ("gradient", "scan") else {"experimental_use_pfor": False}
    found, refusal = given_or_refused(model, windows, kernel=kernel, wrt=WRT.get(name, "input"), **knobs)
    if refusal is None:
        assert worst(found, jacobian) < 1e-5
        return
    assert refusal.key == "kernel"
    assert kernel in refusal.given
    assert kernel != "batch_jacobian"


def given_or_refused(model: keras.Model, windows: Any, **asked: Any) -> tuple[Any, Refused | None]:
    try:
        return sensitivity.jacobian(model, windows, **asked), None
    except Refused as refusal:
        return None, refusal
