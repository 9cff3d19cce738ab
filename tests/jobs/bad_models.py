"""Functions that a job file may name as its model and that give none that can be served."""

from __future__ import annotations

import sys

import keras
import tensorflow as tf
from keras import layers, ops

from tests.conftest import in_training


def of(change, *shape: int | None, **options) -> keras.Model:
    """A model that puts its input through `change`."""
    source = keras.Input(shape or (6, 2), **options)
    return keras.Model(source, change(source))


def raises():
    raise RuntimeError("no weights today\nnor tomorrow")


def exits():
    sys.exit(3)


def aborts():
    raise KeyError


def recurses():
    return recurses()


def gives_nothing():
    return None


def gives_a_class():
    return keras.Model


def wants_an_argument(size):
    return size


not_callable = 3


def two_inputs():
    pair = [keras.Input((6, 2)), keras.Input((6, 2))]
    return keras.Model(pair, layers.Add()(pair))


def stateful():
    return of(layers.LSTM(2, stateful=True, name="memory"), batch_size=1)


def normalized_over_the_batch():
    return of(in_training(layers.BatchNormalization(name="norm")))


def random():
    return of(in_training(layers.Dropout(0.5, name="drop")))


def reduced_over_the_batch():
    return of(layers.Lambda(lambda x: x - ops.mean(x, axis=0, keepdims=True), name="centre"))


def without_a_batch():
    return of(layers.Lambda(lambda x: ops.sum(x, axis=0), output_shape=(2,), name="summed"))


def with_a_batch_by_chance():
    return of(layers.Lambda(lambda x: ops.sum(x, axis=(0, 1)), output_shape=(), name="summed"))


def one_output_for_all():
    return of(layers.Lambda(lambda x: ops.ones((1, 3)), output_shape=(3,), name="constant"))


def a_scalar():
    return of(layers.Lambda(lambda x: ops.sum(x), output_shape=(), name="scalar"))


def text():
    return of(layers.StringLookup(vocabulary=["a", "b"]), 6, 2, dtype="string")


def integers():
    return of(lambda x: ops.argmax(x, axis=-1))


def complex_numbers():
    return of(layers.Lambda(lambda x: tf.cast(x, tf.complex64), output_shape=(6, 2)))


def images():
    return of(layers.Flatten(), 6, 2, 3)


def single_numbers():
    return keras.Sequential([keras.Input(()), layers.Rescaling(2.0)])


def four_axes():
    return of(layers.Reshape((3, 2, 2)))


def no_outputs():
    return of(lambda x: x[:, :, :0])


def outputs_of_several_lengths():
    source = keras.Input((6, 2))
    return keras.Model(source, {"all": source * 2.0, "last": source[:, -1] * 2.0})


def steps_left_open():
    return of(layers.LSTM(2), None, 2)


def failing_when_called():
    def fail(x):
        tf.debugging.assert_equal(tf.shape(x)[1], 7)
        return x

    return of(layers.Lambda(fail, output_shape=(6, 2)))


class Refusing(keras.Model):
    def call(self, inputs):
        raise ValueError("not for you")


def never_built():
    return Refusing()


class Silent(keras.Model):
    def call(self, inputs):
        return None


def answering_nothing():
    return Silent()


def without_a_gradient():
    @tf.custom_gradient
    def rough(x):
        def gradient(_):
            raise LookupError("no gradient of rough")

        return x, gradient

    return of(layers.Lambda(rough, output_shape=(6, 2)))


def not_numbers():
    return of(layers.Lambda(lambda x: x * float("nan")))


def ragged():
    return of(layers.Lambda(lambda x: tf.RaggedTensor.from_tensor(x), output_shape=(6, 2)))


def sparse():
    return of(layers.Lambda(lambda x: tf.sparse.from_dense(x), output_shape=(6, 2)))


def whole_numbers():
    return of(lambda x: layers.Embedding(3, 2)(x)[:, :, 0], 6, 2, dtype="int32")
