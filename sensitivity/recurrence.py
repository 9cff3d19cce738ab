"""A model as one causal cell: its time axis crossed by recurrent layers going forward, and by nothing else.

The calls of its graph are sorted: those that do not depend on the source, which may do anything; those on sequences
`(batch, step, …)`; and the head, on what is left after the last step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from .calls import WINDOW, Call, Graph, evaluate, given_by, needed_for
from .cells import Cell, cells_of
from .fitness import Unfit, a_step_of, require_fit, require_steps_back
from .heads import heads, joined
from .held import Held, Taken
from .layers import declared_inputs, function_of, keras
from .packing import LossOf, Unpacked
from .parts import Part
from .tracing import numbers_of
from .walks import ScanFacts


@dataclass(frozen=True)
class Recurrence:
    """A model as one causal cell.

    held: what does not depend on the source. beside: of it, sequences that calls on sequences take. calls: on
    sequences, in order. cells: of the recurrent ones. last: the values at the last step that the head begins with, and
    the sequences that they are of. head: the calls after the last step; without any `last`, the model gives an output
    at every step. outputs: the model's, None where they are not asked for. widths: numbers a step of each sequence.
    work: numbers a step that users' layers compute on the way.
    """

    model: keras.Model
    of: str
    held: Held
    beside: frozenset[int]
    calls: tuple[Call, ...]
    cells: dict[Call, list[Cell]]
    last: dict[int, int]
    head: tuple[Call, ...]
    outputs: tuple[int | None, ...]
    widths: dict[int, int]
    work: dict[Call, int]

    @property
    def is_sequence(self) -> bool:
        return not self.last

    @property
    def sources(self) -> list[int]:
        """The sequences that outputs are read from: the window, and what the recurrent layers give."""
        every = [WINDOW, *(call.outputs[0] for call in self.cells)]
        return [value for value in every if value in needed_for([c for c in self.calls if not c.has_state], self.ends)]

    @property
    def read_from(self) -> list[int]:
        """The sequences that `read` takes at the steps that are read."""
        return [*self.sources, *self.beside]

    @property
    def ends(self) -> list[int]:
        """The sequences that are the outputs, or that the head begins with."""
        return list(self.last.values()) if self.last else [value for value in self.outputs if value is not None]

    @property
    def inner(self) -> list[Call]:
        """The calls that recurrent layers depend on, and these: what a step is pulled back through."""
        needed = needed_for(list(self.calls), [call.inputs[0] for call in self.cells])
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
            saved=sum(self.widths.values()) + sum(self.work.values()) + sum(kept),
            seeds=outputs * (self._width(self.sources) + self._computed(read)),
            head=sum(call.size for call in self.head) + self._width(self.sources),
            row=sum(inputs + sum(cell.widths) + cell.work for inputs, cell in cells) + self._computed(between),
            matrices=sum(cell.matrices for _, cell in cells),
        )

    def _width(self, values: list[int]) -> int:
        return sum(self.widths[value] for value in values)

    def _computed(self, calls: list[Call]) -> int:
        return self._width(given_by(calls)) + sum(self.work[call] for call in calls)

    def read(self, values: Mapping[int, tf.Tensor], held: Mapping[int, tf.Tensor]) -> tf.Tensor:
        """The target, from what `read_from` are: sequences of any number of steps, or of the last step alone; and from
        what is held of whole windows, where there is a head.
        """
        known = dict(values)
        evaluate([call for call in self.calls if not call.has_state], known)
        for value, sequence in self.last.items():
            known[value] = _at_last(known[sequence])
        known.update(held)
        evaluate(self.head, known)
        every = [None if value is None else known[value] for value in self.outputs]
        packed = keras.tree.pack_sequence_as(function_of(self.model)._outputs_struct, every)
        return joined(heads(self.model, packed, self.of))


def _at_last(sequence: tf.Tensor) -> tf.Tensor:
    """A slice's gradient has no pfor converter under XLA; a squeeze's has."""
    return tf.squeeze(sequence, 1) if sequence.shape[1] == 1 else sequence[:, -1]


def recurrence(
    model: keras.Model,
    shape: tuple[int, ...],
    of: str = "output",
    dtype: str = "float32",
    after: keras.Layer | None = None,
    *,
    name: str = "",
    window: tuple[int, ...] | None = None,
) -> Recurrence:
    """The model as one causal cell of a source of that shape and dtype, the rest of its windows held. Raises `Unfit`.

    after: a layer whose output is the source; None: it is the input of that `name`, or all inputs of a window. window:
    the shape of a window, where the source is a part of it.
    """
    if isinstance(model, LossOf):
        raise Unfit("a loss has one gradient a window, where a scan serves several outputs")
    given = model.inner if isinstance(model, Unpacked) else model
    function = function_of(given)
    if function is None:
        raise Unfit(f"model {model.name!r} is no graph of layers, but Python code")
    if len(shape) < 2:
        raise Unfit("the model's input has no time axis" if after is None else f"{after.name!r} gives no sequence")
    parts = model.packing.inputs if isinstance(model, Unpacked) else ()
    graph, outputs, taken = _laid_out(function, parts, shape, dtype, after, name)
    packed = keras.tree.pack_sequence_as(function._outputs_struct, outputs)
    chosen = list(heads(given, packed, of).values())
    needed = needed_for(graph.calls, chosen)
    asked = [call for call in graph.calls if needed.intersection(call.outputs)]
    moving = _depending(asked)
    held = Held(taken, tuple(call for call in asked if not moving.intersection(call.inputs)))
    asked = [call for call in asked if moving.intersection(call.inputs)]
    for call in asked:  # before the operations that they are made of, which have no names of the user's
        require_fit(call, dtype)
    if not any(call.has_state for call in asked):
        raise Unfit("the model has no recurrent layer" + (" on the way" if held.calls else ""))
    if not moving.issuperset(chosen):
        raise Unfit("some of its outputs do not depend on the source")
    sort = _Sort(graph, needed, moving, shape, dtype, held.forms(window or shape, dtype) if taken else {})
    for call in asked:
        sort.visit(call)
    if len(chosen) > 1 and () in map(sort.shapes.get, chosen):
        raise Unfit("some of its outputs have no channel axis")
    if len({value in sort.shapes for value in chosen}) > 1:
        raise Unfit("some outputs are of every step, some of the last")
    widths = {value: math.prod(step) for value, step in (sort.shapes | sort.beside).items()}
    reached = tuple(value if value in chosen else None for value in outputs)
    return Recurrence(
        model=given,
        of=of,
        held=held,
        beside=frozenset(sort.beside),
        calls=tuple(sort.calls),
        cells=sort.cells,
        last=sort.last,
        head=tuple(sort.head),
        outputs=reached,
        widths=widths,
        work=sort.work,
    )


def _laid_out(
    function: Any, parts: Sequence[Part], shape: tuple[int, ...], dtype: str, after: keras.Layer | None, name: str
) -> tuple[Graph, list[int], dict[int, Taken]]:
    """The model's calls, the numbers of its outputs, and what inputs are taken from that are held."""
    graph, taken = Graph(), dict[int, Taken]()
    if after is None and not parts:
        inputs = [WINDOW]
    elif after is None and all(part.name != name for part in parts):
        inputs = _side_by_side(graph, function, parts, shape, dtype)
    else:
        inputs, taken = _apart(graph, function, parts, None if after is not None else name)
    outputs = graph.add(function, inputs)
    return graph, outputs if after is None else _cut_off(graph, outputs, after), taken


