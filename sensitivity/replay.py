"""A restored graph, made again operation by operation in the graph that is being traced.

What is restored is called as one function, whose loops no tape can use twice (tensorflow#57343). Made again, its loops
are `tf.while_loop`s like those of a model in Python: tapes, pfor and second derivatives pass them, and all shapes are
known.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.function_def_to_graph import function_def_to_graph

from .layers import LOOPS, as_graph

_BRANCHES = ("If", "StatelessIf")
_TOLERANCE = 1e-5  # of the largest entry
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_FUNCTIONS = {
    **dict.fromkeys(LOOPS, ("cond", "body")),
    **dict.fromkeys(_BRANCHES, ("then_branch", "else_branch")),
    **dict.fromkeys(_CALLS, ("f",)),
}
_ASSIGNING = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")


@dataclass
class _Uses:
    """Resources that are read on the way to what is wanted, and those that operations beside it assign."""

    read: set[Any] = field(default_factory=set)
    assigned: dict[Any, str] = field(default_factory=dict)


class Replay:
    """A function of tensors that gives what a concrete function gives, as it is when this is made."""

    def __init__(self, function: tf.types.experimental.ConcreteFunction) -> None:
        self._function = function
        definition = function.graph.as_graph_def()
        self._library = {one.signature.name: one for one in definition.library.function}
        self._graphs: dict[str, Any] = {}
        self._graph = tf.Graph()  # a copy: gradients of the function itself add to its graph
        with self._graph.as_default():
            tf.graph_util.import_graph_def(definition, name="")
        self._given, self._found = (
            [self._graph.get_tensor_by_name(tensor.name) for tensor in tensors]
            for tensors in (function.graph.inputs, function.graph.outputs)
        )

    def why_not(self, is_custom: Callable[[Any], bool]) -> str:
        """Why it cannot be made again; empty where it can. is_custom: whether a node has a user's own gradient, which
        belongs to the function that was restored.
        """
        uses = _Uses()
        known = {tensor.ref(): tensor.ref() for tensor in self._given if tensor.dtype == tf.resource}
        reason = self._why_not(self._graph, known, self._given, self._found, is_custom, uses)
        changed = {resource: kind for resource, kind in uses.assigned.items() if resource in uses.read}
        return reason or next((f"it has the operation {kind}" for kind in changed.values()), "")

    def _why_not(
        self,
        graph: tf.Graph,
        resources: dict[Any, Any],
        taken: Sequence[tf.Tensor],
        wanted: Sequence[tf.Tensor],
        is_custom: Callable[[Any], bool],
        uses: _Uses,
    ) -> str:
        """resources: what tensors are that hold one, by where it came into the whole."""
        names = {one.name for one in _on_the_way(graph, {tensor.ref(): None for tensor in taken}, wanted)}
        resources = dict(resources)
        for operation in graph.get_operations():
            kind, reached = operation.type, operation.name in names
            held = [resources.get(tensor.ref()) for tensor in operation.inputs]
            if kind in _FUNCTIONS:
                given = held[1:] if kind in _BRANCHES else held
                for part in (self._of(operation, name) for name in _FUNCTIONS[kind]):
                    inner = {tensor.ref(): one for tensor, one in zip(part.inputs, given, strict=True) if one}
                    ends = part.outputs if reached else ()
                    if reason := self._why_not(part, inner, part.inputs, ends, is_custom, uses):
                        return reason
            elif reached and is_custom(operation.node_def):
                return "it has a custom gradient"
            elif kind in _ASSIGNING and not reached and held[0]:
                uses.assigned[held[0]] = kind  # such as the state of a random generator, which no output takes
            elif not _can_be_made(kind):
                return f"it has the operation {kind}"
            elif kind == "Identity" and held[0]:
                resources[operation.outputs[0].ref()] = held[0]
            elif reached:
                uses.read.update(filter(None, held))
        return ""

    def __call__(self, *given: tf.Tensor) -> Any:
        found = self._run(self._graph, (*given, *self._function.captured_inputs), self._given, self._found)
        return tf.nest.pack_sequence_as(self._function.structured_outputs, found)

    def _run(
        self, graph: tf.Graph, given: Iterable[Any], taken: Sequence[tf.Tensor], wanted: Sequence[tf.Tensor]
    ) -> list[Any]:
        known = {tensor.ref(): value for tensor, value in zip(taken, given, strict=True)}
        for operation in _on_the_way(graph, known, wanted):
            results = self._again(operation, [known[tensor.ref()] for tensor in operation.inputs])
            known.update((tensor.ref(), value) for tensor, value in zip(operation.outputs, results, strict=True))
        return [known[tensor.ref()] for tensor in wanted]

    def _again(self, operation: tf.Operation, given: list[Any]) -> Sequence[Any]:
        if operation.type in LOOPS:
            return self._looped(operation, given)
        if operation.type in _BRANCHES:
            condition, *rest = given
            ways = [functools.partial(self._called, operation, way, rest) for way in ("then_branch", "else_branch")]
            found = tf.cond(condition, *ways)
            return found if isinstance(found, list | tuple) else [found]
        return self._called(operation, "f", given) if operation.type in _CALLS else _made(operation, given)

    def _called(self, operation: tf.Operation, name: str, given: list[Any]) -> list[Any]:
        graph = self._of(operation, name)
        return self._run(graph, given, graph.inputs, graph.outputs)

    def _looped(self, operation: tf.Operation, given: list[Any]) -> list[Any]:
        condition, body = self._of(operation, "cond"), self._of(operation, "body")
        turned = [i for i, (one, other) in enumerate(zip(body.inputs, body.outputs, strict=True)) if one is not other]

        def whole(values: Sequence[Any]) -> list[Any]:
            found = list(given)
            for place, value in zip(turned, values, strict=True):
                found[place] = value
            return found

        def goes_on(*values: Any) -> Any:
            return self._run(condition, whole(values), condition.inputs, condition.outputs)[0]

        def turn(*values: Any) -> list[Any]:
            found = self._run(body, whole(values), body.inputs, [body.outputs[place] for place in turned])
            return [_as_wide(one, value) for one, value in zip(found, values, strict=True)]

        found = tf.while_loop(
            goes_on,
            turn,
            [given[place] for place in turned],
            maximum_iterations=_most_turns(body, given),
            parallel_iterations=operation.get_attr("parallel_iterations"),
        )
        return whole(found)

    def _of(self, operation: tf.Operation, name: str) -> Any:
        """The function that an operation calls, as a graph."""
        function = operation.get_attr(name).name
        if function not in self._graphs:
            with self._graph.as_default():  # which knows the functions within
                self._graphs[function] = function_def_to_graph(self._library[function])
        return self._graphs[function]


@functools.cache
def _can_be_made(kind: str) -> bool:
    """Whether Python has it, and it neither has a state nor calls functions."""
    from tensorflow.python.framework import op_def_registry

    definition = op_def_registry.get(kind)
    if definition is None or not hasattr(tf.raw_ops, kind):
        return False
    calls = any("func" in part.type for part in definition.attr)
    return not calls and (not definition.is_stateful or kind in ("ReadVariableOp", "Placeholder"))


def _on_the_way(graph: tf.Graph, known: dict[Any, Any], wanted: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """Operations between what is known and what is wanted, inputs before those that take them."""
    needed, found = {tensor.ref() for tensor in wanted}, []
    for operation in reversed(graph.get_operations()):
        outputs = {tensor.ref() for tensor in operation.outputs}
        if outputs & needed and not outputs <= known.keys():
            needed.update(tensor.ref() for tensor in operation.inputs)
            found.append(operation)
    return found[::-1]


def _as_wide(found: Any, value: Any) -> Any:
    """What a loop carries on, with the length of 1 that it had: what is added to such a one may have any."""
    if found.shape.rank is None or found.shape.rank != value.shape.rank:
        return found
    sizes = [1 if now is None and before == 1 else now for now, before in zip(found.shape, value.shape, strict=True)]
    return found if sizes == found.shape.as_list() else tf.ensure_shape(found, sizes)


def _most_turns(body: Any, given: list[Any]) -> tf.Tensor | None:
    """How often a loop turns at most, where it says so: TensorFlow's loops carry it behind their counter."""
    if len(given) < 2 or not body.inputs[0].op.name.endswith("loop_counter"):
        return None
    unlimited = tf.get_static_value(given[1]) == -1
    return None if unlimited else given[1]


