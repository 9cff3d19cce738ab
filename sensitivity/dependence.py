"""Outputs that have a derivative by a source at all, found in the graph of a forward pass.

`tape.gradient` gives zeros for an output that no derivative leads to, which look like an answer. Here every operation
is taken to lead on from each of its inputs to each of its outputs of floating-point numbers, except those whose
derivative is zero wherever it exists. Loops, branches and functions count as one operation: an operation without a
derivative inside of a loop is not found.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from .errors import Refused
from .facts import Source
from .heads import heads
from .layers import as_graph, keras, outputs_of
from .packing import innermost
from .sources import embedding_names, moved
from .tracing import Traced

_CONSTANT = {  # their derivative is zero wherever there is one, or stopped
    *("StopGradient", "ZerosLike", "OnesLike"),
    *("Ceil", "Floor", "FloorDiv", "Rint", "Round", "Sign"),
}
_SHAPES = ("Rank", "Shape", "ShapeN", "Size")
_CUSTOM = "_gradient_op_type"  # an attribute of operations whose gradient a user gave


@dataclass(frozen=True)
class Dependence:
    """reached: outputs that a derivative leads to. unreached: those that none leads to. ends: operations that take what
    depends on the source and lead no further.
    """

    reached: tuple[str, ...]
    unreached: tuple[str, ...]
    ends: tuple[str, ...]


def dependence(outputs: Mapping[str, tf.Tensor], source: tf.Tensor) -> Dependence:
    """Which tensors of a graph, by name, depend on its tensor `source` through operations that have derivatives."""
    reached, taken, ends = {source.ref()}, {source.ref()}, []
    for operation in source.graph.get_operations():  # inputs before those that take them
        if not any(tensor.ref() in taken for tensor in operation.inputs):
            continue
        taken.update(tensor.ref() for tensor in operation.outputs)
        if not any(tensor.ref() in reached for tensor in operation.inputs):
            continue
        ahead = [tensor.ref() for tensor in operation.outputs if _has_derivatives(tensor.dtype)]
        if ahead and _leads_on(operation):
            reached.update(ahead)
        elif operation.type not in _SHAPES:
            ends.append(f"{operation.name} ({operation.type})")
    there = {name: tensor.ref() in reached for name, tensor in outputs.items()}
    return Dependence(
        tuple(name for name, found in there.items() if found),
        tuple(name for name, found in there.items() if not found),
        tuple(ends),
    )


def _has_derivatives(dtype: tf.DType) -> bool:
    return dtype.is_floating or dtype.is_complex or dtype == tf.variant  # a list of tensors


def _leads_on(operation: Any) -> bool:
    return operation.type not in _CONSTANT or _CUSTOM in operation.node_def.attr


def require_dependence(
    model: keras.Model, source: Source, of: str, zeros: tf.Tensor, wanted: Collection[str], seen: Traced
) -> tuple[str, ...]:
    """Refuse a source that no output has a derivative by. Returns a sentence for each output that alone has none.

    model: as far as the target. zeros: windows `(batch, *input_shape)`. wanted: names of the outputs that the target
    is made of. seen: the model's graph, which tells all where the source is the window itself.
    """
    found: list[Dependence] = []

    def judge(output: Any, values: tf.Tensor) -> None:
        named = heads(model, output, of)
        found.append(dependence({name: named[name] for name in wanted}, values))

    def called(windows: tf.Tensor, values: tf.Tensor) -> None:
        if source.kind == "input":
            judge(outputs_of(model, source.substituted(windows, values)), values)
        else:
            with moved(model, source, values):
                judge(outputs_of(model, windows), values)

    if source.kind == "input" and not source.parts:
        judge(seen.result, seen.windows)
    else:
        as_graph(called).get_concrete_function(zeros, tf.zeros((zeros.shape[0], *source.shape), zeros.dtype))
    known = found[-1]
    if not known.reached:
        raise Refused(
            "sensitivity.wrt",
            given=f"{_described(source)}, {_why_not(known)}",
            allowed="a source that the target depends on through operations that have derivatives",
            remedy=_remedy(model, source),
        )
    return tuple(
        f"output {name!r}: it does not depend on the source, so its derivatives are 0" for name in known.unreached
    )


def _described(source: Source) -> str:
    return f"{source.kind} {source.name!r}"


def _why_not(known: Dependence) -> str:
    if not known.ends:
        return "and the target does not depend on it"
    return f"and the target depends on it only through operations without a derivative, such as {known.ends[0]}"


def _remedy(model: keras.Model, source: Source) -> str:
    embeddings = embedding_names(innermost(model))
    if source.kind == "input" and embeddings:
        return f'name the embedding layer: wrt = "{embeddings[0]}"'
    return "name another source, or another target"
