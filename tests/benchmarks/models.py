"""The models of the benchmarks: small ones of every kind that people fit to time series."""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers


def _stack(shape: tuple[int, int], *parts: keras.Layer) -> keras.Model:
    return keras.Sequential([keras.Input(shape), *parts])


def transformer() -> keras.Model:
    source = keras.Input((24, 4))
    hidden = layers.Dense(16)(source)
    hidden = layers.LayerNormalization()(hidden + layers.MultiHeadAttention(2, 8)(hidden, hidden))
    inner = layers.Dense(16)(layers.Dense(32, "gelu")(hidden))
    return keras.Model(source, layers.Dense(1)(layers.LayerNormalization()(hidden + inner)))


def residual() -> keras.Model:
    source = keras.Input((30, 4))
    hidden = layers.Dense(24)(source)
    hidden = hidden + layers.GRU(24, return_sequences=True)(hidden)
    hidden = layers.LayerNormalization()(hidden + layers.LSTM(24, return_sequences=True)(hidden))
    return keras.Model(source, layers.Dense(2)(hidden))


def heads() -> keras.Model:
    source = keras.Input((20, 4))
    hidden = layers.LSTM(32)(source)
    return keras.Model(source, {"mean": layers.Dense(6)(hidden), "spread": layers.Dense(6, "softplus")(hidden)})


def masked() -> keras.Model:
    return _stack((40, 3), layers.Masking(), layers.LSTM(24), layers.Dropout(0.3), layers.Dense(3))


# Those of the speed table: the first seven, and those of `LONG`.
MODELS: dict[str, Callable[[], keras.Model]] = {
    "LSTM 32, 100 steps, sequence": lambda: _stack(
        (100, 1), layers.LSTM(32, return_sequences=True), layers.TimeDistributed(layers.Dense(1))
    ),
    "LSTM 120 relu, 20 steps, one": lambda: _stack(
        (20, 4), layers.LSTM(120, "relu"), layers.Dense(100, "relu"), layers.Dense(50, "relu"), layers.Dense(1)
    ),
    "GRU 32, LSTM 24, 60 steps, sequence": lambda: _stack(
        (60, 5), layers.GRU(32, return_sequences=True), layers.LSTM(24, return_sequences=True), layers.Dense(2)
    ),
    "Bidirectional LSTM 24, 30 steps, five": lambda: _stack(
        (30, 4), layers.Bidirectional(layers.LSTM(24)), layers.Dense(5)
    ),
    "causal Conv1D, 48 steps, sequence": lambda: _stack(
        (48, 2),
        layers.Conv1D(32, 3, padding="causal", activation="tanh"),
        layers.Conv1D(32, 3, padding="causal", dilation_rate=2, activation="tanh"),
        layers.Dense(1),
    ),
    "Transformer encoder, 24 steps, sequence": transformer,
    "MLP 256, 256, 40 inputs, 100 outputs": lambda: _stack(
        (10, 4), layers.Flatten(), layers.Dense(256, "tanh"), layers.Dense(256, "tanh"), layers.Dense(100)
    ),
    "residual GRU and LSTM, 30 steps, sequence": residual,
    "LSTM 32, two heads of six": heads,
    "masked LSTM with dropout, 40 steps": masked,
    "SimpleRNN 64, 50 steps, one": lambda: _stack((50, 3), layers.SimpleRNN(64), layers.Dense(1)),
    "LSTM 64, 200 steps, sequence": lambda: _stack(
        (200, 3), layers.LSTM(64, return_sequences=True), layers.TimeDistributed(layers.Dense(1))
    ),
    "LSTM 64, 1,000 steps, sequence": lambda: _stack(
        (1000, 3), layers.LSTM(64, return_sequences=True), layers.Dense(1)
    ),
}

TIMED = list(MODELS)[:7]
# Windows a call of the tape over long sequences, which has no memory for more, and the ways that have any for one.
LONG: dict[str, tuple[int, tuple[str, ...]]] = {
    "LSTM 64, 200 steps, sequence": (8, ("compiled", "compiled, XLA", "jax jacrev", "jax jacfwd", "torch")),
    "LSTM 64, 1,000 steps, sequence": (2, ("jax jacrev", "jax jacfwd")),
}


def build(name: str) -> keras.Model:
    keras.utils.set_random_seed(0)
    return MODELS[name]()


def windows_for(model: keras.Model, count: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, *model.input_shape[1:])).astype("float32")
