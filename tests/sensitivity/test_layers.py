"""A model's layers while a graph of them is traced."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from sensitivity.layers import calls_wrapped, leaf_layers, loops_compiled, steps_folded
from sensitivity.model import describe_call
from tests.conftest import sequential, worst

STEPS = {
    "dense": [layers.TimeDistributed(layers.Dense(3, "tanh"))],
    "after a mask": [layers.Masking(), layers.TimeDistributed(layers.Dense(3))],
    "stacked": [layers.TimeDistributed(layers.Dense(6)), layers.TimeDistributed(layers.Reshape((3, 2)))],
    "recurrent": [layers.Reshape((5, 2, 1)), layers.TimeDistributed(layers.LSTM(4))],
    "masked recurrent": [
        layers.TimeDistributed(layers.Reshape((2, 1))),
        layers.TimeDistributed(layers.Masking()),
        layers.TimeDistributed(layers.GRU(3)),
    ],
}


def graph_of(model: keras.Model, source: tf.Tensor) -> tf.types.experimental.ConcreteFunction:
    return tf.function(lambda x: model(x), autograph=False).get_concrete_function(tf.TensorSpec.from_tensor(source))


@pytest.mark.parametrize("parts", STEPS.values(), ids=STEPS)
def test_folded_steps_give_what_unrolled_ones_do(parts):
    model = sequential((5, 2), *parts)
    source = tf.constant(np.random.default_rng(1).standard_normal((4, 5, 2)).astype("float32"))
    source = tf.where(tf.range(5)[None, :, None] < 2, 0.0, source)
    unrolled = graph_of(model, source)
    with steps_folded(model):
        folded = graph_of(model, source)
    assert worst(folded(source).numpy(), unrolled(source).numpy()) < 1e-6
    assert len(folded.graph.get_operations()) < len(unrolled.graph.get_operations())
    assert not any("call" in vars(layer) for layer in leaf_layers(model))


def test_a_model_of_many_steps_is_no_larger_than_one_of_few():
    few, many = (
        describe_call(
            sequential((steps, 2), layers.TimeDistributed(layers.Dense(3))), (steps, 2), of="output", dtype="float32"
        )
        for steps in (5, 100)
    )
    assert many.operations == few.operations


def test_compiled_loops_give_what_keras_gives_and_call_no_cell_step_by_step(monkeypatch):
    model = sequential((50, 2), layers.Bidirectional(layers.LSTM(4, return_sequences=True)), layers.GRU(3))
    source = tf.constant(np.random.default_rng(1).standard_normal((4, 50, 2)).astype("float32"))
    expected, calls = model(source).numpy(), []
    step = keras.layers.GRUCell.call
    monkeypatch.setattr(keras.layers.GRUCell, "call", lambda *args, **rest: calls.append(1) or step(*args, **rest))
    with loops_compiled(model):
        with calls_wrapped(leaf_layers(model), lambda layer, call: call):
            pass
        found = [model(source).numpy() for _ in range(3)]
    assert worst(found[-1], expected) < 1e-6
    assert len(calls) < 5
    assert not any("call" in vars(layer) for layer in leaf_layers(model))


def test_open_steps_are_left_to_keras():
    model = sequential((None, 2), layers.TimeDistributed(layers.Dense(3)))
    with steps_folded(model):
        graph = tf.function(lambda x: model(x)).get_concrete_function(tf.TensorSpec((None, None, 2)))
    assert graph(tf.zeros((4, 4, 2))).shape == (4, 4, 3)
