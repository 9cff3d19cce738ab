"""Weights of recurrent layers, and gradients by them, taken apart by gate and direction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from ..errors import Refused, gist
from ..layers import as_graph, keras, outputs_of
from .given import checked
from .halves import Half, halves_of

KINDS = ("kernel", "recurrent kernel", "bias", "recurrent bias")
WINDOWS = 256  # of one call of a tape


@dataclass(frozen=True)
class Statistics:
    """Of a part's numbers. mean to maximum: of the finite ones, NaN where there are none. zeros: share of them all.
    nans, infinities: how many.
    """

    count: int
    mean: float
    std: float
    minimum: float
    maximum: float
    zeros: float
    nans: int
    infinities: int

    @classmethod
    def of(cls, values: np.ndarray) -> Statistics:
        finite = values[np.isfinite(values)].astype("float64")
        known = finite if finite.size else np.array([math.nan])
        nans, infinities = int(np.isnan(values).sum()), int(np.isinf(values).sum())
        mean, std, least, most = (float(f(known)) for f in (np.mean, np.std, np.min, np.max))
        return cls(values.size, mean, std, least, most, float((values == 0).mean()), nans, infinities)


@dataclass(frozen=True, eq=False)
class Part:
    """The weights of one gate, or the gradients by them.

    kind: one of `KINDS`. gate: "i", "f", "c", "o" of an LSTM; "z", "r", "h" of a GRU; "h" of a SimpleRNN. values: of a
    kernel `(input, unit)`, of a recurrent kernel `(unit, unit)` from the state's units to the gate's, of a bias
    `(unit)`, in the layer's dtype. A GRU with `reset_after` adds a recurrent bias to what its state gives.
    of: "weight" or "gradient".
    """

    layer: str
    direction: str
    kind: str
    gate: str
    values: np.ndarray
    of: str = "weight"

    @property
    def name(self) -> str:
        return f"{self.kind}, gate {self.gate}, {self.direction}"

    @cached_property
    def statistics(self) -> Statistics:
        return Statistics.of(self.values)

    @property
    def alarm(self) -> str:
        """What is not finite, in words; empty where all is."""
        found = self.statistics
        said = [f"{n:,} {word}" for n, word in ((found.nans, "NaN"), (found.infinities, "infinite")) if n]
        return (
            f"{' and '.join(said)} of {found.count:,} numbers: {self.of} of {self.layer}, {self.name}" if said else ""
        )


def weights(model: keras.Model, layer: str | keras.Layer | None = None) -> tuple[Part, ...]:
    """A recurrent layer's weights as they are now, by direction, kind and gate, in Keras' order.

    layer: as for `jacobian_decay`; raises `Refused` likewise.
    """
    halves = halves_of(model, layer)
    return _split(halves, [np.asarray(weight) for half in halves for weight in half.weights], "weight")


def gradients(model: keras.Model, layer: str | keras.Layer | None, arrays: Sequence[Any]) -> tuple[Part, ...]:
    """Gradients by a recurrent layer's weights, taken apart as `weights` are.

    arrays: one by each of the layer's `trainable_weights`, in that order and shape; None where nothing depends on it,
        which is zero. layer: as for `jacobian_decay`. Raises `Refused` for other shapes.
    """
    halves = halves_of(model, layer)
    owned = [weight for half in halves for weight in half.weights]
    shapes = [tuple(weight.shape) for weight in owned]
    found = list(arrays)
    given = [() if array is None else np.shape(array) for array in found]
    unlike = [array is not None and a != b for array, a, b in zip(found, given, shapes, strict=False)]
    if len(found) != len(shapes) or any(unlike):
        raise Refused(
            "arrays",
            given=f"shapes {', '.join(map(str, given)) or 'none'}",
            allowed=f"shapes {', '.join(map(str, shapes))}: of each weight of {halves[0].name}",
            remedy="give them in the order of the layer's trainable_weights",
        )
    zeros = [np.zeros(shape, weight.dtype) for shape, weight in zip(shapes, owned, strict=True)]
    return _split(halves, [z if a is None else np.asarray(a) for a, z in zip(found, zeros, strict=True)], "gradient")


def weight_gradients(
    model: keras.Model,
    windows: Any,
    layer: str | keras.Layer | None = None,
    *,
    labels: Any = None,
    loss: str | Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None = None,
    windows_per_call: int = WINDOWS,
) -> tuple[Part, ...]:
    """Gradients by a recurrent layer's weights, of the sum of all outputs, or of a loss; by a plain tape.

    windows: `(batch, lag, feature)`, or whatever the model takes; several inputs by name or in order.
    layer: as for `jacobian_decay`.
    labels, loss: both or neither. labels: `(batch, …)` as the loss takes them. loss: `loss(labels, outputs)`, or the
        name of one of Keras'; what it gives is averaged over windows, and a single number must be a mean itself.
    windows_per_call: differentiated at a time, which is what bounds the memory.

    In units of the output, or of the loss, per unit of the weight. Raises `Refused` for what does not fit together.
    """
    halves = halves_of(model, layer)
    model, source = checked(model, windows)
    if windows_per_call < 1:
        raise Refused("windows_per_call", given=windows_per_call, allowed="1 or more", remedy="give more")
    answers = None if labels is None else _labels(labels, len(source))
    if (answers is None) != (loss is None):
        given = "loss without labels" if answers is None else "labels without a loss"
        raise Refused(
            "loss", given=given, allowed="both, or neither", remedy="give both, or the sum of outputs is meant"
        )
    owned = [weight for half in halves for weight in half.weights]
    function = as_graph(_gradient(model, [weight.value for weight in owned], None if loss is None else _loss(loss)))
    total = [np.zeros(weight.shape, "float64") for weight in owned]
    for start in range(0, len(source), windows_per_call):
        chosen = slice(start, start + windows_per_call)
        found = _tried(function, source[chosen], None if answers is None else answers[chosen])
        share = 1.0 if loss is None else len(source[chosen]) / len(source)
        total = [whole + share * part.numpy().astype("float64") for whole, part in zip(total, found, strict=True)]
    return _split(halves, [t.astype(w.dtype) for t, w in zip(total, owned, strict=True)], "gradient")


def _gradient(model: keras.Model, variables: list[Any], loss: Callable[..., Any] | None) -> Callable[..., Any]:
    def gradient(windows: tf.Tensor, labels: tf.Tensor | None) -> list[tf.Tensor]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            for variable in variables:
                tape.watch(variable)
            outputs = outputs_of(model, windows)
            if loss is None:
                number = tf.add_n([tf.reduce_sum(output) for output in keras.tree.flatten(outputs)])
            else:
                number = tf.reduce_mean(loss(labels, outputs))
        return tape.gradient(number, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)

    return gradient


def _tried(function: Callable[..., Any], windows: np.ndarray, labels: np.ndarray | None) -> list[tf.Tensor]:
    try:
        return function(tf.constant(windows), None if labels is None else tf.constant(labels))
    except Exception as error:
        shapes = f"windows {windows.shape}" + ("" if labels is None else f" and labels {labels.shape}")
        raise Refused(
            "windows",
            given=f"{shapes}, on which the model or its loss fails ({gist(error)})",
            allowed="windows that the model takes, and labels that the loss takes with its outputs",
            remedy="see that model(windows) and loss(labels, outputs) run",
        ) from error


def _loss(loss: Any) -> Callable[..., Any]:
    try:
        return keras.losses.get(loss)
    except (ValueError, TypeError) as error:
        allowed = "a function loss(labels, outputs), or the name of one of Keras' losses"
        raise Refused("loss", given=loss, allowed=allowed, remedy='say "mse", for one') from error


def _labels(labels: Any, windows: int) -> np.ndarray:
    found = np.asarray(labels)
    if not found.ndim or len(found) != windows:
        raise Refused(
            "labels",
            given=f"an array of shape {found.shape}",
            allowed=f"(batch, …) of {windows} windows",
            remedy="give one label for each window",
        )
    return found.astype("float32") if found.dtype == "float64" and keras.config.floatx() == "float32" else found


def alarms(parts: Sequence[Part]) -> tuple[str, ...]:
    """What is NaN or infinite, a sentence for each part that has such."""
    return tuple(part.alarm for part in parts if part.alarm)


def report(parts: Sequence[Part]) -> str:
    """A table of the parts' statistics; above it, where there are any, NaN and infinite numbers in capitals."""
    found = alarms(parts)
    loud = [f"NOT FINITE: {len(found)} of {len(parts)} parts", *(f"  {alarm}" for alarm in found), ""] if found else []
    head = ("layer", "direction", "kind", "gate", "numbers", "mean", "std", "min", "max", "zeros", "NaN", "inf")
    rows = [head, *map(_row, parts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    aligned = [
        "  ".join(_aligned(text, width, i) for i, (text, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return "\n".join([*loud, *(line.rstrip() for line in aligned)])


def _row(part: Part) -> tuple[str, ...]:
    found = part.statistics
    sizes = (f"{number:.3g}" for number in (found.mean, found.std, found.minimum, found.maximum))
    named = (part.layer, part.direction, part.kind, part.gate, f"{found.count:,}")
    return (*named, *sizes, f"{found.zeros:.1%}".replace("%", " %"), str(found.nans), str(found.infinities))


def _aligned(text: str, width: int, column: int) -> str:
    return text.ljust(width) if column < 4 else text.rjust(width)


def _split(halves: Sequence[Half], arrays: list[np.ndarray], of: str) -> tuple[Part, ...]:
    """arrays: of each half its weights, in Keras' order: gates stand one after another along the last axis."""
    left = iter(arrays)
    return tuple(
        Part(half.name, half.direction, kind, gate, values, of)
        for half in halves
        for kind, array in _by_kind([next(left) for _ in half.weights])
        for gate, values in zip(half.gates, np.split(array, len(half.gates), -1), strict=True)
    )


def _by_kind(arrays: list[np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    kernel, recurrent, *bias = arrays
    yield KINDS[0], kernel
    yield KINDS[1], recurrent
    for array in bias:
        yield from zip(KINDS[2:], array, strict=True) if array.ndim == 2 else [(KINDS[2], array)]
