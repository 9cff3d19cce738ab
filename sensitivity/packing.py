"""Models of several inputs, and losses, as models that take one array of windows, in which everything is packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from .errors import Refused, gist
from .heads import Selection, heads, joined
from .labels import is_of_classes, loss_name
from .layers import declared_inputs, function_of, keras, outputs_of, whole_inputs
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
        named = [part for part in self.inputs if part.name == wrt]
        if named:
            return (*outer, named[0])
        return outer if wrt == "input" and not self._apart else None

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
        super().__init__(name=model.name)
        self.inner, self.built = model, True

    def __call__(self, windows: Any) -> Any:
        """Past Keras' own, which would cast windows to the dtype of this model, which has none, and wrap errors."""
        return self.call(windows)

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
        dtypes = {name: tensor.dtype for name, tensor in declared_inputs(self.inner).items()}
        parts = {
            part.name: tf.cast(part.of(windows), dtypes.get(part.name, windows.dtype)) for part in self.packing.inputs
        }
        structure = getattr(function_of(self.inner), "_inputs_struct", None)
        if structure is not None:  # which alone a functional model takes, whatever its tensors are called
            given = keras.tree.pack_sequence_as(structure, [parts[name] for name in dtypes])
        else:
            given = parts if self.packing.by_name else list(parts.values())
        return outputs_of(self.inner, given)

    def around(self, model: keras.Model) -> keras.Model:
        return Unpacked(model, self.packing)


class LossOf(Wrapper):
    """The loss of each window's outputs `(batch)`: the mean over output steps and outputs, a batch's being the mean of
    them; or the sums, of a loss whose reduction is "sum".
    """

    def __init__(self, model: keras.Model, packing: Packing) -> None:
        super().__init__(model)
        if packing.labels is None:
            raise ValueError("a loss has labels")
        self.packing, self._labels = packing, packing.labels
        self._each, self._reduced = loss_named(packing.loss), _reduction(packing.loss)

    @property
    def output_names(self) -> list[str]:
        return [LOSS]

    def call(self, windows: Any) -> Any:
        own = self.packing
        given = windows if own.window is None else own.window.of(windows)
        every = heads(self.inner, outputs_of(self.inner, given), "output")
        masked = [name for name, head in every.items() if getattr(head, "_keras_mask", None) is not None]
        if masked and not (own.weights and own.weights.shape):
            raise Refused(
                _KEY,
                given=f"outputs {', '.join(masked)} with masked steps, which Keras leaves out of a loss",
                allowed="losses of outputs without a mask, or with weights of their steps",
                remedy="give weights of 0 for masked steps",
            )
        outputs = own.selection.of(joined(every))
        labels = self._labels.of(windows)
        if len(outputs.shape) == 1:
            outputs = tf.reshape(outputs, (-1, 1))
        if len(labels.shape) < len(outputs.shape) and outputs.shape[-1] == 1:
            labels = labels[..., None]
        try:
            found = self._each(labels, outputs)
        except Exception as error:  # each loss has words of its own for labels that it does not take
            raise self._refused(labels, outputs, gist(error)) from error
        if not isinstance(found, tf.Tensor) or not len(found.shape) or not _alike(found, labels):
            raise self._refused(labels, outputs, f"gives {tuple(getattr(found, 'shape', ()))} for a batch")
        if _spreads(own.loss, labels, outputs):
            raise self._refused(labels, outputs, "would spread labels over outputs")
        if own.weights is not None:
            weights = own.weights.of(windows)
            if weights.shape[1:] != found.shape[1 : len(weights.shape)]:
                raise Refused(
                    "sample_weight",
                    given=f"weights of shape {tuple(weights.shape[1:])} for a loss of shape {tuple(found.shape[1:])}",
                    allowed="(batch), or (batch, output_step) of a loss that has output steps",
                    remedy="give one for each window",
                )
            found = found * tf.reshape(weights, (*weights.shape, *(1,) * (len(found.shape) - len(weights.shape))))
        return {LOSS: self._reduced(found, tuple(range(1, len(found.shape)))) if len(found.shape) > 1 else found}

    def around(self, model: keras.Model) -> keras.Model:
        return LossOf(model, self.packing)

    def _refused(self, labels: tf.Tensor, outputs: tf.Tensor, why: str) -> Refused:
        name, shapes = loss_name(self.packing.loss), [tuple(part.shape[1:]) for part in (labels, outputs)]
        return Refused(
            _KEY,
            given=f"{name}, labels of shape {shapes[0]} and outputs of shape {shapes[1]}: {why}",
            allowed="a loss of each window, (batch, …), that takes such labels and outputs",
            remedy="give labels of the outputs' shape, choose outputs, or give another loss",
        )


