"""Which models have outputs at the steps of their window, and which of them see later inputs."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

from sensitivity.model import described
from sensitivity.sections import WindowsSection
from tests.conftest import sequential

SHAPE = (6, 2)


def conv(**how) -> layers.Layer:
    return layers.Conv1D(2, 3, **how)


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.SimpleRNN(2, return_sequences=True)

    def call(self, windows):
        return self.inner(windows)


def attending(*, causal: bool) -> keras.Model:
    window = keras.Input(SHAPE)
    hidden = layers.Dense(4)(window)
    seen = layers.MultiHeadAttention(1, 4)(hidden, hidden, use_causal_mask=causal)
    return keras.Model(window, layers.Dense(1)(layers.LayerNormalization()(layers.Add()([hidden, seen]))))


def gated() -> keras.Model:
    window = keras.Input(SHAPE)
    gate = layers.Dense(2, activation="sigmoid")(layers.GlobalAveragePooling1D()(window))
    return keras.Model(window, layers.Dense(1)(layers.Multiply()([window, layers.Reshape((1, 2))(gate)])))


def residual() -> keras.Model:
    """A forecast of as many steps as the window has, on top of the window's own."""
    window = keras.Input(SHAPE)
    future = layers.Dense(2)(layers.RepeatVector(6)(layers.SimpleRNN(3)(window)))
    return keras.Model(window, layers.Add()([window, future]))


def backwards() -> layers.Layer:
    return layers.SimpleRNN(2, return_sequences=True, go_backwards=True)


CASES = {
    "recurrent": ("causal", lambda: sequential(SHAPE, layers.GRU(2, return_sequences=True), layers.Dense(1))),
    "causal convolution": ("causal", lambda: sequential(SHAPE, conv(padding="causal", activation="relu"))),
    "causal attention": ("causal", lambda: attending(causal=True)),
    "subclassed": ("causal", Subclassed),
    "same convolution": ("acausal", lambda: sequential(SHAPE, conv(padding="same"), layers.Conv1D(1, 1))),
    "attention": ("acausal", lambda: attending(causal=False)),
    "gated by all steps": ("acausal", gated),
    "both ways": (
        "acausal",
        lambda: sequential(SHAPE, layers.Bidirectional(layers.SimpleRNN(1, return_sequences=True)), layers.Dense(1)),
    ),
    "the last step": ("no", lambda: sequential(SHAPE, layers.SimpleRNN(2), layers.Dense(1))),
    "future": ("no", lambda: sequential(SHAPE, layers.SimpleRNN(2), layers.RepeatVector(6), layers.Dense(1))),
    "all steps mixed": ("no", lambda: sequential(SHAPE, layers.Flatten(), layers.Dense(6), layers.Reshape((6, 1)))),
    "other steps": ("no", lambda: sequential(SHAPE, conv(strides=2, padding="same"), layers.UpSampling1D(2))),
    "newest first": ("no", lambda: sequential(SHAPE, backwards())),
    "mixed by an einsum": ("no", lambda: sequential(SHAPE, layers.EinsumDense("btf,ts->bsf", (6, 2)))),
    "channels first": ("no", lambda: sequential(SHAPE, layers.Conv1D(6, 1, data_format="channels_first"))),
    "future beside the window": ("no", residual),
}


def test_numbers_like_the_series_are_tried():
    """Far from these the layer is saturated, and no output depends on anything later."""
    normal = layers.Normalization(mean=[1000.0, 500.0], variance=[25.0, 4.0])
    both = layers.Bidirectional(layers.SimpleRNN(2, return_sequences=True))
    model = keras.Sequential([keras.Input(SHAPE), normal, both, layers.Dense(1)])
    spread = np.array([1000.0, 500.0]), np.array([5.0, 2.0])
    assert described(model, WindowsSection(length=6), 2, spread=spread).at_steps == "acausal"


@pytest.mark.parametrize("case", CASES)
def test_steps_are_found_where_they_are_kept(case):
    expected, build = CASES[case]
    facts = described(build(), WindowsSection(length=6), 2)
    assert facts.at_steps == expected
    assert facts.step_lags == (() if expected == "no" else (5, 4, 3, 2, 1, 0))
    assert type(facts).from_json({**facts.to_json()}).at_steps == expected


def test_chosen_output_steps_keep_their_own():
    model = sequential(SHAPE, conv(padding="causal"))
    assert described(model, WindowsSection(length=6), 2, output_steps=[0, -2]).step_lags == (5, 1)
