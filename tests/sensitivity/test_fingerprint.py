"""The same model has the same fingerprint wherever it is made, and another model has another."""

from __future__ import annotations

import json
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers, ops

from sensitivity.fingerprint import fingerprint
from sensitivity.loading import load_file
from tests.conftest import sequential

FROM_A_FILE = """
import json, sys
from pathlib import Path
import keras
from sensitivity.fingerprint import fingerprint
from sensitivity.loading import load_file
for _ in range(int(sys.argv[2])):
    [kind(1) for kind in (keras.layers.Dense, keras.layers.Dropout)] and keras.layers.LSTM(2)
print(json.dumps([fingerprint(load_file(Path(sys.argv[1]))) for _ in range(4)]))
"""


def transformer() -> keras.Model:
    """Two blocks whose attention makes a Dropout of its own, named beside the model's."""
    x = source = keras.Input((6, 3))
    x = layers.Dense(4)(x)
    for _ in range(2):
        x = x + layers.Dropout(0.1)(layers.MultiHeadAttention(2, 2, dropout=0.1)(x, x))
        x = x + layers.Dense(4)(layers.Dropout(0.1)(layers.Dense(5, activation="relu")(x)))
    return keras.Model(source, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def recurrent() -> keras.Model:
    """Layers whose inner layers are named anew: a cell, both directions, a nested model."""
    source = keras.Input((6, 3))
    inner = keras.Sequential([layers.Dense(3), layers.Dropout(0.1)])
    x = layers.TimeDistributed(inner)(layers.Bidirectional(layers.GRU(2, return_sequences=True))(source))
    x = layers.RNN(layers.StackedRNNCells([layers.LSTMCell(3), layers.GRUCell(2)]))(x)
    return keras.Model(source, layers.Dense(1)(ops.tanh(x)))


@pytest.mark.parametrize("build", [transformer, recurrent])
def test_the_same_file_has_the_same_fingerprint_after_any_other_models(build, tmp_path):
    model = build()
    model.save(tmp_path / "m.keras")
    expected = fingerprint(model)
    assert [fingerprint(load_file(tmp_path / "m.keras")) for _ in range(4)] == [expected] * 4
    build(), layers.Dropout(0.1), layers.Dense(1)
    assert fingerprint(load_file(tmp_path / "m.keras")) == expected


@pytest.mark.parametrize("others", [0, 3])
def test_the_same_file_has_the_same_fingerprint_in_another_process(others, tmp_path):
    model = transformer()
    model.save(tmp_path / "m.keras")
    command = [sys.executable, "-c", FROM_A_FILE, str(tmp_path / "m.keras"), str(others)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(found.splitlines()[-1]) == [fingerprint(model)] * 4


def test_names_that_keras_makes_up_do_not_count_and_weights_do():
    first, second = (sequential((None, 3), layers.LSTM(4), layers.Dense(2)) for _ in range(2))
    second.set_weights(first.get_weights())
    assert [layer.name for layer in first.layers] != [layer.name for layer in second.layers]
    assert fingerprint(first) == fingerprint(second)
    second.set_weights([weight + 1e-6 for weight in second.get_weights()])
    assert fingerprint(first)["weights"] != fingerprint(second)["weights"]
    assert fingerprint(first)["architecture"] == fingerprint(second)["architecture"]


def wired(order: tuple[int, int], names: tuple[str, str] = ("level", "flow"), inputs: str = "ab") -> keras.Model:
    """Two heads of one hidden layer, taken from it in some order."""
    sources = [keras.Input((3,), name=name) for name in inputs]
    hidden = layers.Concatenate()([sources[number] for number in order])
    heads = [layers.Dense(2, name=name)(hidden) for name in names]
    model = keras.Model(sources, heads)
    model.set_weights([np.ones_like(weight) for weight in model.get_weights()])
    return model


@pytest.mark.parametrize(
    "other",
    [
        lambda: wired((1, 0)),
        lambda: wired((0, 1), ("flow", "level")),
        lambda: wired((0, 1), inputs="ba"),
    ],
    ids=["another way round", "other names of outputs", "other names of inputs"],
)
def test_connections_and_names_that_a_user_gave_count(other):
    assert fingerprint(wired((0, 1))) == fingerprint(wired((0, 1)))
    one, another = fingerprint(wired((0, 1))), fingerprint(other())
    assert one["weights"] == another["weights"]
    assert one["architecture"] != another["architecture"]


def test_an_activation_counts_even_where_a_layer_is_called_like_it():
    def model(activation: str) -> keras.Model:
        return sequential((None, 3), layers.Dense(2, activation=activation, name="tanh"), layers.Dense(1, name="relu"))

    assert fingerprint(model("tanh"))["architecture"] != fingerprint(model("relu"))["architecture"]


CODE = """
import keras
from keras import layers, ops

class Own(layers.Layer):
    def call(self, x):
        return {change}(x)

class Whole(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.dense = layers.Dense(2, activation="{activation}")

    def call(self, x):
        return self.dense(x)

def own():
    return keras.Sequential([keras.Input((3,)), Own(), layers.Dense(2)])

def whole():
    model = Whole()
    model(ops.zeros((1, 3)))
    return model

def lambda_():
    return keras.Sequential([keras.Input((3,)), layers.Lambda(lambda x: {change}(x))])
"""


def made(name: str, change: str = "ops.tanh", activation: str = "tanh", before: str = "") -> dict[str, str]:
    module: dict = {"__name__": "made_for_a_test"}
    exec(compile(before + CODE.format(change=change, activation=activation), "made_for_a_test.py", "exec"), module)
    model = module[name]()
    model.set_weights([np.ones_like(weight) for weight in model.get_weights()])
    return fingerprint(model)


@pytest.mark.parametrize(
    ("name", "other"),
    [("own", {"change": "ops.relu"}), ("whole", {"activation": "relu"}), ("lambda_", {"change": "ops.relu"})],
)
def test_what_a_users_own_code_computes_counts_and_where_it_stands_does_not(name, other):
    assert made(name) == made(name, before="# a comment\n\n")
    assert made(name) != made(name, **other)
