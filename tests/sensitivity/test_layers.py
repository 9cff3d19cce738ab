"""A model's layers while a graph of them is traced."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from sensitivity.layers import calls_wrapped, leaf_layers, steps_folded
from tests.conftest import sequential, worst
from tests.describing import describe_call

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


def test_calls_are_wrapped_twice_and_unwrapped_in_turn():
    model = sequential((5, 2), layers.Dense(3))
    layer, order = leaf_layers(model)[-1], []

    def noted(name):
        return lambda layer, call: lambda *args, **rest: order.append(name) or call(*args, **rest)

    with calls_wrapped([layer], noted("outer")):
        with calls_wrapped([layer], noted("inner")):
            model(tf.zeros((1, 5, 2)))
        model(tf.zeros((1, 5, 2)))
    model(tf.zeros((1, 5, 2)))
    assert order == ["inner", "outer", "outer"]
    assert "call" not in vars(layer)


def test_threads_wrap_in_turn():
    layer = layers.Dense(1)
    depths = []

    def wrap(layer, call):
        return SimpleNamespace(depth=getattr(call, "depth", 0) + 1)

    def enter(_):
        for _ in range(20):
            with calls_wrapped([layer], wrap):
                time.sleep(0.001)
                depths.append(layer.call.depth)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(enter, range(3)))
    assert depths == [1] * 60
    assert "call" not in vars(layer)


def test_open_steps_are_left_to_keras():
    model = sequential((None, 2), layers.TimeDistributed(layers.Dense(3)))
    with steps_folded(model):
        graph = tf.function(lambda x: model(x)).get_concrete_function(tf.TensorSpec((None, None, 2)))
    assert graph(tf.zeros((4, 4, 2))).shape == (4, 4, 3)
