"""Which calls of a graph a causal cell may have: recurrent layers going forward, and what treats every step alone.

A call that has no state may work on sequences if it treats every step alone and alike, which is tried on random
numbers: all steps at once, and each step as a sample of one step, in any order, must give the same, and so must one
sample alone. That is tried with large numbers, too, which a layer may treat in another way, and with other weights,
since those that the model has may be zero by chance, and change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from .calls import Call
from .cells import AnyCell, Cell
from .layers import keras

_TOLERANCE = 1e-4
_LARGE = 1e3
_MORE = ((0.1, 0.3), (5.0, 15.0))  # than a weight is; between
_NUMBERS = 0.1  # of what a call gives for random numbers, at least
_CONVOLUTIONS = ("Conv1D", "DepthwiseConv1D", "SeparableConv1D", "Conv1DTranspose")
_RECURRENT = (keras.layers.RNN, keras.layers.LSTM, keras.layers.GRU, keras.layers.SimpleRNN)
_KERAS_CALLS, _KERAS_LOOPS = {kind.call for kind in _RECURRENT}, {kind.inner_loop for kind in _RECURRENT}


class Unfit(ValueError):
    """Why a model is not one causal cell, with the layer's name."""


def require_fit(call: Call, dtype: str) -> None:
    """Refuse a layer that is known to be unfit, wherever it stands."""
    reason = _unfit_anywhere(call.operation, dtype)
    if not reason and isinstance(call.operation, keras.layers.RNN):
        reason = _not_forward(call)
    if reason:
        raise Unfit(f"{call.name} {reason}")


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


def _not_forward(call: Call) -> str:
    layer, arguments = call.operation, call.arguments
    given = dict(zip(("initial_state", "mask", "training"), arguments.args[1:], strict=False)) | arguments.kwargs
    if type(layer).call not in _KERAS_CALLS or type(layer).inner_loop not in _KERAS_LOOPS:
        return "has a loop of its own"
    if layer.go_backwards:
        return "goes backwards"
    if given.get("mask") is not None:
        return "is called with a mask"
    if given.get("initial_state") is not None:
        return "begins with states that it is given"
    if not all(isinstance(size, int) for size in keras.tree.flatten(layer.cell.state_size)):
        return "keeps states that are not vectors"
    return ""


def require_steps_back(call: Call, cells: list[Cell], width: int, dtype: str) -> None:
    """Refuse a user's cell whose step cannot be differentiated for many rows at once. width: of its input."""
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


def a_step_of(call: Call, inputs: list[tuple[int, ...]], steps: int, dtype: str) -> list[tuple[int, ...]] | None:
    """The shapes of what a call on sequences gives of a step; None where it gives the last step of its input.

    inputs: shapes of a step of each. Raises `Unfit` where steps are not treated alone and alike.
    """
    reason = _known_to_cross(call.operation)
    if reason:
        raise Unfit(f"{call.name} {reason}")
    if type(call.operation) is keras.layers.TimeDistributed:
        return [tuple(call.operation.compute_output_shape((1, steps, *inputs[0]))[2:])]
    values = [_random((2, steps, *shape), dtype, number) for number, shape in enumerate(inputs)]
    found = _tried(call, values)
    again = [_tried(call, [_LARGE * value for value in values], few=0.0)]
    for low, high in _MORE:
        with keras.StatelessScope(state_mapping=_other_weights(call.operation, low, high)):
            again.append(_tried(call, values, few=0.0))
    if any(other != found for other in again) or not (found.is_last or found.shapes):
        raise Unfit(f"{call.name} does not treat every time step alone and alike")
    return None if found.is_last else list(found.shapes)


def _known_to_cross(operation: Any) -> str:
    kind = type(operation).__name__
    if "Attention" in kind:
        return "attends to other steps"
    if kind in _CONVOLUTIONS and set(operation.kernel_size) != {1}:
        return "mixes neighbouring steps"
    if "Pooling" in kind:
        return "pools steps"
    return ""


@dataclass(frozen=True)
class _Tried:
    """What a call was seen to do. is_last: it gave the last step. shapes: of what it gave of each, alone and alike."""

    is_last: bool = False
    shapes: tuple[tuple[int, ...], ...] = ()


def _tried(call: Call, values: list[tf.Tensor], few: float = _NUMBERS) -> _Tried:
    """few: finite numbers among all that it gives, at least."""
    try:
        whole = call(*values)
        last = values[0][:, -1]
        if len(values) == 1 and whole[0].shape == last.shape and bool(tf.reduce_all(whole[0] == last)):
            return _Tried(is_last=True)
        _require_numbers(call, whole, values[0].dtype)
        numbers = [np.isfinite(part).mean() for part in whole]
        return _Tried(shapes=_alone_and_alike(call, values, whole)) if min(numbers) >= few else _Tried()
    except Unfit:
        raise
    except Exception:  # whatever a layer raises on a window of one step
        return _Tried()


def _require_numbers(call: Call, found: list[tf.Tensor], dtype: tf.DType) -> None:
    for part in found:
        if getattr(part, "_keras_mask", None) is not None:
            raise Unfit(f"{call.name} masks steps")
        if part.dtype != dtype:
            raise Unfit(f"{call.name} gives {part.dtype.name}, where only {dtype.name} passes through")


def _alone_and_alike(call: Call, values: list[tf.Tensor], whole: list[tf.Tensor]) -> tuple[tuple[int, ...], ...]:
    """The shapes of a step, if each step and each sample alone gives what it gave of the whole; else none."""
    batch, steps = values[0].shape[:2]
    order = np.random.default_rng(0).permutation(batch * steps)
    by_step = call(*(tf.gather(tf.reshape(value, (-1, 1, *value.shape[2:])), order) for value in values))
    by_sample = call(*(value[:1] for value in values))
    for step, sample, expected in zip(by_step, by_sample, whole, strict=True):
        if tuple(expected.shape[:2]) != (batch, steps):
            return ()
        shuffled = tf.gather(tf.reshape(expected, (-1, 1, *expected.shape[2:])), order)
        if not (_agree(step, shuffled) and _agree(sample, expected[:1])):
            return ()
    return tuple(tuple(expected.shape[2:]) for expected in whole)


def _agree(found: tf.Tensor, expected: tf.Tensor) -> bool:
    """To rounding, and where there are numbers at all."""
    finite = np.isfinite(expected.numpy())
    scale = np.abs(expected.numpy()[finite]).max(initial=0.0)
    same = found.shape == expected.shape
    return same and np.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True)


def _other_weights(operation: Any, low: float, high: float) -> list[tuple[Any, tf.Tensor]]:
    """Its floating-point weights, each larger by `low` to `high`: none is zero, and what is positive stays so."""
    random = np.random.default_rng(0)
    weights = [weight for weight in getattr(operation, "variables", []) if "float" in str(weight.dtype)]
    return [(w, tf.convert_to_tensor(w) + tf.constant(random.uniform(low, high, w.shape), w.dtype)) for w in weights]


def _random(shape: tuple[int, ...], dtype: str, seed: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(seed).standard_normal(shape), dtype)
