"""One forward pass as a graph: what the model gives, and what its layers compute on the way."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from .errors import Refused, gist
from .layers import (
    LOOPS,
    as_graph,
    calls_wrapped,
    function_of,
    keras,
    leaf_layers,
    moments_exact,
    nodes_of,
    outputs_of,
    steps_folded,
)
from .packing import innermost, steps_taken
from .saved_models import SavedModel


@dataclass(frozen=True)
class Traced:
    """windows, result: tensors of the graph, what it takes and what it gives. output: of the model, as it gives it.
    activations: numbers that all layers put out for one window. recurrent: (steps, units) of each call of a recurrent
    layer. operations: of the graph, those in loops and branches too. smooth: the derivative has no jumps, as far as
    operations tell. gathers: numbers that come from the windows are gathered by their places.
    """

    windows: tf.Tensor
    result: Any
    output: Any
    activations: int
    recurrent: tuple[tuple[int, int], ...]
    operations: list[Any]
    smooth: bool
    gathers: bool


_GATHERS = ("GatherV2", "GatherNd", "Gather")  # whose gradients are sums by segment
_KINKED = {
    *("Abs", "Ceil", "Floor", "LeakyRelu", "Max", "MaxPool", "Maximum", "Min", "Minimum", "Relu", "Relu6", "Rint"),
    *("Round", "Selu", "Sign", "TopKV2", "Greater", "GreaterEqual", "Less", "LessEqual", "PyFunc", "EagerPyFunc"),
    *("ArgMax", "ArgMin", "Bucketize", "ClipByValue", "FloorMod", "MaxPool3D", "MaxPoolV2", "Mod", "SegmentMax"),
    *("UnsortedSegmentMax", "GatherV2", "ResourceGather"),  # a gather's indices may come from the input
}


_OF_NUMPY = ("PyFunc", "PyFuncStateless")


def _is_kinked(node: Any) -> bool:
    return node.op in _KINKED and not _on_integers(node)


def _on_integers(node: Any) -> bool:
    kind = next((node.attr[name].type for name in ("T", "Tparams", "dtype") if name in node.attr), None)
    return kind is not None and tf.as_dtype(kind).is_integer


def traced(model: keras.Model, zeros: tf.Tensor) -> Traced:
    """A call on two windows of zeros."""
    seen, results = _Seen(), []

    def call(windows: tf.Tensor) -> Any:
        seen.size = 0  # again, where variables are made
        seen.recurrent.clear()
        with moments_exact(), steps_folded(model), calls_wrapped(leaf_layers(model), seen.watched):
            results.append(outputs_of(model, windows))
        return results[-1]

    try:
        if function_of(model) is None:  # layers may be built by their first call, and keep what they then compute
            outputs_of(model, zeros[:1])
        function = as_graph(call).get_concrete_function(zeros)
        output = function(zeros)
    except Refused:
        raise
    except Exception as error:
        raise _failed(model, zeros, error) from error
    steps, layers = steps_taken(model, tuple(zeros.shape[1:])), leaf_layers(model)
    attending = [layer.num_heads for layer in layers if isinstance(getattr(layer, "num_heads", None), int)]
    scores = 3 * sum(attending) * steps**2
    known = [layer for layer, _ in seen.recurrent]  # a user's `tf.function` within may have been traced before
    missed = [(layer, steps) for layer in layers if isinstance(layer, keras.layers.RNN) and layer not in known]
    recurrent = tuple((count, _units(layer)) for layer, count in (*seen.recurrent, *missed))
    graph = function.graph.as_graph_def()
    nodes = (*_from_windows(function), *_within(graph))
    _require_derivatives(nodes)
    smooth = not any(map(_is_kinked, nodes))
    size = seen.size + scores
    if isinstance(innermost(model), SavedModel):
        size, recurrent = _restored_sizes(model, zeros, graph)
    given, gathers = function.inputs[0], _gathers_windows(function, graph)
    return Traced(given, results[-1], output, size, recurrent, nodes_of(graph), smooth, gathers)


def no_pfor(seen: Traced) -> str:
    """Why pfor is never to be tried on the model; empty where it may be.

    Over a loop and the sums by segment that are a gather's gradient it corrupts the heap, and the process dies one time
    in six or so: TensorFlow 2.21, an LSTM whose samples are windows by another axis. The loop over outputs never does.
    """
    loops = seen.recurrent or any(node.op in LOOPS for node in seen.operations)
    return _CORRUPTS if seen.gathers and loops else ""


_CORRUPTS = "TensorFlow's pfor can corrupt memory where a recurrent model gathers numbers"


def _failed(model: keras.Model, zeros: tf.Tensor, error: Exception) -> Refused:
    """What is wrong with a model that cannot be traced: that it is traced, or what it is given."""
    with contextlib.suppress(Exception):
        outputs_of(model, zeros)
        return Refused(
            "model.path",
            given=f"a model that runs eagerly and fails as a graph, in tf.function ({gist(error, lines=1)})",
            allowed="a model whose call uses TensorFlow's operations only",
            remedy="remove .numpy() and float() from its call, and decorate the call with @tf.function, which\n"
            "converts `if` and `for` on tensors; then see that tf.function(model)(windows) runs",
        )
    return Refused(
        "model.path",
        given=f"a model that fails on windows of shape {tuple(zeros.shape[1:])} ({gist(error)})",
        allowed="a model that takes (batch, lag, feature)",
        remedy="check windows.length and series.features against the model's training",
        in_python="see that model(windows) runs on windows of this shape",
    )


def _restored_sizes(model: keras.Model, zeros: tf.Tensor, graph: Any) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Activations, those in loops at all steps; and the loops, as layers of no units more.

    Here every tensor is counted, where else layers' outputs are, of which projections take twice as many to be kept.
    """
    steps, batch = steps_taken(model, tuple(zeros.shape[1:])), innermost(model).batch
    loops = [node for node in nodes_of(graph) if node.op in LOOPS]
    numbers = numbers_of(model, [tuple(zeros.shape[1:])], [zeros.dtype], steps=steps, batch=batch)
    return numbers // 2, ((steps, 0),) * len(loops)


