from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from sensitivity.errors import Refused
from sensitivity.recurrent import Part, alarms, gradients, jacobian_decay, report, weight_gradients, weights

UNITS = 3
KINDS = {
    "lstm": (layers.LSTM, {}, "ifco", ["kernel", "recurrent kernel", "bias"]),
    "gru": (layers.GRU, {}, "zrh", ["kernel", "recurrent kernel", "bias", "recurrent bias"]),
    "gru, one bias": (layers.GRU, {"reset_after": False}, "zrh", ["kernel", "recurrent kernel", "bias"]),
    "simple, none": (layers.SimpleRNN, {"use_bias": False}, "h", ["kernel", "recurrent kernel"]),
}


def model_of(kind: str = "lstm", bidirectional: bool = True) -> keras.Model:
    make, how, _, _ = KINDS[kind]
    layer = make(UNITS, **how)
    wrapped = layers.Bidirectional(layer, name="it") if bidirectional else layer
    model = keras.Sequential([keras.Input((4, 5)), wrapped, layers.Dense(1)])
    random = np.random.default_rng(0)
    model.set_weights([random.uniform(-1, 1, weight.shape) for weight in model.get_weights()])
    return model


def windows(count: int = 7) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((count, 4, 5)).astype("float32")


def rows_of(weight: np.ndarray, kinds: list[str]) -> list[np.ndarray]:
    """A GRU's two biases are the two rows of one weight; no other weight here has two rows."""
    return list(weight) if "recurrent bias" in kinds and len(weight) == 2 else [weight]


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_the_weights_in_keras_order(kind, bidirectional):
    model = model_of(kind, bidirectional)
    found = weights(model)
    _, _, gates, kinds = KINDS[kind]
    directions = ["forward", "backward"] if bidirectional else ["forward"]
    labels = [(part.direction, part.kind, part.gate) for part in found]
    assert labels == [(direction, name, gate) for direction in directions for name in kinds for gate in gates]
    arrays = [row for weight in model.layers[0].get_weights() for row in rows_of(weight, kinds)]
    expected = [array[..., i * UNITS : (i + 1) * UNITS] for array in arrays for i in range(len(gates))]
    for part, array in zip(found, expected, strict=True):
        np.testing.assert_array_equal(part.values, array)
    assert sum(part.values.size for part in found) == model.layers[0].count_params()


def test_the_two_rows_of_a_gru_bias():
    model = model_of("gru", bidirectional=False)
    bias = model.layers[0].cell.bias.numpy()
    found = {(part.kind, part.gate): part.values for part in weights(model) if "bias" in part.kind}
    np.testing.assert_array_equal(found["bias", "r"], bias[0, UNITS : 2 * UNITS])
    np.testing.assert_array_equal(found["recurrent bias", "h"], bias[1, 2 * UNITS :])


def test_an_open_forget_gate_is_where_keras_puts_it():
    model = keras.Sequential([keras.Input((4, 2)), layers.LSTM(UNITS)])
    ones = [part.gate for part in weights(model) if part.kind == "bias" and (part.values == 1).all()]
    assert ones == ["f"]


def tape(model, given, number) -> list[np.ndarray]:
    with tf.GradientTape() as recorded:
        total = number(model(given))
    return [part.numpy() for part in recorded.gradient(total, model.layers[0].trainable_weights)]


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_gradients_of_the_sum_of_outputs_are_a_tapes(kind):
    model = model_of(kind)
    expected = gradients(model, "it", tape(model, windows(), tf.reduce_sum))
    for found in (weight_gradients(model, windows()), weight_gradients(model, windows(), windows_per_call=3)):
        for part, wanted in zip(found, expected, strict=True):
            assert (part.name, part.of) == (wanted.name, "gradient")
            np.testing.assert_allclose(part.values, wanted.values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "loss", ["mse", keras.losses.MeanSquaredError(), lambda labels, outputs: (labels - outputs) ** 2]
)
def test_gradients_of_a_loss_are_those_of_its_mean(loss):
    model, labels = model_of(), np.linspace(-1, 1, 7)[:, None]
    expected = gradients(model, "it", tape(model, windows(), lambda found: tf.reduce_mean((found - labels) ** 2)))
    found = weight_gradients(model, windows(), labels=labels, loss=loss, windows_per_call=3)
    for part, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(part.values, wanted.values, rtol=1e-4, atol=1e-6)


