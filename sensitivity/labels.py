"""What a loss compares a window's outputs with: columns of the series at the outputs' own steps."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import Refused
from .parts import Part
from .windows import Missing, spans_of

if TYPE_CHECKING:
    from .facts import ModelFacts
    from .heads import Selection
    from .job import SensitivitySection
    from .sections import SeriesSection
    from .survey import Survey


@dataclass(frozen=True)
class Labels:
    """columns, weights: their places among the columns that are read, and that of the sample weights, if any.
    offsets: steps from a window's last one, rising, at which they are taken; a window's weight is that at the last.
    shape: of one window's labels, as the loss takes them. window: the shape of a window without them. by_step: weights
    are of each output step, and not of the window. mean, std: of labels, by column, before the loss.
    """

    columns: tuple[int, ...]
    weights: int | None
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    window: tuple[int, ...]
    by_step: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """Where a packed window holds itself, its labels, and their weights."""
        shapes = {"input": self.window, "labels": self.shape}
        if self.weights is not None:
            shapes["weights"] = (len(self.offsets),) if self.by_step else ()
        found, start = [], 0
        for name, shape in shapes.items():
            found.append(Part(name, start, start + math.prod(shape), shape))
            start += math.prod(shape)
        return tuple(found)

    @property
    def ahead(self) -> int:
        """Steps after a window's last one that its labels reach."""
        return max(0, self.offsets[-1])

    def packed(
        self, windows: np.ndarray, columns: np.ndarray, last: np.ndarray, dtype: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Windows `(window, …)` with what goes with them behind, `(window, number)`, and which have all of it.

        columns: of consecutive steps, `(step, column)` float64. last: each window's last step among them.
        """
        labels = (columns[:, list(self.columns)] - np.array(self.mean)) / np.array(self.std)
        shapes = [part.stop - part.start for part in self.parts]
        packed = np.empty((len(windows), sum(shapes)), dtype)
        into = np.split(packed, np.cumsum(shapes)[:-1], axis=1)
        into[0][:] = windows.reshape(len(windows), -1)
        steps = into[1].reshape(len(windows), len(self.offsets), -1)
        weights = None if self.weights is None else columns[:, self.weights]
        for number, offset in enumerate(self.offsets):
            at = np.minimum(last + offset, len(columns) - 1)
            steps[:, number] = labels[at]
            if weights is not None:
                into[2][:, number if self.by_step else 0] = weights[at]
        into[1][:] = steps.reshape(len(windows), -1)
        return packed, self.there(columns, last)

    def there(self, columns: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Which windows have all of their labels and weights: bool `(window)`."""
        wanted = [*self.columns, *([] if self.weights is None else [self.weights])]
        finite = np.append(np.isfinite(columns[:, wanted]).all(axis=1), False)
        found = np.ones(len(last), bool)
        for offset in self.offsets:
            found &= finite[np.minimum(last + offset, len(columns))]
        return found

    def missing(self, survey: Survey) -> Missing:
        """Steps that windows cannot be computed for, or not without their labels."""
        return Missing(survey.gaps, survey.label_gaps, spans_of(self.offsets))

    @classmethod
    def from_json(cls, content: dict[str, Any] | None) -> Labels | None:
        if content is None:
            return None
        lists: dict[str, Any] = {name: tuple(part) for name, part in content.items() if isinstance(part, list)}
        return cls(**{**content, **lists})


def labels_of(
    section: SeriesSection,
    wanted: SensitivitySection,
    survey: Survey,
    plain: ModelFacts,
    chosen: Selection,
    target: tuple[int, ...],
) -> Labels:
    """The labels of a job's loss. Raises `Refused` where they cannot be those of the outputs.

    plain: the model's facts, of all its outputs. chosen: those of them that the loss is of, and target their shape.
    """
    names, scaling = section.labels or (), section.label_scaling
    channels = target[-1] if target else 1
    of_classes = is_of_classes(wanted.loss)
    several = plain.output_steps == 1 and len(plain.outputs) > 1 and len(names) == 1 and not of_classes
    if several and channels == 1 and wanted.lead:
        raise Refused(
            "sensitivity.outputs",
            given=f"{', '.join(map(str, wanted.outputs or ()))}, with one label and lead = {wanted.lead}",
            allowed="with one label: all outputs, as steps; two or more of them; or one, without a lead",
            remedy="end the model with a Reshape to (output_step, output), and choose from output_steps",
        )
    as_steps = several and channels > 1
    if len(names) != channels and not as_steps and not of_classes:
        raise Refused(
            "series.labels",
            given=f"{len(names)} columns ({', '.join(names)})",
            allowed=f"{channels}, one for each output",
            remedy="name those that the model was trained on, or choose outputs",
        )
    count = len(plain.outputs) if as_steps else plain.output_steps
    wanted_steps = chosen.channels if as_steps else chosen.steps
    last = _lead(wanted.lead, count, plain.length, as_steps=as_steps)
    offsets = tuple(last - count + 1 + step for step in (range(count) if wanted_steps is None else wanted_steps))
    own = () if len(names) == 1 else (len(names),)
    read = survey.columns
    columns = tuple(read.index(name) for name in names)
    mean = tuple(scaling.mean) if scaling else (0.0,) * len(names)
    std = tuple(scaling.std) if scaling else (1.0,) * len(names)
    if of_classes:
        _require_classes(wanted.loss, survey, columns, channels)
    return Labels(
        columns=columns,
        weights=None if section.weights is None else read.index(section.weights),
        offsets=offsets,
        shape=(*target[:-1], *own) if of_classes and len(names) != channels else target,
        window=plain.input_shape,
        by_step=plain.output_steps > 1,
        mean=mean,
        std=std,
    )


def is_of_classes(loss: Any) -> bool:
    """Whether labels are numbers of classes, and outputs a score of each, as the name of a loss of Keras says."""
    return "sparse" in loss_name(loss).lower()


def loss_name(loss: Any) -> str:
    """In words: of a table, or its JSON, the class; of an object or a function its own name."""
    table = loss
    if isinstance(loss, str) and loss.startswith("{"):
        with contextlib.suppress(ValueError):  # then it is a name, which Keras does not know
            table = json.loads(loss)
    if isinstance(table, dict):
        return str(table.get("class_name", table))
    return table if isinstance(table, str) else getattr(table, "__name__", type(table).__name__)


def _require_classes(loss: Any, survey: Survey, columns: tuple[int, ...], classes: int) -> None:
    """Refuse labels that are none of so many classes."""
    for column in columns:
        largest, whole = survey.largest[column], survey.whole[column]
        negative = column < len(survey.negative) and survey.negative[column]
        if not whole or negative or largest > classes - 1:
            given = "negative numbers" if negative else f"numbers up to {largest:g}"
            raise Refused(
                "series.labels",
                given=f"{survey.columns[column]!r} with {given}" + ("" if whole else ", not all of them whole"),
                allowed=f"whole numbers from 0 to {classes - 1}, one for each of {classes} outputs",
                remedy=f"number the classes so, mark others as missing, or choose another loss than {loss}",
            )


def _lead(lead: int | None, count: int, length: int, *, as_steps: bool) -> int:
    """Steps from a window's last one to that of the last of so many output steps."""
    if lead is None and (as_steps or count not in (1, length)):
        raise Refused(
            "sensitivity.lead",
            given=f"nothing, and outputs of {count} steps for a window of {length}",
            allowed="steps from the window's last one to the last output's: "
            f"{count} where outputs follow the window, 0 where they end with it",
            remedy="set it",
        )
    last = lead or 0
    if count - last > length:
        raise Refused(
            "sensitivity.lead",
            given=f"{last} for {count} output steps, which begin before the window of {length}",
            allowed=f"{count - length} or more",
            remedy="give the steps from the window's last one to the last output's",
        )
    return last
