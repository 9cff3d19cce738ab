"""Whether a model is one causal cell: its time axis crossed by recurrent layers going forward, and by nothing else.

The model's graph is read as a list of calls in order, each from numbered values to numbered values; value 0 is the
window. A value is a sequence `(batch, step, …)`, or what is left after the last step. A call that is no recurrent
layer may work on sequences if it treats every step alone and alike, which is tried on random numbers: all steps at
once, and each step as a sample of one step, must give the same; with other weights, too, since those that the model
has may be zero by chance, and change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from .cells import AnyCell, Cell, cells_of, is_causal
from .heads import heads, joined
from .layers import keras
from .walks import ScanFacts

WINDOW = 0
_TOLERANCE = 1e-4
_LAST = "last step"
_NUMBERS = 0.1  # of what a call gives for random numbers, at least
_CONVOLUTIONS = ("Conv1D", "DepthwiseConv1D", "SeparableConv1D", "Conv1DTranspose")
_RECURRENT = (keras.layers.RNN, keras.layers.LSTM, keras.layers.GRU, keras.layers.SimpleRNN)
_KERAS_CALLS, _KERAS_LOOPS = {kind.call for kind in _RECURRENT}, {kind.inner_loop for kind in _RECURRENT}


class Unfit(ValueError):
    """Why a model is not one causal cell, with the layer's name."""


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
        return keras.tree.flatten(self.operation(*args, **kwargs))

    @property
    def name(self) -> str:
        return f"layer {self.operation.name!r} ({type(self.operation).__name__})"


@dataclass(frozen=True)
class Recurrence:
    """A model as one causal cell.

    calls: on sequences, in order. cells: of the recurrent ones. last: the values at the last step that the head begins
    with, and the sequences that they are of. head: the calls after the last step; without any `last`, the model gives
    an output at every step. outputs: the model's, None where they are not asked for. widths: numbers a step of each
    sequence.
    """

    model: keras.Model
    of: str
    calls: tuple[Call, ...]
    cells: dict[Call, list[Cell]]
    last: dict[int, int]
    head: tuple[Call, ...]
    outputs: tuple[int | None, ...]
    widths: dict[int, int]

    @property
    def is_sequence(self) -> bool:
        return not self.last

    @property
    def sources(self) -> list[int]:
        """The sequences that outputs are read from: the window, and what the recurrent layers give."""
        every = [WINDOW, *(call.outputs[0] for call in self.cells)]
        return [value for value in every if value in _needed([c for c in self.calls if not c.has_state], self.ends)]

    @property
    def ends(self) -> list[int]:
        """The sequences that are the outputs, or that the head begins with."""
        return list(self.last.values()) if self.last else [value for value in self.outputs if value is not None]

    @property
    def inner(self) -> list[Call]:
        """The calls that recurrent layers depend on, and these: what a step is pulled back through."""
        needed = _needed(list(self.calls), [call.inputs[0] for call in self.cells])
        return [call for call in self.calls if call.has_state or needed.intersection(call.outputs)]

    def facts(self, target_shape: tuple[int, ...]) -> ScanFacts:
        cells = [(self.widths[call.inputs[0]], cell) for call, cells in self.cells.items() for cell in cells]
        outputs = math.prod(target_shape[1:]) if self.is_sequence else 0
        between = [call for call in self.inner if not call.has_state]
        read = [call for call in self.calls if not call.has_state and call not in between]
        kept = [inputs + cell.saved + cell.output_width for inputs, cell in cells]
        return ScanFacts(
            outputs=outputs,
            states=sum(sum(cell.widths) for _, cell in cells),
            saved=sum(self.widths.values()) + sum(kept),
            seeds=outputs * self._width([*self.sources, *_given(read)]),
            head=sum(call.size for call in self.head) + self._width(self.sources),
            row=sum(inputs + sum(cell.widths) for inputs, cell in cells) + self._width(_given(between)),
            matrices=sum(cell.matrices for _, cell in cells),
        )

    def _width(self, values: list[int]) -> int:
        return sum(self.widths[value] for value in values)

    def read(self, values: Mapping[int, tf.Tensor]) -> tf.Tensor:
        """The target, from what `sources` are: sequences of any number of steps, or of the last step alone."""
        known = dict(values)
        evaluate([call for call in self.calls if not call.has_state], known)
        for value, sequence in self.last.items():
            known[value] = _at_last(known[sequence])
        evaluate(self.head, known)
        every = [None if value is None else known[value] for value in self.outputs]
        packed = keras.tree.pack_sequence_as(_function(self.model)._outputs_struct, every)
        return joined(heads(self.model, packed, self.of))


