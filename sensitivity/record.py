"""The series that a product is asked of: its features, how they vary, and windows of it, as the model takes them."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .addresses import place_of
from .errors import Refused
from .job import Job
from .sections import Scaling
from .series import chosen_windows
from .survey import Survey

if TYPE_CHECKING:
    from .facts import ModelFacts

MANY = 4  # times as many windows are looked at as are wanted whole


@dataclass(frozen=True)
class Record:
    """mean, std: of each feature, float64. scaling: before the model. windows: so many of them, spread over the series,
    `(window, lag, feature)`; one: `window` of that number, as the model takes them.
    """

    features: tuple[str, ...]
    mean: np.ndarray
    std: np.ndarray
    scaling: Scaling | None
    windows: Callable[[int], np.ndarray]
    window: Callable[[int], np.ndarray]

    def scaled(self, values: np.ndarray) -> np.ndarray:
        """`(…, feature)` in units of the series → as the model takes it."""
        return values if self.scaling is None else (values - np.array(self.scaling.mean)) / self.scale

    def narrowed(self, facts: ModelFacts) -> Record:
        """The same of an input that is a part of the window: its features and its steps."""
        if not facts.source.parts:
            return self
        columns, (_, steps), scaling = facts.source_columns, facts.source_dims[0], self.scaling

        def cut(values: np.ndarray) -> np.ndarray:
            return values[..., -steps:, columns]

        return Record(
            features=self.features[columns],
            mean=self.mean[columns],
            std=self.std[columns],
            scaling=scaling and Scaling(mean=scaling.mean[columns], std=scaling.std[columns]),
            windows=lambda count: cut(self.windows(count)),
            window=lambda number: cut(self.window(number)),
        )

    @property
    def scale(self) -> np.ndarray:
        """What a unit of the model's input is in units of the series, by feature."""
        return np.ones(len(self.features)) if self.scaling is None else np.array(self.scaling.std)


def read_array(path: str, key: str) -> np.ndarray:
    """The numbers of a .npy file, float64. Raises `Refused` in the name of `key`."""
    try:
        folder, name = place_of(path)
        with folder.local_copy(name) as file:
            found = np.load(file, allow_pickle=False)
        if found.dtype.kind not in "fiub":
            raise TypeError(f"an array of {found.dtype}")
        return found.astype("float64")
    except (OSError, ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise Refused(
            key,
            given=f"{path} ({str(error).strip() or type(error).__name__})",
            allowed="a .npy file of numbers",
            remedy="write it with numpy.save",
        ) from error


def require_shape(values: Any, shape: tuple[int, ...], key: str, what: str) -> np.ndarray:
    """`(n, *shape)` of finite numbers, of one too: `(*shape)`. Raises `Refused`."""
    array = np.asarray(values, "float64")
    if array.shape == shape:
        array = array[None]
    if array.shape[1:] != shape or not len(array) or not np.isfinite(array).all():
        finite = "" if np.isfinite(array).all() else ", not all finite"
        raise Refused(
            key,
            given=f"an array of shape {array.shape}{finite}",
            allowed=f"finite numbers of shape {('n', *shape)}: {what}",
            remedy="give it that shape",
        )
    return array


def record_of(job: Job, survey: Survey, facts: ModelFacts) -> Record:
    """The job's series, in windows of the model's length; of an input that is a part of them, that part."""
    section, windows = job.series, survey.windows(facts.length, job.windows.stride)
    missing = facts.missing(survey)

    def read(numbers: np.ndarray) -> np.ndarray:
        values = chosen_windows(section, survey, windows, numbers)
        return record.scaled(values)

    def some(count: int) -> np.ndarray:
        tried = np.unique(np.linspace(0, windows.count - 1, min(MANY * count, windows.count)).round().astype(int))
        whole = np.array([number for number in tried if not windows.skipped(missing, number, number + 1)[0]])
        if not len(whole):
            raise Refused(
                "series.path",
                given=f"{section.path}, in which none of {len(tried):,} windows is without a missing value",
                allowed="a series of which one window in a few is whole",
                remedy="fill the gaps, or leave out the feature that has them",
            )
        return read(whole[np.unique(np.linspace(0, len(whole) - 1, min(count, len(whole))).round().astype(int))])

    def one(number: int) -> np.ndarray:
        if number >= windows.count or windows.skipped(missing, number, number + 1)[0]:
            raise Refused(
                "sensitivity.baseline",
                given=f"window {number:,}",
                allowed=f"windows 0 to {windows.count - 1:,} that touch no missing value",
                remedy="give the number of such a window",
            )
        return read(np.array([number]))[0]

    mean, std = np.array(survey.mean), np.array(survey.std)
    record = Record(survey.features, mean, std, section.scaling, some, one)
    return record.narrowed(facts)
