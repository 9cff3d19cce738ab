"""Against nested tapes over Keras' own cells, finite differences, and closed forms."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from sensitivity.errors import Refused
from sensitivity.recurrent import jacobian_decay, jacobians
from tests.conftest import in_training

STEPS, UNITS, FEATURES = 6, 3, 2
KINDS = {
    "lstm": lambda: layers.LSTM(UNITS, dtype="float64", name="it"),
    "gru": lambda: layers.GRU(UNITS, dtype="float64", name="it"),
    "simple": lambda: layers.SimpleRNN(UNITS, dtype="float64", name="it"),
    "gru, one bias": lambda: layers.GRU(UNITS, reset_after=False, dtype="float64", name="it"),
    "cell": lambda: layers.RNN(layers.LSTMCell(UNITS, dtype="float64"), dtype="float64", name="it"),
    "back": lambda: layers.LSTM(UNITS, go_backwards=True, dtype="float64", name="it"),
}


def model_of(layer: keras.Layer, steps: int = STEPS, seed: int = 0) -> keras.Model:
    """With the layer in an inner model, before others."""
    inner = keras.Sequential([keras.Input((steps, FEATURES), dtype="float64"), layer], name="inner")
    source = keras.Input((steps, FEATURES), dtype="float64")
    model = keras.Model(source, layers.Dense(1, dtype="float64")(layers.Flatten(dtype="float64")(inner(source))))
    random = np.random.default_rng(seed)
    model.set_weights([random.uniform(-1, 1, weight.shape) for weight in model.get_weights()])
    return model


def some(count: int = 4, steps: int = STEPS) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((count, steps, FEATURES))


def last_state(rnn, windows: np.ndarray, after: int, states: tf.Tensor) -> tf.Tensor:
    """The state `(batch, width)` after all steps, of the states after step `after`."""
    parts = tf.split(states, keras.tree.flatten(rnn.cell.state_size), -1)
    along = windows[:, ::-1] if rnn.go_backwards else windows
    for step in range(after + 1, windows.shape[1]):
        _, parts = rnn.cell(tf.constant(along[:, step]), list(parts))
        parts = list(parts) if isinstance(parts, (list, tuple)) else [parts]
    return tf.concat(parts, -1)


def states_after(rnn, windows: np.ndarray, step: int) -> tf.Tensor:
    width = sum(keras.tree.flatten(rnn.cell.state_size))
    along = windows[:, ::-1] if rnn.go_backwards else windows
    part = along[:, : step + 1]
    return last_state(rnn, part[:, ::-1] if rnn.go_backwards else part, -1, tf.zeros((len(windows), width), "float64"))


def expected(rnn, windows: np.ndarray) -> np.ndarray:
    """∂z_T/∂z_t by one tape over all the steps between: (window, lag, S, S)"""
    found = []
    for lag in range(windows.shape[1]):
        after = windows.shape[1] - 1 - lag
        states = states_after(rnn, windows, after)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(states)
            last = tf.identity(last_state(rnn, windows, after, states))
        found.append(tape.batch_jacobian(last, states, experimental_use_pfor=False).numpy())
    return np.stack(found, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_norms_are_those_of_a_tape(kind):
    model = model_of(KINDS[kind]())
    rnn, windows = model.get_layer("inner").get_layer("it"), some()
    whole = expected(rnn, windows)
    hidden = whole[..., :UNITS, :UNITS]
    for states, matrices in (("all", whole), ("hidden", hidden)):
        for norm, order in (("spectral", 2), ("frobenius", "fro")):
            (found,) = jacobian_decay(model, windows, "it", norm=norm, states=states)
            wanted = np.log(np.linalg.norm(matrices, order, axis=(-2, -1)))
            np.testing.assert_allclose(found.log_norms, wanted, rtol=0, atol=1e-9)
            assert found.direction == ("backward" if kind == "back" else "forward")


def test_norms_are_those_of_finite_differences():
    model = model_of(KINDS["lstm"]())
    rnn, windows, lag = model.get_layer("inner").get_layer("it"), some(), 3
    after = STEPS - 1 - lag
    states, step = states_after(rnn, windows, after).numpy(), 1e-6
    columns = []
    for unit in np.eye(states.shape[1]):
        high, low = (last_state(rnn, windows, after, tf.constant(states + s * unit)).numpy() for s in (step, -step))
        columns.append((high - low) / (2 * step))
    (found,) = jacobian_decay(model, windows)
    wanted = np.linalg.norm(np.stack(columns, -1), 2, axis=(1, 2))
    np.testing.assert_allclose(np.exp(found.log_norms[:, lag]), wanted, rtol=1e-6)


def test_both_halves_of_a_bidirectional_layer():
    model = model_of(layers.Bidirectional(layers.GRU(UNITS, dtype="float64"), dtype="float64", name="bi"))
    bi, windows = model.get_layer("inner").get_layer("bi"), some()
    found = jacobian_decay(model, windows)
    assert [one.direction for one in found] == ["forward", "backward"]
    for decay, rnn in zip(found, (bi.forward_layer, bi.backward_layer), strict=True):
        wanted = np.log(np.linalg.norm(expected(rnn, windows), 2, axis=(-2, -1)))
        np.testing.assert_allclose(decay.log_norms, wanted, rtol=0, atol=1e-9)
    (backward,) = jacobian_decay(model, windows, bi.backward_layer)
    np.testing.assert_array_equal(backward.log_norms, found[1].log_norms)


def linear(scale: float, steps: int, dtype: str = "float32", **how) -> keras.Model:
    """h_t = scale · Q · h_{t-1} + …, with an orthogonal Q."""
    source = keras.Input((steps, FEATURES), dtype=dtype)
    start = keras.initializers.Orthogonal(scale, seed=3)
    options = {"activation": "linear", "recurrent_initializer": start, "dtype": dtype} | how
    return keras.Model(source, layers.SimpleRNN(5, **options)(source))


@pytest.mark.parametrize(
    ("scale", "verdict"), [(0.5, "vanishing: halves every 1 step"), (2.0, "exploding: doubles every 1 step")]
)
def test_a_linear_layer_has_exactly_its_own_rate_over_hundreds_of_steps(scale, verdict):
    (found,) = jacobian_decay(linear(scale, 400), some(2, 400), norm="spectral")
    np.testing.assert_allclose(found.log_norms, np.arange(400) * math.log(scale) * np.ones((2, 1)), atol=1e-3)
    assert found.fit.rate == pytest.approx(scale, rel=1e-6)
    assert found.verdict == verdict


def test_an_orthogonal_layer_is_stable():
    (found,) = jacobian_decay(linear(1.0, 50), some(2, 50))
    assert found.verdict == "stable: neither halves nor doubles within 49 steps"


def test_a_saturated_layer_vanishes():
    windows = 2 * np.ones((2, 8, FEATURES))
    (found,) = jacobian_decay(linear(1.5, 8, "float64", activation="tanh", kernel_initializer="ones"), windows)
    assert found.fit.rate < 0.1
    assert found.verdict.startswith("vanishing")


def test_a_dead_layer_is_exactly_zero():
    windows = -np.ones((2, 8, FEATURES))
    (found,) = jacobian_decay(linear(1.0, 8, activation="relu", kernel_initializer="ones"), windows)
    assert found.verdict == "vanishing: exactly zero from lag 1 on"


def test_many_windows_are_chosen_evenly_and_go_through_in_parts(monkeypatch):
    model, windows = model_of(KINDS["gru"]()), some(21)
    (whole,) = jacobian_decay(model, windows, most_windows=5)
    assert (whole.log_norms.shape, whole.windows) == ((5, STEPS), 21)
    monkeypatch.setattr(jacobians, "ROOM", 1500)
    (parts,) = jacobian_decay(model, windows[::5])
    np.testing.assert_allclose(parts.log_norms, whole.log_norms, atol=1e-12)


def test_states_that_a_layer_is_given():
    source = keras.Input((STEPS, FEATURES), dtype="float64")
    *_, state = layers.GRU(UNITS, return_state=True, dtype="float64", name="first")(source)
    last = layers.GRU(UNITS, dtype="float64", name="second")(source, initial_state=4 * state)
    windows = some()
    model = keras.Model(source, last)
    (found,) = jacobian_decay(model, windows, "second")
    rnn, begun = model.get_layer("second"), 4 * model.get_layer("first")(windows)[-1]
    after = last_state(rnn, windows[:, :1], -1, begun)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(after)
        end = tf.identity(last_state(rnn, windows, 0, after))
    wanted = np.linalg.norm(tape.batch_jacobian(end, after, experimental_use_pfor=False), 2, axis=(1, 2))
    np.testing.assert_allclose(np.exp(found.log_norms[:, -1]), wanted, rtol=1e-9)


def test_weights_that_are_nan_are_said():
    model = linear(0.5, 4)
    model.layers[-1].set_weights([np.full_like(weight, np.nan) for weight in model.layers[-1].get_weights()])
    (found,) = jacobian_decay(model, some(3, 4))
    assert found.verdict == "not finite: NaN or infinite in every window"


@pytest.mark.parametrize(
    ("windows", "how", "key"),
    [
        (some(), {"layer": "none"}, "layer"),
        (some()[0], {}, "windows"),
        (some(steps=STEPS + 1), {}, "windows"),
        (some()[:0], {}, "windows"),
        (some(), {"norm": "largest"}, "norm"),
        (some(), {"states": "c"}, "states"),
        (some(), {"most_windows": 0}, "most_windows"),
    ],
)
def test_what_does_not_fit_is_refused(windows, how, key):
    with pytest.raises(Refused) as refused:
        jacobian_decay(linear(1.0, STEPS), windows, **how)
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (lambda: layers.GRU(UNITS, stateful=True), "stateful=True"),
        (lambda: in_training(layers.GRU(UNITS, dropout=0.5)), "in training"),
    ],
)
def test_layers_that_do_not_begin_anew_or_are_called_in_training_are_refused(layer, what):
    source = keras.Input(batch_shape=(4, STEPS, FEATURES))
    with pytest.raises(Refused, match=what):
        jacobian_decay(keras.Model(source, layer()(source)), some())


def test_masked_steps_and_repeated_calls_are_refused():
    source = keras.Input((STEPS, FEATURES))
    rnn, windows = layers.GRU(UNITS), some()
    masked = keras.Model(source, rnn(layers.Masking(9.0)(source)))
    assert len(jacobian_decay(masked, windows)[0].log_norms) == 4
    windows[0, :2] = 9.0
    with pytest.raises(Refused, match="masked"):
        jacobian_decay(masked, windows)
    with pytest.raises(Refused, match="2 calls"):
        jacobian_decay(keras.Model(source, rnn(source) + rnn(2 * source)), windows)
