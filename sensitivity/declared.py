"""What windows a model takes, as it declares its inputs, and which columns of the series each of them is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .errors import Refused
from .layers import declared_inputs, input_names, keras, whole_inputs
from .packing import Packing
from .parts import Part
from .sections import WindowsSection

if TYPE_CHECKING:
    from .job import Job
    from .survey import Survey

Columns = Mapping[str, Sequence[str]]  # of each input, by name


def windows_taken(
    model: keras.Model, windows: WindowsSection, features: int, columns: Columns | None
) -> tuple[int, tuple[int, ...], Packing | None]:
    """The length of a window of `features` columns, its shape as the model has it, and where in it inputs are, where
    there are several. Raises `Refused` where model and windows differ.

    columns: of each input, one after another in the series; None: there is one input, of all of them.
    """
    if columns is not None:
        _require_names(model, columns)
    if columns is None or len(columns) == 1:
        declared = _declared_input(model)
        length = _window_length(declared, windows, features)
        flat = declared is not None and len(declared) == 1
        return length, (length * features,) if flat else (length, features), None
    shapes = {name: tuple(tensor.shape[1:]) for name, tensor in declared_inputs(model).items()}
    steps = {name: _steps(name, shapes.get(name, (None, None)), len(own), windows) for name, own in columns.items()}
    longest = max(1 if count is None else count for count in steps.values())
    length = windows.length or longest
    if length > longest:
        raise Refused(
            "windows.length",
            given=length,
            allowed=f"at most {longest}, the steps of the longest input",
            remedy="set it so, or drop it",
        )
    parts, start = [], 0
    for name, own in columns.items():
        count, stop = steps[name], start + len(own)
        if (count or 1) > length:
            raise Refused(
                "windows.length",
                given=length,
                allowed=f"{count} or more, the steps that input {name!r} takes",
                remedy="leave it out",
            )
        parts.append(Part(name, start, stop, (len(own),) if count is None else (count, len(own)), count or 1))
        start = stop
    return length, (length, features), Packing(tuple(parts))


def require_whole(model: keras.Model, inputs: Sequence[Part], survey: Survey, job: Job) -> None:
    """Refuse what an input of whole numbers would round.

    inputs: where the model has several; none: it has one, of all columns.
    """
    counted = whole_inputs(model)
    if not inputs and counted:
        inputs = (Part(counted[0], 0, len(survey.features), ()),)
    scaling, limit = job.series.scaling, 2 ** (np.finfo(job.run.dtype).nmant + 1)
    for part in inputs:
        for column in range(part.start, part.stop) if part.name in counted else ():
            scaled = scaling is not None and (scaling.mean[column], scaling.std[column]) != (0.0, 1.0)
            if scaled or not survey.whole[column] or survey.largest[column] > limit:
                what = "is scaled" if scaled else "has numbers that are not whole"
                if not scaled and survey.whole[column]:
                    what = f"has numbers up to {survey.largest[column]:g}"
                raise Refused(
                    f"model.inputs.{part.name}" if job.model.inputs else "series.features",
                    given=f"column {survey.features[column]!r}, which {what}",
                    allowed=f"whole numbers up to {limit:,}, with mean 0 and std 1 in series.scaling",
                    remedy="number the classes 0, 1, 2, …, leave them unscaled, or name another column",
                )


def _require_names(model: keras.Model, columns: Columns) -> None:
    names = input_names(model)
    if names and sorted(columns) != sorted(names):
        raise Refused(
            "model.inputs",
            given=", ".join(columns),
            allowed=f"the model's inputs, each once: {', '.join(names)}",
            remedy="name the columns of each of these",
        )


def _steps(name: str, shape: tuple[int | None, ...], columns: int, windows: WindowsSection) -> int | None:
    """How many of a window's newest steps an input takes; None: the last one's numbers, without an axis of steps."""
    if len(shape) not in (1, 2) or shape[-1] not in (None, columns):
        raise Refused(
            f"model.inputs.{name}",
            given=f"{columns} columns for an input of shape {('batch', *shape)}",
            allowed="as many as (batch, lag, feature) or (batch, feature) has features",
            remedy="name the columns that the model was trained on, in its order",
        )
    if len(shape) == 1:
        return None
    length = shape[0] or windows.length
    if length is None:
        raise Refused(
            "windows.length",
            given=f"nothing, and input {name!r} takes windows of any length",
            allowed="a whole number of steps",
            remedy="set windows.length to the length the model was trained on",
        )
    return length


def _declared_input(model: keras.Model) -> tuple[int | None, ...] | None:
    """The shape of one window as the model declares it; None where a subclassed model declares nothing."""
    inputs = list(declared_inputs(model).values())
    if len(inputs) > 1:
        raise Refused(
            "model.inputs",
            given=f"nothing, and a model with {len(inputs)} inputs",
            allowed=f"the columns of each of {', '.join(input_names(model))}",
            remedy=f'add [model.inputs] with {input_names(model)[0]} = ["column", …], and so on',
        )
    if not inputs:
        return None
    if "float" not in inputs[0].dtype and "int" not in inputs[0].dtype:
        raise Refused(
            "model.path",
            given=f"an input of {inputs[0].dtype}",
            allowed="inputs of floating-point numbers, or of whole numbers such as classes",
            remedy="give the part of the model that begins with numbers, after a lookup",
        )
    shape = tuple(inputs[0].shape[1:])
    if len(shape) not in (1, 2):
        raise Refused(
            "model.path",
            given=f"an input of shape {('batch', *shape)}",
            allowed="(batch, lag, feature), or (batch, lag × feature)",
            remedy="wrap the model in one that takes (lag, feature) and reshapes",
        )
    return shape


def _window_length(declared: tuple[int | None, ...] | None, windows: WindowsSection, features: int) -> int:
    length = windows.length
    if declared is None or (len(declared) == 2 and declared[0] is None):
        _refuse_features(declared, features)
        if length is None:
            raise Refused(
                "windows.length",
                given="nothing, and the model takes windows of any length",
                allowed="a whole number of steps",
                remedy="set windows.length to the length the model was trained on",
            )
        return length
    if len(declared) == 1:
        return _flat_length(declared[0], length, features)
    _refuse_features(declared, features)
    if length not in (None, declared[0]):
        raise Refused(
            "windows.length",
            given=length,
            allowed=f"{declared[0]}, the model's input length",
            remedy="set it so, or drop it",
        )
    return int(declared[0] or 0)


def _refuse_features(declared: tuple[int | None, ...] | None, features: int) -> None:
    if declared is not None and declared[-1] not in (None, features):
        raise Refused(
            "series.features",
            given=f"{features} features",
            allowed=f"{declared[-1]}, as the model takes",
            remedy="name the columns the model was trained on, in its order, as series.features",
        )


def _flat_length(size: int | None, length: int | None, features: int) -> int:
    if length is None and features == 1 and size is not None:
        return size
    if length is None or (size is not None and length * features != size):
        raise Refused(
            "windows.length",
            given=f"{length or 'nothing'} with {features} features",
            allowed=f"length × features = {size}, the size of the model's flat input (oldest step first)",
            remedy="set windows.length, and series.features to the columns the model was trained on",
        )
    return length
