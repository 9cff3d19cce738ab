"""What a model is differentiated by, beside its input: what an inner layer gives."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from .errors import Refused, suggested
from .facts import Source
from .layers import as_graph, calls_wrapped, function_of, input_names, keras, leaf_layers, outputs_of, whole_inputs
from .packing import Packing, Unpacked, Wrapper
from .parts import Part, of_parts

INPUT = "input"


def source_named(
    model: keras.Model, wrt: str, zeros: tf.Tensor, given: keras.Model, packing: Packing | None = None
) -> Source:
    """What `wrt` means for a model that takes windows such as `zeros`. given: the model that is wrapped or cut in it,
    which knows its inputs. Raises `Refused`.
    """
    parts = _input_named(given, wrt, packing)
    if parts is not None:
        return Source("input", wrt, tuple(of_parts(zeros, parts).shape[1:]), parts)
    inputs = [f'"{part.name}"' for part in packing.inputs] if packing else []
    layer = layer_named(model, wrt, "sensitivity.wrt", also=", ".join([*(inputs or [f'"{INPUT}"']), '"weights"']))
    found: list[Any] = []
    with calls_wrapped([layer], _kept_in(found)):
        graph = as_graph(lambda windows: outputs_of(model, windows)).get_concrete_function(zeros).graph
    _require_one_tensor(layer, "sensitivity.wrt", found, graph)
    return Source("layer", wrt, tuple(found[0].shape[1:]))


def _input_named(model: keras.Model, wrt: str, packing: Packing | None) -> tuple[Part, ...] | None:
    """The parts of a window that lead to the input of that name; None: no input has it."""
    names = [INPUT, *(input_names(model) if len(input_names(model)) == 1 else [])]
    own = INPUT if wrt in names and not (packing and packing.inputs) else wrt
    parts = packing.source(own) if packing else () if own == INPUT else None
    if parts is None and wrt == INPUT and packing and packing.inputs:
        raise Refused(
            "sensitivity.wrt",
            given='"input", all of several inputs together, which have no steps in common here',
            allowed=", ".join(f'"{part.name}"' for part in packing.inputs),
            remedy=f'name one of them: wrt="{packing.inputs[0].name}"',
        )
    every = wrt == INPUT and INPUT not in input_names(model)
    counted = [name for name in whole_inputs(model) if every or name == wrt]
    if parts is not None and counted:
        among = every and len(input_names(model)) > 1
        embeddings = embedding_names(model)
        raise Refused(
            "sensitivity.wrt",
            given=f"input {counted[0]!r} of whole numbers" + (", among all inputs" if among else ""),
            allowed="inputs of floating-point numbers: whole numbers have no derivative",
            remedy=f'name the embedding layer: wrt = "{embeddings[0]}"' if embeddings else "name another input",
        )
    return parts


def embedding_names(model: keras.Model) -> list[str]:
    """Names of the layers of a model that give floating-point numbers for whole ones."""
    return [layer.name for layer in model._flatten_layers() if isinstance(layer, keras.layers.Embedding)]


def _kept_in(found: list[Any]) -> Callable[[keras.Layer, Any], Any]:
    """Wraps a call so that what it gives is kept."""

    def wrap(layer: keras.Layer, call: Any) -> Any:
        def kept(*args: Any, **kwargs: Any) -> Any:
            found.append(call(*args, **kwargs))
            return found[-1]

        return kept

    return wrap


def _require_one_tensor(layer: keras.Layer, key: str, found: list[Any], graph: Any) -> None:
    """Refuse a layer whose output is not one tensor of floating-point numbers of each window, in the model's graph.

    graph: None where it is called outside of any. A loop, or a user's `tf.function`, is a graph of its own, which may
    have been traced before.
    """
    given = None
    if not found or getattr(found[0], "graph", graph) is not graph:
        given = "is not called but within a loop or a function of its own"
    elif len(found) > 1:
        given = f"is called {len(found)} times"
    elif not isinstance(found[0], tf.Tensor):
        given = f"gives {len(keras.tree.flatten(found[0]))} tensors"
    elif not found[0].dtype.is_floating:
        given = f"gives {found[0].dtype.name}"
    elif None in found[0].shape[1:] or len(found[0].shape) < 2:
        given = f"gives {tuple(found[0].shape)}"
    if given:
        raise Refused(
            key,
            given=f"layer {layer.name!r}, which {given}",
            allowed="layers that are called once, and give one tensor (batch, …) of floating-point numbers",
            remedy="name another layer",
        )


def layer_named(model: keras.Model, name: str, key: str, *, also: str) -> keras.Layer:
    """The one layer of that name, of the model or of models within. Raises `Refused` in the name of `key`."""
    layers = [layer for layer in model._flatten_layers(include_self=False) if layer.name == name]
    if len(layers) == 1:
        return layers[0]
    names = list(dict.fromkeys(layer.name for layer in leaf_layers(model) if not _is_cell(layer)))
    inner = ", ".join(names)
    others = re.findall('"([^"]*)"', also)
    raise Refused(
        key,
        given=f"{name!r}" + (f", which {len(layers)} layers are called" if layers else ""),
        allowed=f"{also}, or the name of a layer: {inner}" if inner else also,
        remedy="give each layer a name of its own"
        if layers
        else suggested(name, [*others, *names], "name one of these"),
    )


def _is_cell(layer: keras.Layer) -> bool:
    """Whether a recurrent layer calls it, step by step."""
    return hasattr(layer, "state_size") and not isinstance(layer, keras.layers.RNN)


@contextlib.contextmanager
def moved(model: keras.Model, source: Source, by: tf.Tensor) -> Iterator[None]:
    """Within, the source's layer gives `by` (batch, *source.shape) more than it does."""

    def wrap(layer: keras.Layer, call: Any) -> Any:
        def with_more(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            return result + tf.cast(by, result.dtype)

        return with_more

    with calls_wrapped([layer_named(model, source.name, "sensitivity.wrt", also="")], wrap):
        yield


def given_by_layer(model: keras.Model, layer: keras.Layer, windows: tf.Tensor) -> tf.Tensor:
    """What an inner layer gives; what comes after it is not computed, in a graph."""
    found: list[Any] = []
    with calls_wrapped([layer], _kept_in(found)):
        outputs_of(model, windows)
    return found[0]


def with_output(model: keras.Model, of: str) -> keras.Model:
    """The model itself, or as far as its inner layer `of`: one that gives what that layer gives. Raises `Refused`."""
    if isinstance(model, Unpacked):
        return model.around(with_output(model.inner, of))
    names = list(getattr(model, "output_names", None) or [])
    if of == "output" or of in names or not isinstance(model, keras.Model):
        return model
    if of not in [layer.name for layer in model._flatten_layers(include_self=False)]:
        return model  # the name of an output of a subclassed model, or of none: `heads` tells
    layer = layer_named(model, of, "sensitivity.of", also='"output"')
    function = function_of(model)
    is_one_of = function is not None and any(operation is layer for operation in function.operations)
    if is_one_of and _is_called_once(layer) and not isinstance(layer, keras.Model):  # whose output is its own graph's
        given = getattr(function, "_inputs_struct", function.inputs)
        return keras.Model(given, {of: layer.output}, name=model.name)
    return _UpTo(model, layer)


def _is_called_once(layer: keras.Layer) -> bool:
    return len(layer._inbound_nodes) == 1


class _UpTo(Wrapper):
    """A model that gives what one of its inner layers gives, wherever that is called from."""

    def __init__(self, model: keras.Model, layer: keras.Layer) -> None:
        super().__init__(model)
        self._layer = layer

    def call(self, windows: Any) -> dict[str, Any]:
        found: list[Any] = []
        with calls_wrapped([self._layer], _kept_in(found)):
            outputs_of(self.inner, windows)
        _require_one_tensor(self._layer, "sensitivity.of", found, getattr(windows, "graph", None))
        return {self._layer.name: found[0]}

    def around(self, model: keras.Model) -> keras.Model:
        return _UpTo(model, layer_named(model, self._layer.name, "sensitivity.of", also='"output"'))