def _side_by_side(graph: Graph, function: Any, parts: Sequence[Part], shape: tuple[int, ...], dtype: str) -> list[int]:
    """The numbers of inputs that stand side by side in all steps of a window, which is the source."""
    short = [part.name for part in parts if part.steps != shape[0] or len(part.shape) != 2]
    if short:
        raise Unfit(f"input {short[0]!r} does not take all steps of a window")
    window, by_name = keras.Input(shape, dtype=dtype), {part.name: part for part in parts}
    own = [by_name[name] for name in declared_inputs(function)]
    return graph.add(keras.Model(window, [window[..., part.start : part.stop] for part in own]), [WINDOW])


def _apart(
    graph: Graph, function: Any, parts: Sequence[Part], source: str | None
) -> tuple[list[int], dict[int, Taken]]:
    """The numbers of inputs, and what those are taken from that are held: all but `source`."""
    by_name, taken, numbers = {part.name: part for part in parts}, {}, []
    for name, tensor in declared_inputs(function).items():
        if name == source:
            numbers.append(WINDOW)
            continue
        numbers.append(graph.number())
        taken[numbers[-1]] = Taken(by_name.get(name), tensor.dtype)
    return numbers, taken


def _cut_off(graph: Graph, outputs: list[int], after: keras.Layer) -> list[int]:
    """Put the source in place of what a layer gives; the numbers of the outputs then."""
    made = [call for call in graph.calls if call.operation is after]
    if len(made) != 1 or len(made[0].outputs) != 1:
        raise Unfit(f"layer {after.name!r} is not one call of the model's graph")
    (cut,) = made[0].outputs

    def renumbered(values: Iterable[int]) -> tuple[int, ...]:
        return tuple(WINDOW if value == cut else value for value in values)

    graph.calls = [replace(call, inputs=renumbered(call.inputs)) for call in graph.calls if call is not made[0]]
    return list(renumbered(outputs))


