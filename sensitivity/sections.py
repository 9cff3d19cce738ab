"""The sections of a job file that say what there is: the model, the series, its windows, and how to run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, model_validator

from .errors import Refused

Auto = Literal["auto"]
Positive = Annotated[int, Field(ge=1, lt=1 << 63)]
Address = Annotated[str, Field(pattern="^[^\0]+$")]
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B\s*", re.IGNORECASE)


def _plain(given: Any) -> Any:
    """NumPy's numbers and arrays as Python's."""
    return given.tolist() if hasattr(given, "tolist") else given


def _listed(given: Any) -> Any:
    """A list, or one number, as what a frozen section can hold."""
    given = _plain(given)
    if isinstance(given, int):
        return (given,)
    return tuple(map(_plain, given)) if isinstance(given, (list, tuple, range)) else given


def _named(given: Any) -> Any:
    return (given,) if isinstance(given, str) else _listed(given)


Number, Listed, Named = map(BeforeValidator, (_plain, _listed, _named))


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelSection(Section):
    """`path`: a `.keras` file, a SavedModel's directory, or `package.module:function` returning a keras.Model.

    inputs: of each of several inputs, its columns of the series; None: the model has one, which takes all of them.
    """

    path: Address
    inputs: Annotated[dict[str, Annotated[list[str], Field(min_length=1)]], Field(min_length=1)] | None = None

    @property
    def columns(self) -> list[str]:
        """Of all inputs, one after another."""
        return [name for names in (self.inputs or {}).values() for name in names]

    @property
    def is_function(self) -> bool:
        return bool(_FUNCTION.fullmatch(self.path))

    @property
    def is_directory(self) -> bool:
        """Whether it is a SavedModel's."""
        return not (self.is_function or self.path.endswith(".keras"))


class Scaling(Section):
    """Subtracted and divided before the model sees a step, in the order of `features`."""

    mean: Annotated[list[FiniteFloat], Field(min_length=1)]
    std: Annotated[list[Annotated[FiniteFloat, Field(gt=0)]], Field(min_length=1)]

    def require(self, count: int, key: str = "scaling", what: str = "feature") -> None:
        """Refuse a scaling that does not have one mean and one std per feature, or label."""
        if len(self.mean) != count:
            raise Refused(
                f"series.{key}",
                given=f"{len(self.mean)} values for {count} {what}s",
                allowed=f"one mean and one std per {what}",
                remedy=f"give them in the order of series.{what}s",
            )


class SeriesSection(Section):
    """site: the column or dimension that tells the sites of a panel apart; None: one called `site`, if there is one;
    False: none. labels, weights: columns of what a loss compares outputs with, and of how much each counts; labels are
    scaled by `label_scaling`.
    """

    path: Address
    time: str | None = None
    site: str | Literal[False] | None = None
    features: Annotated[list[str], Field(min_length=1)] | None = None
    scaling: Scaling | None = None
    labels: Annotated[tuple[str, ...], Named, Field(min_length=1)] | None = None
    label_scaling: Scaling | None = None
    weights: Annotated[str, Field(min_length=1)] | None = None

    @property
    def beside(self) -> tuple[str, ...]:
        """Columns that are read beside the features."""
        names = (*(self.labels or ()), *([self.weights] if self.weights else ()))
        return tuple(dict.fromkeys(name for name in names if name not in (self.features or ())))

    def scaled(self, features: Iterable[str]) -> Iterator[tuple[str, float, float]]:
        """Of features, labels and weights the column, what is subtracted from it, and what it is divided by then."""
        beside = [self.weights] if self.weights else []
        for names, scaling in ((features, self.scaling), (self.labels or (), self.label_scaling), (beside, None)):
            for i, name in enumerate(names):
                yield name, *((scaling.mean[i], scaling.std[i]) if scaling else (0.0, 1.0))

    @model_validator(mode="after")
    def _labels_complete(self) -> SeriesSection:
        names = self.labels or ()
        if len(set(names)) < len(names):
            raise Refused("series.labels", given=", ".join(names), allowed="each once", remedy="take the repeated out")
        for key in ("weights", "label_scaling"):
            if getattr(self, key) is not None and not names:
                raise Refused(
                    f"series.{key}",
                    given=f"{getattr(self, key)}, without labels",
                    allowed="with series.labels",
                    remedy="name the columns of the labels, or leave it out",
                )
        if self.label_scaling:
            self.label_scaling.require(len(names), "label_scaling", "label")
        return self

    @model_validator(mode="after")
    def _scalings_complete(self) -> SeriesSection:
        for key, what in (("scaling", "feature"), ("label_scaling", "label")):
            scaling: Scaling | None = getattr(self, key)
            if scaling and len(scaling.mean) != len(scaling.std):
                raise Refused(
                    f"series.{key}",
                    given=f"{len(scaling.mean)} values of mean, {len(scaling.std)} of std",
                    allowed=f"one mean and one std per {what}",
                    remedy=f"add what is missing, in the order of series.{what}s",
                )
        return self

    @model_validator(mode="after")
    def _features_named_once(self) -> SeriesSection:
        names = self.features or []
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise Refused(
                "series.features",
                given=f"{', '.join(twice)} more than once",
                allowed="each column once",
                remedy="take the repeated names out",
            )
        for key, name in (("time", self.time), ("site", self.site)):
            taken = {"features": names, "labels": self.labels or (), "weights": (self.weights,)}
            if among := next((part for part, columns in taken.items() if name and name in columns), None):
                raise Refused(
                    f"series.{among}",
                    given=f"the {key} column {name!r} among them",
                    allowed="numeric columns that the model, or a loss, takes",
                    remedy=f"leave the {key} column out of {among}",
                )
        if names and self.scaling:
            self.scaling.require(len(names))
        return self


class WindowsSection(Section):
    length: Positive | None = None
    stride: Positive = 1


class RunSection(Section):
    path: Address
    workers: Positive | Auto = "auto"
    cpus_per_worker: Positive = 1
    gpus_per_worker: Annotated[FiniteFloat, Field(ge=0)] | Auto = "auto"
    memory_per_worker: str = "auto"
    shard_windows: Positive | Auto = "auto"
    dtype: Literal["float32", "float64"] = "float32"

    @model_validator(mode="after")
    def _possible(self) -> RunSection:
        gpus = self.gpus_per_worker
        if gpus != "auto" and gpus > 1 and gpus != int(gpus):
            raise Refused(
                "run.gpus_per_worker",
                given=gpus,
                allowed="a whole number, or a fraction below 1",
                remedy="round it, or give a fraction below 1 to share a GPU",
            )
        if self.memory_per_worker != "auto":
            parse_bytes(self.memory_per_worker, key="run.memory_per_worker")
        return self

    @property
    def memory_bytes(self) -> int | None:
        """`memory_per_worker` in bytes, or None for auto."""
        if self.memory_per_worker == "auto":
            return None
        return parse_bytes(self.memory_per_worker, key="run.memory_per_worker")


def parse_bytes(text: str, *, key: str = "memory") -> int:
    """`"4GB"` → 4_000_000_000, `"512MiB"` → 536_870_912. Refuses anything else in the name of `key`."""
    match = _SIZE.fullmatch(text)
    size = 0.0
    if match:
        number, prefix, binary = match.groups()
        size = float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " ")
    if not 1 <= size < math.inf:
        raise Refused(
            key,
            given=f"{text!r}",
            allowed='a size with its unit, such as "4GB" or "512MiB"',
            remedy="write a positive number followed by B, kB, MB, GB, TB, or KiB, MiB, GiB, TiB",
        )
    return int(size)
