"""What a call in one process is given: windows, or several inputs, and a loss's labels and weights; as one array."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from .errors import Refused
from .labels import is_of_classes
from .layers import declared_inputs, input_names, whole_inputs
from .packing import LOSS, Packing, as_text, loss_named
from .parts import Part


@dataclass(frozen=True)
class Given:
    """windows: one array, or of a model of several inputs one for each, by name or in order. labels: `(batch, …)` as a
    loss takes them. loss: see `packing.loss_named`. sample_weight: `(batch)`, or of each output step too.
    """

    windows: Any
    labels: Any = None
    loss: Any = None
    sample_weight: Any = None

    def packed(self, model: keras.Model, of: str, dtype: str) -> tuple[np.ndarray, Packing | None]:
        """One array of windows, and where what is in it: None where it is the windows alone. Raises `Refused`."""
        several = self._several(model)
        if several is None:
            inputs = {"windows": _windows(self._only, dtype)}
            _require_shape(model, inputs["windows"])
            if whole_inputs(model):
                _numbers("windows", self._only, dtype, exact=True)
        else:
            counted = whole_inputs(model)
            inputs = {name: _numbers(name, values, dtype, exact=name in counted) for name, values in several.items()}
            _require_shapes(model, inputs)
        beside = self._of_loss(of, model)
        if several is None and not beside:
            return inputs["windows"], None
        others = {name: _numbers(name, values, dtype) for name, values in beside.items()}
        _require_as_many(inputs, others)
        loss = self._loss(model) if beside else None
        if beside and is_of_classes(loss):
            _require_classes(model, others["labels"])
        arrays = [*inputs.items(), *others.items()]  # an input may be called as they are
        parts = _behind_each_other(arrays)
        own, labels, weights = (*parts[: len(inputs)],), *[*parts[len(inputs) :], None, None][:2]
        packing = Packing(
            inputs=() if several is None else own,
            by_name=isinstance(self.windows, Mapping) or bool(input_names(model)),
            loss=loss,
            window=own[0] if several is None else None,
            labels=labels,
            weights=weights,
        )
        flat = [
            array.reshape(len(array), part.stop - part.start) for (_, array), part in zip(arrays, parts, strict=True)
        ]
        return np.concatenate(flat, axis=1), packing

    def _several(self, model: keras.Model) -> dict[str, Any] | None:
        """The inputs by name, in order; None where there is one, which the model takes as it is."""
        names = input_names(model)
        if isinstance(self.windows, Mapping) and not (len(names) == 1 and list(self.windows) == names):
            found = {str(name): values for name, values in self.windows.items()}
            if sorted(found) != sorted(names) if names else not found:
                raise _inputs_refused(f"inputs {', '.join(found) or 'none'}", names)
            return found
        if len(names) > 1:
            if not isinstance(self.windows, (list, tuple)) or len(self.windows) != len(names):
                count = len(self.windows) if isinstance(self.windows, (list, tuple)) else 1
                raise _inputs_refused(f"{count} array{'' if count == 1 else 's'}", names)
            return dict(zip(names, self.windows, strict=True))
        if not names and (isinstance(self.windows, tuple) or _differ(self.windows)):
            return {f"input_{number}": values for number, values in enumerate(self.windows)}
        return None

    @property
    def _only(self) -> Any:
        """The only input, by its name or without."""
        return next(iter(self.windows.values())) if isinstance(self.windows, Mapping) else self.windows

    def _of_loss(self, of: str, model: keras.Model) -> dict[str, Any]:
        """What a loss takes beside outputs; nothing where none is asked for."""
        given = {"labels": self.labels, "loss": self.loss, "sample_weight": self.sample_weight}
        some = [name for name, value in given.items() if value is not None]
        if of != LOSS and some:
            raise Refused(
                some[0],
                given=f'{some[0]}, and of = "{of}"',
                allowed='labels, loss and sample_weight with of = "loss"',
                remedy='leave it out, or set of="loss"',
            )
        if of == LOSS and self.labels is None and (some or not _has_one_named(model, LOSS)):
            raise Refused(
                "labels",
                given='nothing, and of = "loss"',
                allowed="labels (batch, …), as the loss takes them",
                remedy="give them as labels=",
            )
        return {name: given[name] for name in ("labels", "sample_weight") if given[name] is not None}

    def _loss(self, model: keras.Model) -> Any:
        loss = self.loss if self.loss is not None else getattr(model, "loss", None)
        if self.loss is None and isinstance(loss, (list, tuple)) and len(loss) == 1:
            loss = loss[0]
        if loss is None:
            raise Refused(
                "loss",
                given="nothing, and a model that was not compiled with one",
                allowed='a loss of Keras, such as "mean_squared_error", or a function (labels, outputs) → (batch, …)',
                remedy="give it as loss=",
            )
        if self.loss is None and isinstance(loss, (list, tuple, Mapping)):
            raise Refused(
                "loss",
                given=f"nothing, and a model that was compiled with {len(loss)} losses",
                allowed="one loss of all outputs, or of=... one of them",
                remedy="give it as loss=",
            )
        loss_named(loss)
        return as_text(loss)


def _has_one_named(model: keras.Model, name: str) -> bool:
    """Whether an output or a layer is called so."""
    layers = [layer.name for layer in model._flatten_layers(include_self=False)]
    return name in [*layers, *(getattr(model, "output_names", None) or [])]


def _differ(given: Any) -> bool:
    """Whether it is a list of arrays of several shapes: no windows of one input."""
    shapes = [getattr(part, "shape", None) for part in given] if isinstance(given, list) else []
    return None not in shapes and len(set(map(str, shapes))) > 1


def _array(name: str, values: Any) -> np.ndarray:
    if np.ma.is_masked(values):
        raise Refused(
            name,
            given=f"a masked array, {np.ma.count_masked(values):,} of whose numbers are hidden",
            allowed="arrays of numbers",
            remedy="leave out what has missing numbers, or fill them as the model's training did: windows.filled(…)",
        )
    try:
        return np.asarray(values)
    except ValueError as error:
        raise Refused(
            name, given=f"no array ({error})", allowed="numbers (batch, …)", remedy="give rows of one length"
        ) from error


def _windows(values: Any, dtype: str) -> np.ndarray:
    source = _array("windows", values)
    try:
        if source.dtype.kind not in "fiubO":
            raise TypeError(f"an array of {source.dtype}")
        source = source.astype(dtype, copy=False)
    except (TypeError, ValueError) as error:
        raise Refused(
            "windows",
            given=str(error),
            allowed="numbers (batch, lag, feature)",
            remedy="turn text and times to numbers",
        ) from error
    if source.ndim < 2:
        raise Refused(
            "windows",
            given=f"an array of shape {source.shape}",
            allowed="(batch, lag, feature), or any shape that begins with the batch",
            remedy="add a batch axis: windows[None]",
        )
    return source


def _require_shape(model: keras.Model, windows: np.ndarray) -> None:
    """Refuse windows that are not of the shape that a model of one input declares, but for an axis of length 1 that
    Keras adds or drops at the end.
    """
    for tensor in declared_inputs(model).values():
        declared, found = tuple(tensor.shape[1:]), windows.shape[1:]
        shorter, longer = sorted((declared, found), key=len)
        if longer[len(shorter) :] == (1,):
            declared, found = declared[: len(shorter)], found[: len(shorter)]
        if _differs(declared, found):
            raise _shape_refused(declared=tuple(tensor.shape[1:]), given=f"an array of shape {windows.shape}")


def _require_shapes(model: keras.Model, arrays: dict[str, np.ndarray]) -> None:
    """Refuse inputs that are not of the shapes that the model declares."""
    for name, tensor in declared_inputs(model).items():
        declared, found = tuple(tensor.shape[1:]), arrays[name].shape
        if _differs(declared, found[1:]):
            raise _shape_refused(declared, given=f"an array of shape {found} as input {name!r}")


def _differs(declared: tuple[int | None, ...], found: tuple[int, ...]) -> bool:
    return len(declared) != len(found) or any(a not in (None, b) for a, b in zip(declared, found, strict=True))


def _shape_refused(declared: tuple[int | None, ...], given: str) -> Refused:
    sizes = ", ".join("any" if size is None else str(size) for size in declared)
    return Refused(
        "windows",
        given=given,
        allowed=f"(batch, {sizes}), as the model declares its input",
        remedy="give windows of the length and the features that the model was trained on",
    )


def _numbers(name: str, values: Any, dtype: str, *, exact: bool = False) -> np.ndarray:
    """exact: they must not be rounded."""
    array = _array(name, values)
    if array.dtype.kind not in "fiub" or array.ndim < 1:
        raise Refused(
            name,
            given=f"an array of shape {array.shape} and {array.dtype}",
            allowed="numbers (batch, …)",
            remedy="give one for each window",
        )
    held = array.astype(dtype, copy=False)
    if exact and (held != np.floor(held)).any():
        raise Refused(
            name,
            given=f"{held[held != np.floor(held)].flat[0]:g}, for an input of whole numbers",
            allowed="whole numbers, such as classes from 0",
            remedy="round them as the model's training did",
        )
    if exact and (held.astype(array.dtype) != array).any():
        raise Refused(
            name,
            given=f"whole numbers up to {np.abs(array).max():,}",
            allowed=f"those that {dtype} holds exactly: up to {2 ** (np.finfo(dtype).nmant + 1):,}",
            remedy="number them from 0, or give a model of float64",
        )
    return held


def _require_as_many(inputs: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> None:
    """Refuse inputs, and what goes with them, of different numbers of windows."""
    count = len(next(iter(inputs.values())))
    for key, (name, array) in [("windows", one) for one in inputs.items()] + [(one[0], one) for one in others.items()]:
        if len(array) != count:
            raise Refused(
                key,
                given=f"{len(array)} of {name}, and {count} of {next(iter(inputs))}",
                allowed="as many of each: one for every window",
                remedy="cut them to the same windows",
            )


def _require_classes(model: keras.Model, labels: np.ndarray) -> None:
    """Refuse labels that are none of the classes that a model gives scores of, as far as it says how many."""
    shape = getattr(model, "output_shape", None)
    count = shape[-1] if isinstance(shape, tuple) and shape and isinstance(shape[-1], int) else None
    wrong = (labels < 0) | (labels != np.floor(labels)) | (labels >= (count or np.inf))
    if wrong.any():
        raise Refused(
            "labels",
            given=f"{labels[wrong].flat[0]:g}, of a loss of classes",
            allowed="whole numbers from 0" + (f" to {count - 1}" if count else ""),
            remedy="number the classes so, and leave out windows without one",
        )


def _behind_each_other(arrays: list[tuple[str, np.ndarray]]) -> list[Part]:
    """Of one flat array, all numbers of a window."""
    parts, start = [], 0
    for name, array in arrays:
        stop = start + math.prod(array.shape[1:])
        parts.append(Part(name, start, stop, array.shape[1:]))
        start = stop
    return parts


def _inputs_refused(given: str, names: list[str]) -> Refused:
    return Refused(
        "windows",
        given=f"{given} for a model with {len(names)} inputs",
        allowed=f"one array for each of {', '.join(names)}, by name or in this order",
        remedy=f"give {{{', '.join(f'{name!r}: …' for name in names)}}}",
    )