def _require_derivatives(nodes: Sequence[Any]) -> None:
    """Refuse numbers that NumPy computes of windows: TensorFlow takes their derivative as zero, without a word, unless
    they have a custom gradient.
    """
    if any(node.op in _OF_NUMPY for node in nodes) and not any("_gradient_op_type" in node.attr for node in nodes):
        raise Refused(
            "model.path",
            given="a model with tf.numpy_function, which TensorFlow has no derivative of",
            allowed="operations of TensorFlow's, or a tf.custom_gradient around it",
            remedy="write it with TensorFlow's operations",
        )


def _from_windows(function: Any, kinds: Sequence[str] = ()) -> list[Any]:
    """Operations of a graph on what comes from its windows; others are of weights and constants alone. kinds: those of
    these kinds, whose first input it is; none: all.
    """
    reached, found = {function.inputs[0].ref()}, []
    for operation in function.graph.get_operations():  # inputs before those that take them
        if any(tensor.ref() in reached for tensor in operation.inputs):
            reached.update(tensor.ref() for tensor in operation.outputs)
            if not kinds or (operation.type in kinds and operation.inputs[0].ref() in reached):
                found.append(operation.node_def)
    return found


def _gathers_windows(function: Any, graph: Any) -> bool:
    """Whether numbers that come from the windows are gathered; within loops and branches, any numbers that are."""
    within = (node for node in _within(graph) if node.op in _GATHERS)
    return any(not _on_integers(node) for node in (*_from_windows(function, _GATHERS), *within))


@dataclass
class _Seen:
    """size: numbers that layers put out for one window. recurrent: layers, and the steps that they were given."""

    size: int = 0
    recurrent: list[tuple[keras.Layer, int]] = field(default_factory=list)
    _steps: int = 0  # of the recurrent layer that is being called

    def watched(self, layer: keras.Layer, call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if isinstance(layer, keras.layers.RNN):
                self._steps = keras.tree.flatten((args, kwargs))[0].shape[1] or 1
                self.recurrent.append((layer, self._steps))
            result = call(*args, **kwargs)
            self.size += sum(self._size(part) for part in keras.tree.flatten(result) if getattr(part, "shape", None))
            return result

        return counted

    def _size(self, part: Any) -> int:
        """Of one window, of two that are there; of what a loop puts out at a step, at all steps."""
        in_loop = type(getattr(part, "graph", None)).__name__ == "WhileBodyFuncGraph"
        return math.prod(size or 1 for size in part.shape) * (self._steps if in_loop else 1) // 2


def _units(layer: keras.Layer) -> int:
    """0 of a convolution, whose state has open sizes; its activations are counted all the same."""
    return max(0, int(np.prod(keras.tree.flatten(layer.cell.state_size)[0])))


_SAMPLES = 7  # a number of samples that tensors without samples hardly begin with


def numbers_of(
    function: Callable[..., Any],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[Any],
    *,
    steps: int = 1,
    batch: int | None = None,
) -> int:
    """Of a sample: the sizes of all tensors in a function's graph, given samples of these shapes; a loop turns `steps`
    times. batch: of samples that a function within takes, where that is fixed.
    """
    given = [tf.TensorSpec((_SAMPLES, *shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    graph = as_graph(function).get_concrete_function(*given).graph.as_graph_def(add_shapes=True)
    turned = {node.attr["body"].func.name for node in nodes_of(graph) if node.op in LOOPS}
    parts = [(1, graph.node)]
    parts += [(steps if part.signature.name in turned else 1, part.node_def) for part in graph.library.function]
    return sum(times * _numbers(nodes, batch) for times, nodes in parts)


def _numbers(nodes: Iterable[Any], batch: int | None) -> int:
    """A user's function within may have been traced for any number of samples, which is -1 then."""
    lengths = [[dim.size for dim in shape.dim] for node in nodes for shape in node.attr["_output_shapes"].list.shape]
    of_samples = [rest for samples, *rest in filter(None, lengths) if samples in (-1, _SAMPLES, batch)]
    return sum(math.prod(max(1, size) for size in rest) for rest in of_samples)


def _within(graph: Any) -> Iterator[Any]:
    """Operations of the functions that a graph calls: its loops and branches."""
    return (node for function in graph.library.function for node in function.node_def)