def rewrapped(model: keras.Model, other: Callable[[keras.Model], keras.Model]) -> keras.Model:
    """What is made of a model, with what is wrapped around it around that."""
    return model.around(rewrapped(model.inner, other)) if isinstance(model, Wrapper) else other(model)


def _spreads(loss: Any, labels: tf.Tensor, outputs: tf.Tensor) -> bool:
    """Whether a loss of Keras, other than of classes, would take a label for several outputs, or the reverse."""
    of_keras = not callable(loss) or str(getattr(loss, "__module__", "")).startswith("keras.")
    if not of_keras or is_of_classes(loss):
        return False
    if len(labels.shape) != len(outputs.shape):
        return len(labels.shape) < len(outputs.shape)
    return any(a != b and 1 in (a, b) for a, b in zip(labels.shape[1:], outputs.shape[1:], strict=True))


def _alike(one: tf.Tensor, other: tf.Tensor) -> bool:
    """Whether they are of as many windows, as far as is known."""
    return one.shape[0] == other.shape[0] or None in (one.shape[0], other.shape[0])


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


def drawn(model: keras.Model, shape: tuple[int, ...], dtype: str, count: int) -> tf.Tensor:
    """Windows at random `(count, *shape)`; labels, and inputs of whole numbers, are zero: they may be classes."""
    if not isinstance(model, Wrapper) and whole_inputs(model):
        return tf.zeros((count, *shape), dtype)
    windows = tf.constant(np.random.default_rng(0).standard_normal((count, *shape)), dtype)
    for part in _counted(model):
        windows = part.put(windows, tf.zeros((count, *part.shape), dtype))
    return windows


def _counted(model: keras.Model) -> list[Part]:
    """Parts of its windows that need not be any numbers; of a loss's window all inputs where one is such."""
    if isinstance(model, LossOf):
        inner = _counted(model.inner)
        own = [part for part in (model.packing.labels, model.packing.weights) if part is not None]
        return [*own, *([model.packing.window] if inner and model.packing.window else inner)]
    if isinstance(model, Unpacked):
        return [part for part in model.packing.inputs if part.name in whole_inputs(model.inner)]
    return _counted(model.inner) if isinstance(model, Wrapper) else []


def as_text(loss: Any) -> Any:
    """A table, or an object of Keras' own, as JSON; others as they are."""
    if isinstance(loss, keras.losses.Loss) and type(loss).__module__.startswith("keras."):
        loss = keras.losses.serialize(loss)
    return json.dumps(loss, sort_keys=True) if isinstance(loss, dict) else loss


def is_constant(loss: Any) -> bool:
    """Whether a loss is the same whenever it is asked for: by name, or a function that closes over nothing."""
    named = getattr(loss, "__name__", "<lambda>") != "<lambda>"
    alone = getattr(loss, "__closure__", None) is None and getattr(loss, "__self__", None) is None
    return loss is None or isinstance(loss, str) or (named and alone)


def _reduction(given: Any) -> Callable[..., tf.Tensor]:
    """What makes one number of a window's losses. Raises `Refused` where a batch's is not made of its windows' own."""
    reduction = getattr(_loss_of(given), "reduction", None)
    if reduction == "mean_with_sample_weight":
        raise Refused(
            _KEY,
            given=f"{loss_name(given)} with reduction={reduction!r}, which divides by the weights of a whole batch",
            allowed='reductions "sum_over_batch_size", "mean", "sum" and None',
            remedy="leave it out",
        )
    return tf.reduce_sum if reduction == "sum" else tf.reduce_mean


def loss_named(given: Any) -> Callable[[Any, Any], Any]:
    """Labels and outputs → the loss of each `(batch, …)`, before any mean. Raises `Refused`."""
    found = _loss_of(given)
    return found.call if isinstance(found, keras.losses.Loss) else found


def _loss_of(given: Any) -> Any:
    """An object of Keras' or a function. Raises `Refused`."""
    try:
        named = json.loads(given) if isinstance(given, str) and given.startswith("{") else given
        found = keras.losses.get(named)
    except Exception as error:  # a table may have anything in it
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
    return found