def _at_last(sequence: tf.Tensor) -> tf.Tensor:
    """A slice's gradient has no pfor converter under XLA; a squeeze's has."""
    return tf.squeeze(sequence, 1) if sequence.shape[1] == 1 else sequence[:, -1]


def evaluate(calls: Any, known: dict[int, tf.Tensor]) -> None:
    """Add what calls give, of those whose inputs are known, to what is known."""
    for call in calls:
        if all(value in known for value in call.inputs) and not all(value in known for value in call.outputs):
            known.update(zip(call.outputs, call(*(known[value] for value in call.inputs)), strict=True))


def recurrence(
    model: keras.Model, input_shape: tuple[int, ...], of: str = "output", dtype: str = "float32"
) -> Recurrence:
    """The model on windows of that shape and dtype as one causal cell. Raises `Unfit`."""
    function = _function(model)
    if function is None:
        raise Unfit(f"model {model.name!r} is no graph of layers, but Python code")
    if len(input_shape) < 2:
        raise Unfit("the model's input has no time axis")
    graph = _Graph()
    outputs = graph.add(function, [WINDOW])
    packed = keras.tree.pack_sequence_as(function._outputs_struct, outputs)
    chosen = list(heads(model, packed, of).values())
    needed = _needed(graph.calls, chosen)
    walk = _Walk(needed, input_shape[0], dtype, {WINDOW: input_shape[1:]})
    asked = [call for call in graph.calls if needed.intersection(call.outputs)]
    for call in asked:  # before the operations that they are made of, which have no names of the user's
        if reason := _unfit_anywhere(call.operation, dtype) or _why_not_forward(call):
            raise Unfit(f"{call.name} {reason}")
    if not any(call.has_state for call in asked):
        raise Unfit("the model has no recurrent layer")
    for call in asked:
        walk.visit(call)
    if len(chosen) > 1 and () in map(walk.shapes.get, chosen):
        raise Unfit("some of its outputs have no channel axis")
    if len({value in walk.shapes for value in chosen}) > 1:
        raise Unfit("some outputs are of every step, some of the last")
    widths = {value: int(np.prod(shape)) for value, shape in walk.shapes.items()}
    reached = tuple(value if value in chosen else None for value in outputs)
    return Recurrence(model, of, tuple(walk.calls), walk.cells, walk.last, tuple(walk.head), reached, widths)


def _function(model: Any) -> Any:
    """The graph of a functional or sequential model; None of any other."""
    if isinstance(model, keras.Sequential):
        own = getattr(type(model).call, "__qualname__", "") != "Sequential.call"
        return None if own else getattr(model, "_functional", None)
    return model if getattr(type(model).call, "__qualname__", "") == "Functional.call" else None


def _given(calls: list[Call]) -> list[int]:
    return [value for call in calls for value in call.outputs]


def _needed(calls: list[Call], ends: Any) -> set[int]:
    """The values that `ends` depend on, and these."""
    needed = set(ends)
    for call in reversed(calls):
        if needed.intersection(call.outputs):
            needed.update(call.inputs)
    return needed


