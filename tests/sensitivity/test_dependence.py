"""What has no derivative by a source is refused, or said; it is never given as zeros."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import sensitivity
from sensitivity.dependence import dependence
from sensitivity.errors import Refused
from sensitivity.layers import as_graph
from tests.conftest import sequential, worst

WINDOWS = np.random.default_rng(0).standard_normal((3, 5, 2)).astype("float32")
CLASSES = np.random.default_rng(0).integers(0, 7, (3, 5))


def of_classes() -> keras.Model:
    source = keras.Input((5,), dtype="int32", name="kind")
    embedded = layers.Embedding(7, 3, name="meaning")(source)
    return keras.Model(source, layers.Dense(2)(layers.LSTM(4)(embedded)))


class Looked(keras.Model):
    """Subclassed: takes floating-point numbers for classes."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = layers.Embedding(7, 3, name="meaning"), layers.LSTM(2)

    def call(self, windows):
        return self.head(self.embedding(tf.cast(windows, "int32")))


def rough(change) -> keras.Model:
    return sequential((5, 2), layers.LSTM(3, return_sequences=True), layers.Lambda(change, name="rough"))


@pytest.mark.parametrize("call", [sensitivity.jacobian, sensitivity.vjp, sensitivity.hessian])
def test_an_input_of_whole_numbers_is_refused_by_name(call):
    with pytest.raises(Refused, match='"meaning"') as refusal:
        call(of_classes(), CLASSES)
    assert "input 'kind' of whole numbers" in str(refusal.value)


@pytest.mark.parametrize("call", [sensitivity.jacobian, sensitivity.vjp])
def test_numbers_that_a_model_takes_for_classes_are_refused_by_the_operation(call):
    with pytest.raises(Refused, match=r"without a derivative, such as .*\(Cast\)"):
        call(Looked(), CLASSES.astype("float32"))


@pytest.mark.parametrize(
    ("change", "operation"),
    [
        (tf.round, "Round"),
        (tf.sign, "Sign"),
        (tf.stop_gradient, "StopGradient"),
        (lambda x: tf.cast(tf.argmax(x, -1), "float32"), "ArgMax"),
        (lambda x: tf.cast(x > 0, "float32"), "Greater"),
    ],
)
def test_what_leads_to_no_derivative_is_refused_by_the_operation(change, operation):
    with pytest.raises(Refused, match=rf"\({operation}\)"):
        sensitivity.jacobian(rough(change), WINDOWS)


def test_a_rounded_number_with_a_gradient_of_its_own_is_served():
    found = sensitivity.jacobian(rough(tf.grad_pass_through(tf.round)), WINDOWS, windows_per_call=3)
    assert np.abs(found).max() > 0


def test_what_an_embedding_gives_is_a_source():
    model = of_classes()
    found = sensitivity.jacobian(model, CLASSES, wrt="meaning", windows_per_call=3)
    rest = keras.Model(model.layers[1].output, model.output)
    embedded = model.layers[1](CLASSES)
    with tf.GradientTape() as tape:
        tape.watch(embedded)
        outputs = rest(embedded)
    assert worst(found, tape.batch_jacobian(outputs, embedded).numpy()) < 1e-6


def test_classes_are_whole_numbers():
    with pytest.raises(Refused, match="for an input of whole numbers"):
        sensitivity.jacobian(of_classes(), CLASSES + 0.5, wrt="meaning")


def test_classes_that_are_not_held_exactly_are_refused():
    with pytest.raises(Refused, match="holds exactly"):
        sensitivity.jacobian(of_classes(), CLASSES + 2**24 + 1, wrt="meaning")


def two_branches() -> keras.Model:
    rain, site = keras.Input((5, 2), name="rain"), keras.Input((3,), name="site")
    flow, level = layers.LSTM(2, name="flow"), layers.Dense(1, name="level")
    return keras.Model([rain, site], {"flow": flow(rain), "level": level(site)})


def test_an_output_that_does_not_depend_on_the_source_is_said_beside_others():
    given = {"rain": WINDOWS, "site": WINDOWS[:, 0].repeat(2, 1)[:, :3]}
    with pytest.warns(UserWarning, match="output 'level': it does not depend on the source"):
        found, report = sensitivity.jacobian(two_branches(), given, wrt="rain", report=True)
    assert np.abs(found[..., :2, :, :]).max() > 0
    assert (found[..., 2, :, :] == 0).all()
    assert any("output 'level': it does not depend on the source" in said for said in report.lost)
    with pytest.raises(Refused, match="does not depend on"):
        sensitivity.jacobian(two_branches(), given, of="level", wrt="rain")
    with pytest.raises(Refused, match="does not depend on"):
        sensitivity.jacobian(two_branches(), given, outputs=["level"], wrt="rain")


def test_lists_of_tensors_and_loops_lead_on():
    def function(x):
        rows = tf.TensorArray("float32", 3).unstack(x)
        total = tf.while_loop(lambda i, _: i < 3, lambda i, s: (i + 1, s + rows.read(i)), (0, tf.zeros((5, 2))))[1]
        found.append(dependence({"total": total, "spectrum": tf.abs(tf.signal.rfft(x)), "shape": tf.shape(x)}, x))
        return total

    found = []
    as_graph(function).get_concrete_function(tf.constant(WINDOWS))
    assert found[-1].reached == ("total", "spectrum")
    assert found[-1].unreached == ("shape",)


def test_derivatives_that_are_zero_in_all_windows_are_said():
    dead = sequential((5, 2), layers.Flatten(), layers.Dense(1, activation="relu"))
    dead.set_weights([np.zeros((10, 1)), np.full(1, -1.0)])
    with pytest.warns(UserWarning, match="every derivative by 'input' is 0"):
        sensitivity.jacobian(dead, WINDOWS, kernel="gradient", windows_per_call=3)
