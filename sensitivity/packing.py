"""Models of several inputs, and losses, as models that take one array of windows, in which everything is packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from .errors import Refused, gist
from .heads import Selection, heads, joined
from .layers import keras
from .parts import Part

LOSS = "loss"
_KEY = "sensitivity.loss"


@dataclass(frozen=True)
class Packing:
    """Where a window holds what is taken of it.

    inputs: parts that the model takes, by name or in order; none: the window itself. Those of a loss are parts of its
    `window`. labels: as the outputs that the loss is of. weights: of each window, or of each of its output steps.
    loss: a function or an object of Keras, or what `keras.losses.get` takes, a table as JSON.
    selection: of the model's outputs, those that the loss is of.
    """

    inputs: tuple[Part, ...] = ()
    by_name: bool = True
    loss: Any = None
    window: Part | None = None
    labels: Part | None = None
    weights: Part | None = None
    selection: Selection = Selection()

    def wrapped(self, model: keras.Model) -> keras.Model:
        """The model that takes such windows, and gives what the model gives, or the loss of each window."""
        inner = Unpacked(model, self) if self.inputs else model
        return inner if self.loss is None else LossOf(inner, self)

    def source(self, wrt: str) -> tuple[Part, ...] | None:
        """The part that `wrt` names, behind those that it is a part of; None: it names none.

        "input" is all inputs together, where a window is their common steps.
        """
        outer = () if self.window is None else (self.window,)
        if wrt == "input" and not self._apart:
            return outer
        named = [part for part in self.inputs if part.name == wrt]
        return (*outer, named[0]) if named else None

    @property
    def _apart(self) -> bool:
        """Whether inputs stand behind each other without steps in common."""
        return any(part.steps is None for part in self.inputs)

    @classmethod
    def from_json(cls, content: dict[str, Any] | None) -> Packing | None:
        if content is None:
            return None
        own = {name: _part(content[name]) for name in ("window", "labels", "weights")}
        chosen = {name: None if part is None else tuple(part) for name, part in content["selection"].items()}
        inputs = tuple(part_of_json(part) for part in content["inputs"])
        return cls(**{**content, **own, "inputs": inputs, "selection": Selection(**chosen)})


def part_of_json(content: dict[str, Any]) -> Part:
    return Part(**{**content, "shape": tuple(content["shape"])})


def _part(content: dict[str, Any] | None) -> Part | None:
    return None if content is None else part_of_json(content)


class Wrapper(keras.Model):
    """A model around another one, which it calls."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__(name=model.name, autocast=False)
        self.inner = model

    def around(self, model: keras.Model) -> keras.Model:
        """The same around another model."""
        raise NotImplementedError


class Unpacked(Wrapper):
    """A model of several inputs that takes them as parts of a window."""

    def __init__(self, model: keras.Model, packing: Packing) -> None:
        super().__init__(model)
        self.packing = packing

    @property
    def output_names(self) -> list[str]:
        return list(getattr(self.inner, "output_names", None) or [])

    def call(self, windows: Any) -> Any:
        dtypes = {tensor.name: tensor.dtype for tensor in getattr(self.inner, "inputs", None) or []}
        parts = {
            part.name: tf.cast(part.of(windows), dtypes.get(part.name, windows.dtype)) for part in self.packing.inputs
        }
        return self.inner(parts if self.packing.by_name else list(parts.values()))

    def around(self, model: keras.Model) -> keras.Model:
        return Unpacked(model, self.packing)


class LossOf(Wrapper):
    """The loss of each window's outputs `(batch)`: the mean over output steps and outputs. A batch's is the mean of
    them.
    """

    def __init__(self, model: keras.Model, packing: Packing) -> None:
        super().__init__(model)
        if packing.labels is None:
            raise ValueError("a loss has labels")
        self.packing, self._labels, self._each = packing, packing.labels, loss_named(packing.loss)

    @property
    def output_names(self) -> list[str]:
        return [LOSS]

    def call(self, windows: Any) -> Any:
        own = self.packing
        given = windows if own.window is None else own.window.of(windows)
        outputs = own.selection.of(joined(heads(self.inner, self.inner(given), "output")))
        labels = self._labels.of(windows)
        if len(outputs.shape) == 1:
            outputs = tf.reshape(outputs, (-1, 1))
        try:
            found = self._each(labels, outputs)
        except Exception as error:  # each loss has words of its own for labels that it does not take
            shapes = [tuple(part.shape[1:]) for part in (labels, outputs)]
            raise Refused(
                "labels",
                given=f"labels of shape {shapes[0]} and outputs of shape {shapes[1]} ({gist(error)})",
                allowed="labels that the loss can compare with the outputs",
                remedy="give labels of the outputs' shape, or choose outputs",
            ) from error
        if own.weights is not None:
            weights = own.weights.of(windows)
            found = found * tf.reshape(weights, (*weights.shape, *(1,) * (len(found.shape) - len(weights.shape))))
        return {LOSS: tf.reduce_mean(found, tuple(range(1, len(found.shape)))) if len(found.shape) > 1 else found}

    def around(self, model: keras.Model) -> keras.Model:
        return LossOf(model, self.packing)


def rewrapped(model: keras.Model, other: Callable[[keras.Model], keras.Model]) -> keras.Model:
    """What is made of a model, with what is wrapped around it around that."""
    return model.around(rewrapped(model.inner, other)) if isinstance(model, Wrapper) else other(model)


def innermost(model: keras.Model) -> keras.Model:
    """The model that others are wrapped around."""
    return innermost(model.inner) if isinstance(model, Wrapper) else model


def steps_taken(model: keras.Model, shape: tuple[int, ...]) -> int:
    """The most steps that the innermost model takes of a window of that shape, 1 where it takes none."""
    if isinstance(model, LossOf):
        return steps_taken(model.inner, shape if model.packing.window is None else model.packing.window.shape)
    if isinstance(model, Unpacked):
        return max((part.shape[0] for part in model.packing.inputs if len(part.shape) > 1), default=1)
    return steps_taken(model.inner, shape) if isinstance(model, Wrapper) else shape[0]


def loss_named(given: Any) -> Callable[[Any, Any], Any]:
    """Labels and outputs → the loss of each `(batch, …)`, before any mean. Raises `Refused`."""
    named = json.loads(given) if isinstance(given, str) and given.startswith("{") else given
    try:
        found = keras.losses.get(named)
    except (ValueError, TypeError) as error:
        raise Refused(
            _KEY,
            given=repr(given),
            allowed='a loss of Keras, such as "mean_squared_error" or "huber", or a table with class_name and config',
            remedy="spell it as keras.losses.get takes it",
        ) from error
    if not callable(found):
        raise Refused(
            _KEY,
            given=repr(given),
            allowed="a loss of Keras, by name or as an object, or a function (labels, outputs) → (batch, …)",
            remedy="give one",
        )
    return found.call if isinstance(found, keras.losses.Loss) else found