class _Graph:
    """All calls of a model, those of models within it too, in order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._count = WINDOW + 1

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
        inner = _function(node.operation)
        if inner is not None and len(inputs) == len(inner.inputs) and not _options(node.arguments):
            return self.add(inner, inputs)
        outputs = list(range(self._count, self._count + len(node.outputs)))
        self._count += len(outputs)
        size = sum(math.prod(length or 1 for length in tensor.shape[1:]) for tensor in node.outputs)
        layer = node.operation
        has_state = isinstance(layer, keras.layers.RNN) or (type(layer) is keras.layers.Conv1D and is_causal(layer))
        self.calls.append(Call(layer, node.arguments, tuple(inputs), tuple(outputs), size, has_state))
        return outputs


class _Walk:
    """One pass over the calls, sorting them: on sequences, or after the last step. shapes: of a sequence's step."""

    def __init__(self, needed: set[int], steps: int, dtype: str, shapes: dict[int, tuple[int, ...]]) -> None:
        self.needed, self.steps, self.dtype, self.shapes = needed, steps, dtype, shapes
        self.calls: list[Call] = []
        self.cells: dict[Call, list[Cell]] = {}
        self.head: list[Call] = []
        self.last: dict[int, int] = {}

    def visit(self, call: Call) -> None:
        along = [value in self.shapes for value in call.inputs]
        if not any(along):
            if call.has_state:
                raise Unfit(f"{call.name} begins anew after the last step")
            self.head.append(call)
        elif not all(along):
            raise Unfit(f"{call.name} mixes sequences with what is left after the last step")
        elif call.has_state:
            self._visit_recurrent(call)
        else:
            self._visit_other(call)

    def _visit_recurrent(self, call: Call) -> None:
        layer = call.operation
        if self.needed.intersection(call.outputs[1:]):
            raise Unfit(f"{call.name} hands its states on to other layers")
        if len(self.shapes[call.inputs[0]]) != 1:
            raise Unfit(f"{call.name} takes more than a vector a step")
        cells = cells_of(layer)
        _require_steps_back(call, cells, self.shapes[call.inputs[0]][0], self.dtype)
        if getattr(layer, "return_sequences", True):
            sequence = call.outputs[0]
        else:  # the layer's every output has a number of its own
            sequence = -call.outputs[0]
            self.last[call.outputs[0]] = sequence
        self.shapes[sequence] = (cells[-1].output_width,)
        self.calls.append(replace(call, outputs=(sequence,)))
        self.cells[self.calls[-1]] = cells

    def _visit_other(self, call: Call) -> None:
        reason = _known_to_cross(call.operation)
        if reason:
            raise Unfit(f"{call.name} {reason}")
        if type(call.operation) is keras.layers.TimeDistributed:
            shape = call.operation.compute_output_shape((1, self.steps, *self.shapes[call.inputs[0]]))
            found: list[tuple[int, ...]] | None = [tuple(shape[2:])]
        else:
            values = [_random((2, self.steps, *self.shapes[value]), self.dtype, value) for value in call.inputs]
            found = _tried(call, values)
            with keras.StatelessScope(state_mapping=_other_weights(call.operation)):
                found = found if _tried(call, values) == found else None
            if found == _LAST:
                self.last[call.outputs[0]] = call.inputs[0]
                return
        if found is None:
            raise Unfit(f"{call.name} does not treat every time step alone and alike")
        self.shapes.update(zip(call.outputs, found, strict=True))
        self.calls.append(call)


def _why_not_forward(call: Call) -> str:
    layer, arguments = call.operation, call.arguments
    if not isinstance(layer, keras.layers.RNN):
        return ""
    given = dict(zip(("initial_state", "mask", "training"), arguments.args[1:], strict=False)) | arguments.kwargs
    if type(layer).call not in _KERAS_CALLS or type(layer).inner_loop not in _KERAS_LOOPS:
        return "has a loop of its own"
    if layer.go_backwards:
        return "goes backwards"
    if given.get("mask") is not None:
        return "is called with a mask"
    if given.get("initial_state") is not None:
        return "begins with states that it is given"
    if given.get("training"):
        return "is called in training"
    if not all(isinstance(size, int) for size in keras.tree.flatten(layer.cell.state_size)):
        return "keeps states that are not vectors"
    return ""


def _options(arguments: Any) -> list[Any]:
    """What a call is given beside its input, and would not have without it."""
    given = [*arguments.args[1:], *arguments.kwargs.values()]
    return [part for part in given if part is not None and part is not False]