def _made(operation: tf.Operation, given: list[Any]) -> Sequence[Any]:
    """Of the same kind and attributes. Python's names of a few inputs are not those of the definition: they stand in
    its order.
    """
    if operation.type == "Const":
        return [tf.constant(tf.make_ndarray(operation.get_attr("value")))]
    definition, names = operation.op_def, _parameters(operation.type)
    attributes = {part.name: operation.get_attr(part.name) for part in definition.attr if part.name in names}
    own = {part.name for part in definition.input_arg} | set(attributes)
    renamed, rest = iter([name for name in names if name not in own]), iter(given)
    inputs = {}
    for part in definition.input_arg:
        name = part.name if part.name in names else next(renamed)
        if part.number_attr:
            inputs[name] = [next(rest) for _ in range(operation.get_attr(part.number_attr))]
        elif part.type_list_attr:
            inputs[name] = [next(rest) for _ in operation.get_attr(part.type_list_attr)]
        else:
            inputs[name] = next(rest)
    found = getattr(tf.raw_ops, operation.type)(**inputs, **attributes)
    return [found] if isinstance(found, tf.Tensor) else tf.nest.flatten(found)


@functools.cache
def _parameters(kind: str) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(getattr(tf.raw_ops, kind)).parameters if name != "name")


# ---- whether it is the same --------------------------------------------------------------------------


