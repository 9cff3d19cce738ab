"""What a loss compares a window's outputs with: columns of the series at the outputs' own steps."""

from __future__ import annotations

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
    offsets: steps from a window's last one, rising, at which they are taken. shape: of one window's labels, as the loss
    takes them. window: the shape of a window without them. by_step: weights are of each output step, and not of the
    window. mean, std: of labels, by column, before the loss.
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
        at = last[:, None] + np.array(self.offsets)
        known = np.take(columns, np.minimum(at, len(columns) - 1), axis=0)  # (window, label step, column)
        labels = (known[..., list(self.columns)] - np.array(self.mean)) / np.array(self.std)
        parts = [windows.reshape(len(windows), -1), labels.reshape(len(windows), -1)]
        if self.weights is not None:
            weights = known[..., self.weights]
            parts.append(weights if self.by_step else weights[:, -1:])
        there = (at < len(columns)).all(axis=1)
        for part in parts[1:]:
            there &= np.isfinite(part).all(axis=1)
        return np.concatenate([part.astype(dtype) for part in parts], axis=1), there

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
    of_classes = "sparse" in json.dumps(wanted.loss)  # labels are numbers of classes, and outputs a score of each
    as_steps = len(names) == 1 and channels > 1 and not of_classes and plain.output_steps == 1
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
    return Labels(
        columns=tuple(read.index(name) for name in names),
        weights=None if section.weights is None else read.index(section.weights),
        offsets=offsets,
        shape=(*target[:-1], *own) if of_classes and len(names) != channels else target,
        window=plain.input_shape,
        by_step=plain.output_steps > 1,
        mean=tuple(scaling.mean) if scaling else (0.0,) * len(names),
        std=tuple(scaling.std) if scaling else (1.0,) * len(names),
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
