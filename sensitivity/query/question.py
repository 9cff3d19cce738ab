"""A question to a store, put together: what is read, for which groups, and what is made of the sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr

from .alignment import Alignment
from .conditions import By, Grouping, groupings, holding
from .intervals import FACTS, LEAF, LEAVES, Span, Sure, answered, leaves, overlap, shaped
from .passes import Pass, as_dataset, canonical, combined, labels_of, sums_together
from .roles import Roles, roles_of
from .statistics import Statistic
from .sums import INPUTS, PRODUCTS, Part

COPIES = 2  # of what leaves hold, while it is resampled


@dataclass(frozen=True)
class Question:
    """Statistics of a dataset's windows, by groups. The dataset is `canonical`; codes are those of `combined`; overlap:
    leaves that a window spans; alignment: where entries stand by the lags of answers, None: as in the dataset.
    """

    dataset: xr.Dataset
    statistics: tuple[Statistic, ...]
    groupings: tuple[Grouping, ...]
    codes: da.Array
    sure: Sure | None = None
    overlap: int = 1
    alignment: Alignment | None = None

    @property
    def reading(self) -> Pass:
        groups = int(np.prod([len(grouping.labels) for grouping in self.groupings]))
        needs = tuple(dict.fromkeys((*self._guards, *(need for one in self.statistics for need in one.needs))))
        moved = 0.0 if self.alignment is None else self.alignment.growth
        moved += moved**2 if {*PRODUCTS} & {*needs} else 0.0  # along both lags, one after the other
        return Pass(self.dataset, self.codes, groups, needs, moved)

    @property
    def _guards(self) -> tuple[str, ...]:
        """Sums that tell whether what is left out is zero."""
        return ("total_abs",) if self.alignment is not None and self.alignment.leaves_out else ()

    @property
    def answers(self) -> Answers:
        labels = labels_of(self.dataset, self.groupings).assign_attrs(overlap=self.overlap)
        return Answers(self.statistics, labels, self.sure, self.alignment, roles_of(self.dataset))

    @property
    def roles(self) -> dict[str, Any]:
        """What its answers have to know to get the dims of the store back."""
        if "roles" not in self.dataset.attrs:
            return {}
        roles = self.dataset.attrs["roles"]
        return {"roles": roles if self.alignment is None else self.alignment.roles(roles)}

    @property
    def shapes(self) -> list[xr.Dataset]:
        """Of the answers: what those of no windows look like."""
        apart = tuple(grouping for grouping in self.groupings if grouping.name != LEAF)
        empty = replace(self.answers, labels=labels_of(self.dataset, apart), sure=None)(self.reading.nothing())
        if self.sure is None:
            return empty
        return [shaped(one, shape, self.sure) for one, shape in zip(self.statistics, empty, strict=True)]


@dataclass(frozen=True)
class Answers:
    """Statistics made of the sums of all windows, one dataset each, in memory."""

    statistics: tuple[Statistic, ...]
    labels: xr.Dataset
    sure: Sure | None
    alignment: Alignment | None
    roles: Roles

    def __call__(self, parts: Sequence[Part]) -> list[xr.Dataset]:
        sums = self.sums(parts)
        if self.sure is None:
            return [self.blanked(one.finish(sums)) for one in self.statistics]
        return [self.blanked(answered(one, sums[list(one.needs)], self.sure)) for one in self.statistics]

    def sums(self, parts: Sequence[Part]) -> xr.Dataset:
        """By the lags of the answers."""
        found = as_dataset(parts, self.labels)
        return found if self.alignment is None else self.alignment.of_sums(found, self.roles)

    def blanked(self, answer: xr.Dataset) -> xr.Dataset:
        """With NaN for entries that do not exist."""
        return answer if self.alignment is None else self.alignment.blanked(answer)


def question(
    dataset: xr.Dataset,
    chosen: tuple[Statistic, ...],
    by: By = None,
    where: str | None = None,
    sure: Sure | None = None,
    memory: float = math.inf,
    finest: int = LEAVES[0],
    span: Span | None = None,
    alignment: Alignment | None = None,
) -> Question:
    """The question, with the finest leaves that there is room for, `finest` at most, over a `span` of time.

    Raises `Refused` where there is room for none.
    """
    inputs = any({*INPUTS} & {*one.needs} for one in chosen)
    roles = roles_of(dataset)
    for one in chosen:
        roles.require(one.name, one.only)
    whole = canonical(dataset, inputs=inputs)
    groups = tuple(groupings(whole, by))
    holds = None if where is None else holding(whole, where)
    like = whole["jacobian"].data
    if sure is None:
        found = Question(whole, chosen, groups, combined(groups, holds, like), alignment=alignment)
        found.reading.require_room(memory)
        return found
    for count in (count for count in LEAVES if count <= finest):
        leaf = leaves(whole, count, span)
        apart = (*groups, leaf)
        found = Question(whole, chosen, apart, combined(apart, holds, like), sure, overlap(whole, leaf), alignment)
        if COPIES * found.reading.held_bytes(count) <= memory:
            return found
    found.reading.require_room(memory / COPIES, count)
    return found


def answered_together(asked: Sequence[Question]) -> list[list[xr.Dataset]]:
    """The answers to several questions, one dataset a statistic: lazy, and blocks that several need are read once."""
    sums = sums_together([one.reading for one in asked])
    return [lazily(one.answers, [parts], one.shapes) for one, parts in zip(asked, sums, strict=True)]


def lazily(
    answers: Callable[..., list[xr.Dataset]], parts: Sequence[list[Any]], shapes: Sequence[xr.Dataset]
) -> list[xr.Dataset]:
    """What `answers(*parts)` will give, for delayed parts: lazy, shaped like `shapes`."""
    found = dask.delayed(answers, pure=False)(*parts)
    return [_shaped(shape, found[i]) for i, shape in enumerate(shapes)]


def _shaped(shape: xr.Dataset, answer: Any) -> xr.Dataset:
    later: dict[Any, Any] = {}
    for name in (*shape.data_vars, *(name for name in FACTS if name in shape.coords)):
        values = dask.delayed(_values)(answer, name)
        known = shape[name]
        later[name] = (known.dims, da.from_delayed(values, known.shape, known.dtype), known.attrs)
    return shape.assign(later)


def _values(answer: xr.Dataset, name: str) -> np.ndarray:
    return answer[name].values
