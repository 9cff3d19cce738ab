"""Derivatives of a loss: against float64 tapes, for losses of each kind; what is refused."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import sensitivity
from sensitivity.errors import Refused
from sensitivity.loading import cast
from tests.conftest import sequential, worst

RANDOM = np.random.default_rng(7)
WINDOWS = RANDOM.standard_normal((6, 5, 2)).astype("float32")
ONE = RANDOM.standard_normal((6, 2)).astype("float32")
EVERY = RANDOM.standard_normal((6, 5, 2)).astype("float32")
CLASSES = np.array([0, 1, 1, 0, 1, 0])
WEIGHTS = RANDOM.random(6).astype("float32")
BY_STEP = RANDOM.random((6, 5)).astype("float32")
CLOSE = 1e-5

LSTM = sequential((5, 2), layers.LSTM(3), layers.Dense(2))
GRU = sequential((5, 2), layers.GRU(3, return_sequences=True, name="inner"), layers.Dense(2))
CONV = sequential((5, 2), layers.Conv1D(3, 3, activation="tanh"), layers.Flatten(), layers.Dense(2, "softmax"))
SCALAR = sequential((5, 2), layers.Bidirectional(layers.LSTM(2)), layers.Dense(1), layers.Reshape(()))


def asymmetric(labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    error = outputs - tf.cast(labels, outputs.dtype)
    return tf.square(error) + 0.3 * error


# Of each case: the model, its loss, labels, sample weights, and the same by hand, `(batch)` of labels and outputs.
CASES = {
    "squares": (LSTM, "mse", ONE, None, lambda y, f: tf.reduce_mean((f - y) ** 2, 1)),
    "weighted": (LSTM, "mean_absolute_error", ONE, WEIGHTS, lambda y, f: WEIGHTS * tf.reduce_mean(abs(f - y), 1)),
    "every step": (GRU, "mse", EVERY, None, lambda y, f: tf.reduce_mean((f - y) ** 2, (1, 2))),
    "summed": (
        GRU,
        keras.losses.MeanSquaredError(reduction="sum"),
        EVERY,
        None,
        lambda y, f: tf.reduce_sum(tf.reduce_mean((f - y) ** 2, 2), 1),
    ),
    "steps weighted": (
        GRU,
        keras.losses.MeanSquaredError(),
        EVERY,
        BY_STEP,
        lambda y, f: tf.reduce_mean(BY_STEP * tf.reduce_mean((f - y) ** 2, 2), 1),
    ),
    "a table": (
        LSTM,
        {"class_name": "Huber", "config": {"delta": 0.4}},
        ONE,
        None,
        lambda y, f: tf.reduce_mean(
            tf.where(abs(f - y) <= 0.4, 0.5 * (f - y) ** 2, 0.4 * abs(f - y) - 0.5 * 0.4**2), 1
        ),
    ),
    "a function": (LSTM, asymmetric, ONE, None, lambda y, f: tf.reduce_mean(asymmetric(y, f), 1)),
    "classes": (
        CONV,
        "sparse_categorical_crossentropy",
        CLASSES,
        None,
        lambda y, f: -tf.math.log(tf.gather(f, tf.cast(y, "int32"), batch_dims=1)),
    ),
    "of lower rank": (
        sequential((5, 2), layers.LSTM(2), layers.Dense(1)),
        lambda y, f: (f - y) ** 2,
        ONE[:, 0],
        None,
        lambda y, f: (f[:, 0] - y) ** 2,
    ),
    "one number": (SCALAR, "mse", ONE[:, 0], None, lambda y, f: (f - y) ** 2),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_its_gradient(case, dtype):
    model, loss, labels, weights, by_hand = CASES[case]
    exact = cast(model, "float64")
    source, known = tf.constant(WINDOWS, "float64"), tf.constant(labels, "float64")
    with tf.GradientTape() as tape:
        tape.watch(source)
        each = tf.cast(by_hand(known, exact(source)), "float64")
    expected = tape.gradient(each, source).numpy()
    given = {"of": "loss", "labels": labels, "loss": loss, "sample_weight": weights}
    found, report = sensitivity.jacobian(cast(model, dtype), WINDOWS, report=True, **given)
    close = CLOSE if dtype == "float32" else 1e-6
    assert worst(found, expected) < close
    assert worst(report.beside["prediction"], each.numpy()) < close


def of_squares() -> tuple[keras.Model, tf.Tensor, tf.Tensor]:
    return cast(LSTM, "float64"), tf.constant(WINDOWS, "float64"), tf.constant(ONE, "float64")


def test_a_batch_s_loss_is_the_mean_of_them():
    exact, _, labels = of_squares()
    _, report = sensitivity.jacobian(LSTM, WINDOWS, of="loss", labels=ONE, loss="mse", report=True)
    whole = float(keras.losses.MeanSquaredError()(labels, exact(WINDOWS)))
    assert abs(report.beside["prediction"].mean() - whole) < 1e-6


def test_its_hessian_and_products():
    """(f − y)²: 2 JᵀJ / n + 2 (f − y) ∂²f / n, by central differences of its gradient."""
    exact, source, labels = of_squares()

    def gradient(windows: np.ndarray) -> np.ndarray:
        given = tf.constant(windows)
        with tf.GradientTape() as tape:
            tape.watch(given)
            loss = tf.reduce_mean((exact(given) - labels) ** 2, 1)
        return tape.gradient(loss, given).numpy()

    steps = 1e-5 * np.eye(10).reshape(10, 1, 5, 2)
    rows = [gradient(source.numpy() + step) - gradient(source.numpy() - step) for step in steps]
    expected = np.stack(rows, 1).reshape(6, 5, 2, 5, 2) / 2e-5
    asked = {"of": "loss", "labels": ONE, "loss": "mse"}
    found = sensitivity.hessian(LSTM, WINDOWS, **asked)
    assert worst(found, expected) < CLOSE
    assert worst(found, found.transpose(0, 3, 4, 1, 2)) < 1e-6
    direction = RANDOM.standard_normal((1, 5, 2))
    along = sensitivity.hvp(LSTM, WINDOWS, direction, **asked)[:, 0]
    assert worst(along, np.einsum("nijkl,kl->nij", expected, direction[0])) < CLOSE
    directions = RANDOM.standard_normal((2, 5, 2))
    moved = sensitivity.jvp(LSTM, WINDOWS, directions, **asked)
    assert worst(moved, np.einsum("nij,dij->nd", gradient(source.numpy()), directions)) < CLOSE
    rows = gradient(source.numpy())
    assert worst(sensitivity.vjp(LSTM, WINDOWS, **asked)[:, 0], rows) < CLOSE
    assert worst(sensitivity.gram(LSTM, WINDOWS, **asked), (rows**2).sum((1, 2))) < CLOSE
    assert worst(sensitivity.smooth_gradients(LSTM, WINDOWS, noise=1e-6, samples=2, **asked), rows) < CLOSE
    norm = sensitivity.gradient_norm(LSTM, WINDOWS, **asked)
    assert worst(norm, np.linalg.norm(gradient(source.numpy()).reshape(6, -1), axis=1)) < CLOSE


def test_by_an_inner_layer_at_every_step_and_unit():
    found = sensitivity.jacobian(GRU, WINDOWS, of="loss", labels=EVERY, loss="mse", wrt="inner")
    exact = cast(GRU, "float64")
    states = exact.layers[0](tf.constant(WINDOWS, "float64"))
    with tf.GradientTape() as tape:
        tape.watch(states)
        loss = tf.reduce_mean((exact.layers[1](states) - EVERY) ** 2, (1, 2))
    assert worst(found, tape.gradient(loss, states).numpy()) < CLOSE


def test_of_some_outputs_and_steps():
    asked = {"of": "loss", "loss": "mse", "outputs": [1], "output_steps": [-2, -1]}
    found = sensitivity.jacobian(GRU, WINDOWS, labels=EVERY[:, -2:, 1:], **asked)
    exact, source = cast(GRU, "float64"), tf.constant(WINDOWS, "float64")
    with tf.GradientTape() as tape:
        tape.watch(source)
        loss = tf.reduce_mean((exact(source)[:, -2:, 1:] - EVERY[:, -2:, 1:]) ** 2, (1, 2))
    assert worst(found, tape.gradient(loss, source).numpy()) < CLOSE


def test_attributions_keep_the_labels():
    """They add up to what the loss is more than with no rain at all, and the same labels."""
    found = sensitivity.integrated_gradients(LSTM, WINDOWS, of="loss", labels=ONE, loss="mse")
    exact, source, labels = of_squares()
    change = [tf.reduce_mean((exact(each) - labels) ** 2, 1).numpy() for each in (source, tf.zeros_like(source))]
    assert worst(found.sum((1, 2)), change[0] - change[1]) < 0.01


def test_what_the_model_was_compiled_with():
    model = sequential((5, 2), layers.Flatten(), layers.Dense(2))
    model.compile(loss=["mae"])
    named = sensitivity.jacobian(model, WINDOWS, of="loss", labels=ONE, loss="mae")
    np.testing.assert_array_equal(sensitivity.jacobian(model, WINDOWS, of="loss", labels=ONE), named)


def test_masked_steps_count_as_their_weights_say():
    """Keras leaves them out of a loss by itself; here they would count."""
    model = sequential((5, 2), layers.Masking(9.0), layers.LSTM(2, return_sequences=True))
    windows = np.where(np.arange(5)[:, None] < 2, np.float32(9.0), WINDOWS)
    with pytest.raises(Refused, match="masked"):
        sensitivity.jacobian(model, windows, of="loss", labels=EVERY, loss="mse")
    weights = np.broadcast_to(np.arange(5) >= 2, (6, 5)).astype("float32")
    found = sensitivity.jacobian(model, windows, of="loss", labels=EVERY, loss="mse", sample_weight=weights)
    source = tf.constant(windows)
    with tf.GradientTape() as tape:
        tape.watch(source)
        loss = tf.reduce_sum(tf.reduce_mean((model(source) - EVERY) ** 2, 2) * weights, 1) / 5
    assert worst(found, tape.gradient(loss, source).numpy()) < CLOSE


def test_equal_losses_share_a_kernel():
    model = sequential((5, 2), layers.Flatten(), layers.Dense(2))
    first, again = (
        sensitivity.jacobian(model, WINDOWS, of="loss", labels=ONE, loss=keras.losses.Huber(0.3), report=True)[1]
        for _ in range(2)
    )
    assert (first.reused, again.reused) == (False, True)


def test_what_a_loss_closes_over_may_change():
    model, factor = sequential((5, 2), layers.Flatten(), layers.Dense(2)), [1.0]

    def scaled(labels, outputs):
        return factor[0] * (outputs - labels) ** 2

    first = sensitivity.jacobian(model, WINDOWS, of="loss", labels=ONE, loss=scaled)
    factor[0] = 10.0
    again = sensitivity.jacobian(model, WINDOWS, of="loss", labels=ONE, loss=scaled)
    np.testing.assert_allclose(again, 10 * first, rtol=1e-5)


@pytest.mark.parametrize("labels", [CLASSES, CLASSES[:, None]])
def test_by_weights_of_a_loss_of_classes(labels):
    """Whatever numbers weights are tried with, classes are never at random."""
    loss = "sparse_categorical_crossentropy"
    found = sensitivity.jacobian(CONV, WINDOWS, of="loss", labels=labels, loss=loss, wrt="weights:dense*/bias")
    scores = cast(CONV, "float64")(WINDOWS).numpy()
    assert worst(found, scores - np.eye(2)[CLASSES]) < CLOSE


def test_of_a_saved_model(tmp_path):
    model = sequential((5, 2), layers.LSTM(2), layers.Dense(2))
    model.export(tmp_path / "saved", verbose=False)
    asked = {"of": "loss", "labels": ONE, "loss": "mse"}
    found = sensitivity.jacobian(tf.saved_model.load(str(tmp_path / "saved")), WINDOWS, **asked)
    assert worst(found, sensitivity.jacobian(model, WINDOWS, **asked)) < CLOSE


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"of": "loss"}, "labels"),
        ({"of": "loss", "labels": ONE}, "not compiled"),
        ({"of": "loss", "loss": "mse"}, "labels"),
        ({"labels": ONE}, 'of = "output"'),
        ({"of": "loss", "labels": ONE, "loss": "no such"}, "no such"),
        ({"of": "loss", "labels": ONE, "loss": 3}, "3"),
        ({"of": "loss", "labels": ONE[:4], "loss": "mse"}, "4 of labels"),
        ({"of": "loss", "labels": [["wet"] * 2] * 6, "loss": "mse"}, "labels"),
        ({"of": "loss", "labels": np.zeros((6, 3)), "loss": "mse"}, r"loss is refused[\s\S]*\(3,\)"),
        ({"of": "loss", "labels": ONE[:, :1], "loss": "mse"}, "spread"),
        ({"of": "loss", "labels": ONE[:, 0], "loss": "mse"}, r"loss is refused"),
        ({"of": "loss", "labels": CLASSES - 1, "loss": "sparse_categorical_crossentropy"}, r"labels[\s\S]*-1, of"),
        ({"of": "loss", "labels": CLASSES + 1, "loss": "sparse_categorical_crossentropy"}, "from 0 to 1"),
        ({"of": "loss", "labels": CLASSES / 2, "loss": "sparse_categorical_crossentropy"}, r"0\.5, of a loss"),
        (
            {"of": "loss", "labels": ONE, "loss": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")},
            "reduction",
        ),
        ({"of": "loss", "labels": ONE, "loss": "mse", "sample_weight": WEIGHTS[:, None]}, "sample_weight"),
        ({"of": "loss", "labels": ONE, "loss": "{x"}, r"loss is refused"),
        ({"of": "loss", "labels": ONE, "loss": "dice"}, r"loss is refused"),
        ({"of": "loss", "labels": ONE, "loss": lambda outputs: outputs}, r"loss is refused"),
        ({"of": "loss", "labels": ONE, "loss": "mse", "lead": 2}, "lead"),
        ({"of": "loss", "labels": ONE, "loss": lambda a, b: tf.reduce_mean((a - b) ** 2)}, r"\(\) for a batch"),
    ],
)
def test_what_is_refused(given, said):
    with pytest.raises(Refused, match=said):
        sensitivity.jacobian(LSTM, WINDOWS, **given)


def test_labels_of_windows_are_not_spread_over_steps():
    model = sequential((5, 2), layers.GRU(2, return_sequences=True), layers.Dense(1))
    with pytest.raises(Refused, match="spread"):
        sensitivity.jacobian(model, WINDOWS, of="loss", labels=ONE[:, 0], loss="mse")