def test_a_weight_that_nothing_depends_on_has_gradient_zero():
    model = model_of()
    arrays = [None, *tape(model, windows(), tf.reduce_sum)[1:]]
    first, *_ = gradients(model, "it", arrays)
    assert first.statistics.zeros == 1


def part(values) -> Part:
    return Part("lstm", "backward", "kernel", "f", np.asarray(values, "float32"), "gradient")


def test_statistics():
    found = part([[0.0, 1.0], [3.0, 0.0]]).statistics
    assert (found.count, found.mean, found.minimum, found.maximum, found.zeros) == (4, 1.0, 0.0, 3.0, 0.5)
    assert found.std == pytest.approx(np.std([0, 1, 3, 0]))


def test_what_is_not_finite_is_loud_and_leaves_the_statistics():
    broken = part([[np.nan, 1.0], [3.0, -np.inf]])
    assert (broken.statistics.nans, broken.statistics.infinities, broken.statistics.mean) == (1, 1, 2.0)
    (said,) = alarms([part([1.0]), broken])
    assert said == "1 NaN and 1 infinite of 4 numbers: gradient of lstm, kernel, gate f, backward"
    assert report([part([1.0]), broken]).startswith("NOT FINITE: 1 of 2 parts")
    assert "NOT FINITE" not in report([part([1.0])])
    assert np.isnan(part([np.nan]).statistics.mean)


@pytest.mark.parametrize(
    ("how", "key"),
    [
        ({"labels": np.ones((7, 1))}, "loss"),
        ({"loss": "mse"}, "loss"),
        ({"labels": np.ones((6, 1)), "loss": "mse"}, "labels"),
        ({"labels": np.ones((7, 1)), "loss": "no such"}, "loss"),
        ({"layer": "dense"}, "layer"),
        ({"windows_per_call": 0}, "windows_per_call"),
    ],
)
def test_what_does_not_fit_is_refused(how, key):
    with pytest.raises(Refused) as refused:
        weight_gradients(model_of(), windows(), **how)
    assert refused.value.key == key


def test_arrays_of_other_shapes_are_refused():
    model = model_of("lstm")
    arrays = tape(model, windows(), tf.reduce_sum)
    for given in (arrays[:-1], arrays[::-1], []):
        with pytest.raises(Refused, match="trainable_weights"):
            gradients(model, "it", given)


def test_a_model_of_several_inputs():
    """Gradients and decay of the layer are those of the same model that holds the other input fixed."""
    random = np.random.default_rng(3)
    site = random.standard_normal((7, 2)).astype("float32")
    sequence, other = keras.Input((4, 5), name="sequence"), keras.Input((2,), name="other")
    states = layers.LSTM(UNITS, name="it")(layers.Concatenate()([sequence, layers.RepeatVector(4)(other)]))
    several = keras.Model([sequence, other], layers.Dense(1)(states))
    one = keras.Sequential([keras.Input((4, 7)), layers.LSTM(UNITS, name="it"), layers.Dense(1)])
    one.set_weights(several.get_weights())
    joined = np.concatenate([windows(), np.repeat(site[:, None], 4, 1)], -1)
    for found, expected in zip(
        weight_gradients(several, [windows(), site], "it"), weight_gradients(one, joined, "it"), strict=True
    ):
        np.testing.assert_allclose(found.values, expected.values, rtol=1e-4, atol=1e-5)
    (decay,), (alone,) = jacobian_decay(several, [windows(), site], "it"), jacobian_decay(one, joined, "it")
    np.testing.assert_allclose(decay.log_norms, alone.log_norms, rtol=1e-4)
