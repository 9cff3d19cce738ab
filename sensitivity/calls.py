"""A Keras model's graph as a list of calls in order, each from numbered values to numbered values.

Value 0 is what is differentiated by: the window, one of several inputs, or what an inner layer gives. Models within the
model are read through.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from .cells import is_causal
from .layers import function_of, keras

WINDOW = 0


@dataclass(frozen=True, eq=False)
class Call:
    """An operation of the graph, from values to values by their numbers.

    size: numbers that it gives, of a sample. has_state: it is a recurrent layer, or a causal convolution, which
    remembers a few steps.
    """

    operation: Any
    arguments: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    size: int
    has_state: bool

    def __call__(self, *inputs: Any) -> list[Any]:
        given = {id(tensor): value for tensor, value in zip(self.arguments.keras_tensors, inputs, strict=True)}
        args, kwargs = self.arguments.fill_in(given)
        if isinstance(self.operation, keras.Layer):
            kwargs["training"] = False  # as `model.predict` has it, whatever the graph was built with
        return keras.tree.flatten(self.operation(*args, **kwargs))

    @property
    def name(self) -> str:
        return f"layer {self.operation.name!r} ({type(self.operation).__name__})"


class Graph:
    """All calls of a model, those of models within it too, in order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.count = WINDOW + 1

    def number(self) -> int:
        """Of a value more."""
        self.count += 1
        return self.count - 1

    def add(self, function: Any, inputs: list[int]) -> list[int]:
        """The numbers of the function's outputs, given those of its inputs."""
        numbers = dict(zip(map(id, function.inputs), inputs, strict=True))
        for depth in sorted(function._nodes_by_depth, reverse=True):
            for node in function._nodes_by_depth[depth]:
                if not node.is_input and all(id(tensor) in numbers for tensor in node.input_tensors):
                    outputs = self._call(node, [numbers[id(tensor)] for tensor in node.input_tensors])
                    numbers.update(zip(map(id, node.outputs), outputs, strict=True))
        return [numbers[id(tensor)] for tensor in function.outputs]

    def _call(self, node: Any, inputs: list[int]) -> list[int]:
        inner, given = function_of(node.operation), node.arguments.args[0] if node.arguments.args else None
        in_order = len(inputs) == 1 or isinstance(given, (list, tuple))  # inputs by name come in an order of their own
        if inner is not None and in_order and len(inputs) == len(inner.inputs) and not options_of(node.arguments):
            return self.add(inner, inputs)
        outputs = [self.number() for _ in node.outputs]
        size = sum(math.prod(length or 1 for length in tensor.shape[1:]) for tensor in node.outputs)
        layer = node.operation
        has_state = isinstance(layer, keras.layers.RNN) or (type(layer) is keras.layers.Conv1D and is_causal(layer))
        self.calls.append(Call(layer, node.arguments, tuple(inputs), tuple(outputs), size, has_state))
        return outputs


def given_by(calls: list[Call]) -> list[int]:
    return [value for call in calls for value in call.outputs]


def needed_for(calls: list[Call], ends: Any) -> set[int]:
    """The values that `ends` depend on, and these."""
    needed = set(ends)
    for call in reversed(calls):
        if needed.intersection(call.outputs):
            needed.update(call.inputs)
    return needed


def evaluate(calls: Any, known: dict[int, tf.Tensor]) -> None:
    """Add what calls give, of those whose inputs are known, to what is known."""
    for call in calls:
        if all(value in known for value in call.inputs) and not all(value in known for value in call.outputs):
            known.update(zip(call.outputs, call(*(known[value] for value in call.inputs)), strict=True))


def options_of(arguments: Any) -> list[Any]:
    """What a call is given beside its input, and would not have without it."""
    given = keras.tree.flatten([*arguments.args[1:], *arguments.kwargs.values()])
    return [part for part in given if part is not None and part is not False]
