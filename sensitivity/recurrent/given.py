"""What a recurrent layer is given by its model: sequences, and the states that it begins with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ..errors import Refused, gist
from ..given import Given as Several
from ..layers import as_graph, calls_wrapped, declared_inputs, keras, outputs_of
from .halves import Half

Given = tuple[tf.Tensor, list[list[tf.Tensor]]]


def checked(model: keras.Model, windows: Any) -> tuple[keras.Model, np.ndarray]:
    """Windows in the dtype that the model takes, and the model; several inputs as one array, and a model that takes it.

    Raises `Refused` where it cannot take them.
    """
    declared = list(declared_inputs(model).values())
    if len(declared) > 1:
        packed, packing = Several(windows).packed(model, "output", _floating(declared))
        return (packing.wrapped(model) if packing else model), packed
    source = np.asarray(windows, declared[0].dtype if declared else None)
    wanted = tuple(declared[0].shape[1:]) if declared else (None,) * max(2, source.ndim - 1)
    fits = source.ndim == len(wanted) + 1 and all(w in (None, n) for w, n in zip(wanted, source.shape[1:], strict=True))
    if not fits or not source.size:
        shape = ", ".join("any" if size is None else str(size) for size in wanted)
        raise Refused(
            "windows",
            given=f"an array of shape {source.shape}",
            allowed=f"(batch, {shape}), as the model takes, with at least one window",
            remedy="give windows of the model's own shape; a single window as windows[None]",
        )
    return model, source


def _floating(declared: list[Any]) -> str:
    """The dtype of its inputs of numbers."""
    return next((tensor.dtype for tensor in declared if "float" in tensor.dtype), "float32")


def thinned(source: np.ndarray, most: int) -> np.ndarray:
    """At most so many windows, evenly chosen."""
    if most < 1:
        raise Refused("most_windows", given=most, allowed="1 or more", remedy="give more")
    return source[np.linspace(0, len(source) - 1, min(most, len(source))).astype(int)]


class Watch:
    """A function of windows: what the model then gives the layer.

    Sequences `(window, step, input)` in the order of time, and the states `(window, unit)` that each half begins with.
    """

    def __init__(self, model: keras.Model, halves: tuple[Half, ...]) -> None:
        self._model, self._halves, self._owner = model, halves, halves[0].owner
        if getattr(self._owner, "stateful", False):
            raise self._refused("stateful=True", "layers that begin anew with each window", "build it without that")
        self._function = as_graph(self._traced)

    def __call__(self, windows: np.ndarray) -> Given:
        try:
            sequences, states, masked = self._function(tf.constant(windows))
        except Refused:
            raise
        except Exception as error:
            raise Refused(
                "windows",
                given=f"shape {windows.shape}, on which the model fails ({gist(error)})",
                allowed="windows that the model takes",
                remedy="see that model(windows) runs, and that it calls the layer outside loops of its own",
            ) from error
        if masked is not None and bool(masked):
            raise self._refused("steps that are masked", "windows without masked steps", "leave out padded windows")
        return sequences, states

    def _traced(self, windows: tf.Tensor) -> tuple[tf.Tensor, list[list[tf.Tensor]], tf.Tensor | None]:
        calls: list[dict[str, Any]] = []

        def watched(layer: keras.Layer, call: Callable[..., Any]) -> Callable[..., Any]:
            signature = inspect.signature(call)

            def noted(*args: Any, **kwargs: Any) -> Any:
                calls.append(signature.bind(*args, **kwargs).arguments)
                return call(*args, **kwargs)

            return noted

        with calls_wrapped([self._owner], watched):
            outputs_of(self._model, windows)
        return self._only(calls)

    def _only(self, calls: list[dict[str, Any]]) -> tuple[tf.Tensor, list[list[tf.Tensor]], tf.Tensor | None]:
        if len(calls) != 1:
            raise self._refused(f"{len(calls)} calls", "one call of the layer by the model", "give a model with one")
        (call,) = calls
        if call.get("training") is True:
            raise self._refused("a call in training", "a call as for predictions", "build the model without training=")
        sequences = tf.cast(call["sequences"], self._owner.compute_dtype)
        masked = None if call.get("mask") is None else ~tf.reduce_all(tf.cast(call["mask"], "bool"))
        return sequences, self._states(call.get("initial_state"), sequences), masked

    def _states(self, given: Any, sequences: tf.Tensor) -> list[list[tf.Tensor]]:
        """Of each half; the two of a `Bidirectional` are given one after the other."""
        found = []
        flat = None if given is None else keras.tree.flatten(given)
        for half in self._halves:
            own = keras.tree.flatten(half.rnn.get_initial_state(batch_size=sequences.shape[0]))
            if flat is not None:
                first = len(own) if half.rnn is getattr(self._owner, "backward_layer", None) else 0
                own = flat[first : first + len(own)]
            found.append([tf.cast(state, half.rnn.cell.compute_dtype) for state in own])
        return found

    def _refused(self, given: str, allowed: str, remedy: str) -> Refused:
        return Refused("layer", given=f"{self._owner.name}, with {given}", allowed=allowed, remedy=remedy)
