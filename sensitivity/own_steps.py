"""Whether a model's outputs stand at the steps of its window, and whether they depend on later inputs.

An output of every step may be of that very step, as of a recurrent layer with `return_sequences=True`, or of the
future, as of an encoder and decoder whose horizon is as long as the window. Lags count back from an output's own step
only where it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from .calls import Call, Graph
from .facts import AtSteps, CallFacts
from .heads import heads
from .layers import as_graph, function_of, input_names, keras, whole_inputs
from .packing import Unpacked

CUTS = 16  # steps at which a window is cut into earlier and later ones, at most
ROOM = 1 << 25  # numbers that a forward pass of several windows may give
_SPREADS = (1.0, 5.0)  # of random inputs: what saturates with large ones does not with small ones
_ALIKE = (
    *("Dense", "TimeDistributed", "Normalization", "Rescaling", "Masking", "Identity"),
    *("LayerNormalization", "BatchNormalization", "RMSNormalization", "GroupNormalization", "UnitNormalization"),
    *("Activation", "ReLU", "LeakyReLU", "PReLU", "ELU", "Softmax", "Relu", "Gelu", "Sigmoid", "Tanh", "Silu"),
    *("Dropout", "SpatialDropout1D", "AlphaDropout", "GaussianDropout", "GaussianNoise", "ActivityRegularization"),
    *("Attention", "AdditiveAttention", "MultiHeadAttention", "GroupedQueryAttention"),
)
_MERGES = ("Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum", "Concatenate", "Divide", "TrueDivide")
_CONVOLUTIONS = ("Conv1D", "SeparableConv1D", "DepthwiseConv1D")

Target = Callable[[Sequence[tf.Tensor], tf.Tensor], tf.Tensor]


def at_steps(
    model: keras.Model,
    of: str,
    target: Target,
    facts: CallFacts,
    output_steps: int,
    spread: tuple[np.ndarray, np.ndarray] | None = None,
) -> AtSteps:
    """Whether the target's steps are the source's: "causal" where each depends on inputs up to its own alone.

    model: as `wrapped_and_cut` makes it. target: of windows and the source, `(batch, *target_shape)`. output_steps: all
    that the model has, chosen or not. spread: mean and standard deviation of each column of its windows, where known.
    """
    shape = facts.source.shape
    if facts.source.kind != "input" or len(shape) != 2 or len(facts.target_shape) != 2:
        return "no"
    if facts.scan is not None and facts.scan.outputs > 0:
        return "causal"
    if output_steps != shape[0] or output_steps < 2:
        return "no"
    try:
        later, earlier = depends_on(model, target, facts, spread)
    except Exception:  # whatever a model raises where it cannot be differentiated so: its layers tell
        later, earlier = True, True
    if earlier and not later:
        return "causal"
    return "acausal" if keeps_steps(model, of, facts.source.name) else "no"


def depends_on(
    model: keras.Model, target: Target, facts: CallFacts, spread: tuple[np.ndarray, np.ndarray] | None = None
) -> tuple[bool, bool]:
    """Whether any output has a derivative, other than zero, by a later input; and by one that is not later.

    Tried on random windows, of the columns' own mean and spread where those are known, each of which is cut at a step:
    derivatives of the outputs up to there, summed with random weights.
    """
    random, at = np.random.default_rng(0), np.array(facts.output_at)
    cuts = np.unique(np.linspace(0, len(at) - 1, CUTS).round().astype(int)).repeat(len(_SPREADS))
    spreads = np.resize(_SPREADS, len(cuts)).reshape(-1, *[1] * len(facts.input_shape))
    drawn = random.standard_normal((len(cuts), *facts.input_shape)) * spreads
    if spread is not None and len(spread[0]) == facts.input_shape[-1]:
        drawn = spread[0] + spread[1] * drawn
    windows = _counted_zero(model, facts, drawn)
    vectors = (
        random.standard_normal((len(cuts), *facts.target_shape)) * (np.arange(len(at)) <= cuts[:, None])[..., None]
    )
    size = min(facts.together or len(cuts), max(1, ROOM // max(1, facts.activations)))
    product = as_graph(lambda windows, vectors: _pulled_back(target, facts, windows, vectors))
    parts = [
        product(*(tf.constant(array[i : i + size], facts.dtype) for array in (windows, vectors))).numpy()
        for i in range(0, len(cuts), size)
    ]
    moved = np.concatenate(parts).any(axis=-1)
    is_later = np.arange(moved.shape[1]) > at[cuts, None]
    return bool((moved & is_later).any()), bool((moved & ~is_later).any())


def _counted_zero(model: keras.Model, facts: CallFacts, windows: np.ndarray) -> np.ndarray:
    """Windows with zero for inputs that take whole numbers, such as classes."""
    counted = whole_inputs(_given(model))
    for part in facts.packing.inputs if facts.packing else ():
        if part.name in counted:
            windows[..., part.start : part.stop] = 0
    return windows


def _pulled_back(target: Target, facts: CallFacts, windows: tf.Tensor, vectors: tf.Tensor) -> tf.Tensor:
    source = facts.source.of(windows)
    with tf.GradientTape() as tape:
        tape.watch(source)
        found = target([windows], source)
    return tape.gradient(found, source, output_gradients=vectors, unconnected_gradients="zero")


def keeps_steps(model: keras.Model, of: str, source: str) -> bool:
    """Whether every layer on the way, as far as it is known, keeps the source's steps: output t is of step t."""
    given = _given(model)
    function = function_of(given)
    if function is None:
        return False
    graph, named = Graph(), input_names(function)
    inputs = [graph.number() for _ in named]
    outputs = graph.add(function, inputs)
    along = {number for number, name in zip(inputs, named, strict=True) if source not in named or name == source}
    for call in graph.calls:
        if _keeps(call, along):
            along.add(call.outputs[0])
    packed = keras.tree.pack_sequence_as(function._outputs_struct, outputs)
    return along.issuperset(heads(given, packed, of).values())


def _given(model: keras.Model) -> keras.Model:
    return model.inner if isinstance(model, Unpacked) else model


def _keeps(call: Call, along: set[int]) -> bool:
    """Whether what a call gives first has the steps of what it takes first, or, of several merged, of all that
    have steps.
    """
    operation, kind = call.operation, type(call.operation).__name__
    if kind in _MERGES:
        stepped = {i for i, one in zip(call.inputs, call.arguments.keras_tensors, strict=True) if _has_steps(one)}
        merged = along.intersection(call.inputs) and along.issuperset(stepped)
        return bool(merged) and getattr(operation, "axis", -1) in (-1, 2)
    if not call.inputs or call.inputs[0] not in along:
        return False
    if isinstance(operation, keras.layers.Bidirectional | keras.layers.RNN):  # backwards alone gives the newest first
        return bool(operation.return_sequences) and not getattr(operation, "go_backwards", False)
    if kind == "EinsumDense":
        taken, given = operation.equation.replace("...", "").split("->")
        return taken.split(",")[0][1:2] == given[1:2]
    if kind in _CONVOLUTIONS:
        if operation.data_format != "channels_last":
            return False
        whole = operation.padding in ("same", "causal") or _is_one(operation.kernel_size)
        return whole and _is_one(operation.strides)
    return kind in _ALIKE


def _has_steps(tensor: Any) -> bool:
    return len(tensor.shape) > 2 and tensor.shape[1] != 1


def _is_one(sizes: Any) -> bool:
    return set(np.atleast_1d(sizes).tolist()) == {1}
