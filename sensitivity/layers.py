"""A model's layers: found, watched, and replaced while a graph is traced."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf

_SCALING = (
    *(keras.layers.Normalization, keras.layers.BatchNormalization, keras.layers.LayerNormalization),
    *(keras.layers.GroupNormalization, keras.layers.UnitNormalization, keras.layers.Rescaling),
)
_PASSING = (
    *(keras.layers.InputLayer, keras.layers.Reshape, keras.layers.Permute, keras.layers.Flatten, keras.layers.Identity),
    *(keras.layers.Concatenate, keras.layers.RepeatVector, keras.layers.Cropping1D, keras.layers.ZeroPadding1D),
    *(keras.layers.Masking, keras.layers.Dropout, keras.layers.SpatialDropout1D, keras.layers.GaussianNoise),
    keras.layers.Embedding,  # of numbers of classes, which nobody scales
)


def leaf_layers(model: keras.Model) -> list[keras.Layer]:
    """The layers that compute, innermost, in the model's order."""
    return [layer for layer in model._flatten_layers(include_self=False) if not isinstance(layer, keras.Model)]


def constants_of(layer: keras.Layer) -> dict[str, tf.Tensor]:
    """Tensors that a layer holds beside its weights, by attribute: what it has adapted to."""
    tensors = {name: value for name, value in vars(layer).items() if isinstance(value, tf.Tensor)}
    return {name: value for name, value in tensors.items() if not tf.is_symbolic_tensor(value)}


def normalises(model: Any) -> bool | None:
    """Whether the first layers of a model scale what it takes; None where its layers do not tell.

    The layers are followed as far as the first that has weights. What computes something else with numbers on the way,
    such as an operation or a layer of one's own, may scale them.
    """
    for one in _operations(model):
        inner = getattr(one, "layer", one)  # of a wrapper, such as TimeDistributed
        if isinstance(inner, _SCALING):
            return True
        if not isinstance(inner, _PASSING):
            return False if type(inner).__module__.startswith("keras.src.layers") and inner.weights else None
    return None


def _operations(model: Any) -> Iterator[Any]:
    """What a functional or sequential model computes with, in order, inside other models too; of another the model."""
    graph = function_of(model)
    for one in [model] if graph is None else graph.operations:
        yield from _operations(one) if isinstance(one, keras.Model) and one is not model else [one]


def function_of(model: Any) -> Any:
    """The graph of a functional or sequential model; None of any other."""
    if isinstance(model, keras.Sequential):
        own = getattr(type(model).call, "__qualname__", "") != "Sequential.call"
        return None if own else getattr(model, "_functional", None)
    return model if getattr(type(model).call, "__qualname__", "") == "Functional.call" else None


def declared_inputs(model: Any) -> dict[str, Any]:
    """What a model declares to take, with its shape and dtype, by name and in its order; nothing of a subclassed model.

    Names are the keys of a model that was made with a dict, else those of the input layers, which are saved with it.
    """
    tensors, structure = list(getattr(model, "inputs", None) or []), getattr(model, "_inputs_struct", None)
    if isinstance(structure, dict):
        keys = {id(tensor): key for key, tensor in structure.items()}
        if all(id(tensor) in keys for tensor in tensors):
            return {keys[id(tensor)]: tensor for tensor in tensors}
    layers = [getattr(getattr(tensor, "_keras_history", None), "operation", tensor) for tensor in tensors]
    return {layer.name: tensor for layer, tensor in zip(layers, tensors, strict=True)}


def input_names(model: Any) -> list[str]:
    """Names of the inputs that a model declares."""
    return list(declared_inputs(model))


def whole_inputs(model: Any) -> list[str]:
    """Names of those that take whole numbers, by which there is no derivative."""
    return [name for name, tensor in declared_inputs(model).items() if "float" not in tensor.dtype]


def outputs_of(model: Any, windows: Any) -> Any:
    """What the model gives for windows in the mode that `model.predict` calls it in: with `training=False` where its
    `call` takes that, which then holds for all of its layers, and without it where it does not.
    """
    takes_mode = "training" in inspect.signature(model.call).parameters
    return model(windows, training=False) if takes_mode else model(windows)