def drawn_of(specs: tuple[tf.TensorSpec, ...], shapes: Iterable[tuple[int, ...]], count: int) -> list[tf.Tensor]:
    """Windows at random of each input, zeros where it takes whole numbers, which may be classes."""
    random = np.random.default_rng(0)
    return [
        tf.cast(random.standard_normal((count, *shape)) * spec.dtype.is_floating, spec.dtype)
        for spec, shape in zip(specs, shapes, strict=True)
    ]


def agree(call: Callable[..., Any], again: Callable[..., Any], given: list[tf.Tensor]) -> bool:
    """Whether both give the same, and the same gradient."""
    try:
        expected, found = (as_graph(functools.partial(_pulled, one))(given) for one in (call, again))
    except Exception:  # whatever its operations raise
        return False
    pairs = zip(tf.nest.flatten(expected), tf.nest.flatten(found), strict=True)
    return all(np.allclose(one, other, _TOLERANCE, _TOLERANCE * _largest(one), equal_nan=True) for one, other in pairs)


def _pulled(call: Callable[..., Any], given: list[tf.Tensor]) -> tuple[Any, list[tf.Tensor]]:
    """What is given, and the gradient of its numbers, each times another factor."""
    sources = [part for part in given if part.dtype.is_floating]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(sources)
        found = call(*given)
        parts = [part for part in tf.nest.flatten(found) if part.dtype.is_floating]
        total = tf.add_n([tf.reduce_sum(part * _told_apart(part)) for part in parts])
    return found, tape.gradient(total, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO)


def _told_apart(part: tf.Tensor) -> tf.Tensor:
    """A factor for each of its numbers."""
    return tf.reshape(tf.cos(tf.cast(tf.range(tf.size(part)), part.dtype)), tf.shape(part))


def _largest(array: tf.Tensor) -> float:
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))