def _depending(calls: Sequence[Call]) -> set[int]:
    """The values that depend on the source, and this."""
    moving = {WINDOW}
    for call in calls:
        if moving.intersection(call.inputs):
            moving.update(call.outputs)
    return moving


class _Sort:
    """One pass over the calls: which are on sequences, which after the last step.

    moving: the values that depend on the source. shapes: of a sequence's step. held: the forms of values that do not
    move, of two windows. beside: of those that are taken as sequences, a step's shapes.
    """

    def __init__(
        self,
        graph: Graph,
        needed: set[int],
        moving: set[int],
        shape: tuple[int, ...],
        dtype: str,
        held: dict[int, tf.TensorSpec],
    ) -> None:
        self.needed, self.moving, self.steps, self.dtype, self.held = needed, moving, shape[0], dtype, held
        self.shapes = {WINDOW: shape[1:]}
        self.beside: dict[int, tuple[int, ...]] = {}
        self.calls: list[Call] = []
        self.cells: dict[Call, list[Cell]] = {}
        self.work: dict[Call, int] = {}
        self.head: list[Call] = []
        self.last: dict[int, int] = {}
        self._unused = itertools.count(graph.count)

    def visit(self, call: Call) -> None:
        along = [value in self.shapes for value in call.inputs if value in self.moving]
        if not any(along):
            if call.has_state:
                raise Unfit(f"{call.name} begins anew after the last step")
            self.head.append(replace(call, size=call.size + self._inside(call)))
        elif not all(along):
            raise Unfit(f"{call.name} mixes sequences with what is left after the last step")
        elif call.has_state:
            self._visit_cells(call)
        else:
            self._visit_other(call)

    def _taken(self, value: int, call: Call) -> tuple[int, ...]:
        """The shape of a step of a held value, which a call takes beside sequences."""
        form = self.held.get(value)
        if form is None:
            raise Unfit(f"{call.name} masks steps")
        if form.shape.rank is None or form.shape.rank < 2 or form.shape[1] != self.steps:
            raise Unfit(f"{call.name} mixes sequences with what does not have their steps")
        if not form.shape.is_fully_defined() or form.dtype != self.dtype:
            raise Unfit(f"{call.name} takes {form.dtype.name} of shape {form.shape[1:]} beside {self.dtype}")
        self.beside[value] = tuple(form.shape[2:])
        return self.beside[value]

    def _visit_cells(self, call: Call) -> None:
        layer = call.operation
        if self.needed.intersection(call.outputs[1:]):
            raise Unfit(f"{call.name} hands its states on to other layers")
        if len(self.shapes[call.inputs[0]]) != 1:
            raise Unfit(f"{call.name} takes more than a vector a step")
        cells = cells_of(layer, self.shapes[call.inputs[0]][0])
        require_steps_back(call, cells, self.shapes[call.inputs[0]][0], self.dtype)
        sequence = call.outputs[0]
        if not getattr(layer, "return_sequences", True):  # what it gives is the last step of a sequence all the same
            sequence = next(self._unused)
            self.last[call.outputs[0]] = sequence
        self.shapes[sequence] = (cells[-1].output_width,)
        self.calls.append(replace(call, outputs=(sequence,)))
        self.cells[self.calls[-1]] = cells

    def _visit_other(self, call: Call) -> None:
        shapes = [self.shapes[value] if value in self.moving else self._taken(value, call) for value in call.inputs]
        found = a_step_of(call, shapes, self.steps, self.dtype)
        if found is None:
            self.last[call.outputs[0]] = call.inputs[0]
        else:
            self.shapes.update(zip(call.outputs, found, strict=True))
            self.calls.append(call)
            self.work[call] = self._inside(call, [(1, *shape) for shape in shapes])

    def _inside(self, call: Call, shapes: list[tuple[int, ...]] | None = None) -> int:
        """Numbers of a sample that a call computes on the way, where it is more than one of Keras' own layers.

        shapes: of its inputs, where they are not as in the model.
        """
        layer = call.operation.layer if type(call.operation) is keras.layers.TimeDistributed else call.operation
        plain = type(layer).__module__.partition(".")[0] == "keras" and type(layer) is not keras.layers.Lambda
        if plain and not getattr(layer, "_layers", ()):
            return 0
        tensors = call.arguments.keras_tensors
        shapes = shapes or [tuple(size or 1 for size in tensor.shape[1:]) for tensor in tensors]
        return numbers_of(call, shapes, [tensor.dtype for tensor in tensors])