def as_graph(function: Callable[..., Any], **options: Any) -> tf.types.experimental.PolymorphicFunction:
    """A `tf.function` of its own. TensorFlow counts traces by code object and warns; a partial has none."""
    return tf.function(functools.partial(function), autograph=False, **options)


LOOPS = ("While", "StatelessWhile")


def nodes_of(graph: Any) -> list[Any]:
    """Operations of a GraphDef, and of the functions that it calls: its loops and branches."""
    return [*graph.node, *(node for function in graph.library.function for node in function.node_def)]


_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def calls_wrapped(layers: list[keras.Layer], wrap: Callable[[keras.Layer, Any], Any]) -> Iterator[None]:
    """Within, each layer's `call` is `wrap(layer, call)`; afterwards the layers are as before, wrapped or not.

    One thread at a time: layers may be in several models.
    """
    with _ONE_AT_A_TIME:
        before = [layer.__dict__.get("call") for layer in layers]
        try:
            for layer in layers:  # past Keras' own __setattr__, which would track the function as state
                object.__setattr__(layer, "call", wrap(layer, layer.call))
            yield
        finally:
            for layer, call in zip(layers, before, strict=True):
                if call is None:
                    layer.__dict__.pop("call", None)
                else:
                    object.__setattr__(layer, "call", call)


@contextlib.contextmanager
def moments_exact() -> Iterator[None]:
    """Within, `tf.nn.moments`, which layers normalize by, has second derivatives.

    TensorFlow's own holds the mean constant in the variance: its first derivative is right, since that by the mean is
    zero, and its second is not.
    """
    with _ONE_AT_A_TIME:
        before = tf.nn.moments
        try:
            tf.nn.moments = _moments
            yield
        finally:
            tf.nn.moments = before


def holds_moments(nodes: Iterable[Any]) -> bool:
    """Whether there are TensorFlow's own moments among a graph's operations: (a - stop_gradient(mean of a))²."""
    by_name: dict[str, list[Any]] = {}
    for node in nodes:
        by_name.setdefault(node.name, []).append(node)

    def given(node: Any, kind: str) -> list[Any]:
        return [one for name in node.input for one in by_name.get(name.partition(":")[0], ()) if one.op == kind]

    squares = [node for every in by_name.values() for node in every if node.op == "SquaredDifference"]
    return any(
        mean.input[0] in square.input
        for square in squares
        for stopped in given(square, "StopGradient")
        for mean in given(stopped, "Mean")
    )


def _moments(x: Any, axes: Any, shift: Any = None, keepdims: bool = False, name: str | None = None) -> Any:
    """Mean and variance along axes, as `tf.nn.moments` has them."""
    wide = tf.cast(x, "float32") if x.dtype.size < 4 else x
    mean = tf.reduce_mean(wide, axes, keepdims=True)
    variance = tf.reduce_mean(tf.math.squared_difference(wide, mean), axes, keepdims=keepdims)
    mean = mean if keepdims else tf.reshape(mean, tf.shape(variance))
    return tf.cast(mean, x.dtype), tf.cast(variance, x.dtype)


@contextlib.contextmanager
def steps_folded(model: keras.Model) -> Iterator[None]:
    """Within, `TimeDistributed` layers take all steps at once, as samples of one step, where shapes are static.

    Keras unrolls them: over 100 steps a Dense layer becomes 800 operations, which XLA compiles for minutes and pfor
    writes anew. Layers whose samples influence each other would tell the difference; the audit refuses those anyway.
    """
    with calls_wrapped([layer for layer in leaf_layers(model) if type(layer) is keras.layers.TimeDistributed], _folded):
        yield


def _folded(layer: keras.Layer, call: Any) -> Any:
    def folded(inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        if None in inputs.shape:
            return call(inputs, training=training, mask=mask)
        batch, steps, *sample = inputs.shape
        flat = keras.ops.reshape(inputs, (batch * steps, 1, *sample))
        mask = None if mask is None else keras.ops.reshape(mask, (batch * steps, 1, *mask.shape[2:]))
        result = call(flat, training=training, mask=mask)
        return keras.ops.reshape(result, (batch, steps, *result.shape[2:]))

    return folded