def _known_to_cross(operation: Any) -> str:
    kind = type(operation).__name__
    if "Attention" in kind:
        return "attends to other steps"
    if kind in _CONVOLUTIONS:
        return "mixes neighbouring steps"
    if "Pooling" in kind:
        return "pools steps"
    return ""


def _unfit_anywhere(operation: Any, dtype: str) -> str:
    cell = getattr(operation, "cell", None)
    for part in (operation, cell, getattr(operation, "layer", None), *getattr(cell, "cells", ())):
        if getattr(part, "compute_dtype", dtype) != dtype:
            return f"computes in {part.compute_dtype}"
    if isinstance(operation, keras.layers.Bidirectional):
        return "goes backwards too"
    if isinstance(operation, keras.layers.Masking) or getattr(operation, "mask_zero", False):
        return "masks steps"
    return ""


def _require_steps_back(call: Call, cells: list[Cell], width: int, dtype: str) -> None:
    """A step of a user's cell may be beyond what is differentiated for many rows at once."""
    for cell in cells:
        if isinstance(cell, AnyCell):
            outputs, trace = cell.run(_random((1, 1, width), dtype, 0))
            adjoints = [tf.zeros((1, 2, size), dtype) for size in cell.widths]
            try:
                cell.pull(tf.nest.map_structure(lambda part: part[0], trace), tf.repeat(outputs, 2, 1), adjoints)
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[-1].strip()[:100]}"
                raise Unfit(f"{call.name} has a cell whose step cannot be walked back ({reason})") from error
        width = cell.output_width


def _tried(call: Call, values: list[tf.Tensor]) -> Any:
    """What the call is on these sequences: `_LAST` where it gives the last step, the shapes of what it gives of a step
    where it treats each alone and alike, else None.
    """
    try:
        whole = call(*values)
        last = values[0][:, -1]
        if len(values) == 1 and whole[0].shape == last.shape and bool(tf.reduce_all(whole[0] == last)):
            return _LAST
        return _stepwise(call, values, whole)
    except Unfit:
        raise
    except Exception:  # whatever a layer raises on a window of one step
        return None


def _other_weights(operation: Any) -> list[tuple[Any, tf.Tensor]]:
    """Its floating-point weights, each a little larger: none is zero, and what is positive stays so."""
    random = np.random.default_rng(0)
    weights = [weight for weight in getattr(operation, "variables", []) if "float" in str(weight.dtype)]
    return [(w, tf.convert_to_tensor(w) + tf.constant(0.1 + 0.2 * random.random(w.shape), w.dtype)) for w in weights]


def _stepwise(call: Call, values: list[tf.Tensor], whole: list[tf.Tensor]) -> list[tuple[int, ...]] | None:
    """The shapes of what the call gives of a step, if it treats each alone and alike, else None.

    whole: what it gives of all steps at once.
    """
    if any(getattr(part, "_keras_mask", None) is not None for part in whole):
        raise Unfit(f"{call.name} masks steps")
    for part in whole:
        if part.dtype != values[0].dtype:
            raise Unfit(f"{call.name} gives {part.dtype.name}, where only {values[0].dtype.name} passes through")
    alone = call(*(tf.reshape(value, (-1, 1, *value.shape[2:])) for value in values))
    batch, steps = values[0].shape[:2]
    for found, expected in zip(alone, whole, strict=True):
        if tuple(expected.shape[:2]) != (batch, steps):
            return None
        if not _agree(tf.reshape(found, expected.shape).numpy(), expected.numpy()):
            return None
    return [tuple(expected.shape[2:]) for expected in whole]


def _agree(found: np.ndarray, expected: np.ndarray) -> bool:
    """To rounding, where there are numbers; a few at least."""
    finite = np.isfinite(expected)
    scale = np.abs(expected[finite]).max(initial=0.0)
    close = np.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True)
    return close and finite.mean() > _NUMBERS


def _random(shape: tuple[int, ...], dtype: str, seed: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(abs(seed)).standard_normal(shape), dtype)
