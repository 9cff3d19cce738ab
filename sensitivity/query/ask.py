"""Questions to a store: any set of statistics, for any groups of windows, in one pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr

from ..errors import Refused
from ..job import parse_bytes
from . import screening, statistics, subspace
from .conditions import By, Grouping, groupings, holding
from .intervals import FACTS, LEAF, LEAVES, Sure, answered, leaves, shaped
from .passes import Pass, as_dataset, canonical, combined, labels_of
from .selection import select
from .statistics import Statistic
from .sums import INPUTS, Part

FACTORIES: dict[str, Callable[..., Statistic]] = {
    "importance": statistics.importance,
    "lag-profile": statistics.lag_profile,
    "mean": statistics.mean,
    "mean-abs": statistics.mean_abs,
    "rms": statistics.rms,
    "std": statistics.std,
    "min": statistics.minimum,
    "max": statistics.maximum,
    "share-positive": statistics.share_positive,
    "summary": statistics.summary,
    "quantiles": statistics.quantiles,
    "effective-memory": statistics.effective_memory,
    "gradient-input": statistics.gradient_input,
    "elasticity": statistics.elasticity,
    "dgsm": screening.dgsm,
    "active-subspace": subspace.active_subspace,
}
MEMORY = "1GB"


def statistic(name: str, **options: Any) -> Statistic:
    """A statistic by its name, with its options. Raises `Refused` for another name."""
    made = FACTORIES.get(name.replace("_", "-"))
    if made is None:
        raise Refused("statistic", given=name, allowed=", ".join(FACTORIES), remedy="ask for one of these")
    return made(**options)


@dataclass(frozen=True)
class Question:
    """Statistics of a dataset's windows, by groups. The dataset is `canonical`; codes are those of `combined`."""

    dataset: xr.Dataset
    statistics: tuple[Statistic, ...]
    groupings: tuple[Grouping, ...]
    codes: da.Array
    sure: Sure | None = None

    @property
    def reading(self) -> Pass:
        groups = int(np.prod([len(grouping.labels) for grouping in self.groupings]))
        needs = tuple(dict.fromkeys(need for one in self.statistics for need in one.needs))
        return Pass(self.dataset, self.codes, groups, needs)

    @property
    def answers(self) -> Answers:
        return Answers(self.statistics, labels_of(self.dataset, self.groupings), self.sure)

    @property
    def shapes(self) -> list[xr.Dataset]:
        """Of the answers: what those of no windows look like."""
        apart = tuple(grouping for grouping in self.groupings if grouping.name != LEAF)
        empty = Answers(self.statistics, labels_of(self.dataset, apart))(self.reading.nothing())
        if self.sure is None:
            return empty
        return [shaped(one, shape, self.sure) for one, shape in zip(self.statistics, empty, strict=True)]


@dataclass(frozen=True)
class Answers:
    """Statistics made of the sums of all windows, one dataset each, in memory."""

    statistics: tuple[Statistic, ...]
    labels: xr.Dataset
    sure: Sure | None = None

    def __call__(self, parts: Sequence[Part]) -> list[xr.Dataset]:
        sums = as_dataset(parts, self.labels)
        if self.sure is None:
            return [one.finish(sums) for one in self.statistics]
        return [answered(one, sums[list(one.needs)], self.sure) for one in self.statistics]


def ask(
    dataset: xr.Dataset,
    names: Sequence[str | Statistic],
    *,
    by: By = None,
    where: str | None = None,
    lags: Any = None,
    features: Any = None,
    outputs: Any = None,
    output_steps: Any = None,
    ci: float | None = None,
    seed: int = 0,
    memory: str | int = MEMORY,
) -> dict[str, xr.Dataset]:
    """Any set of statistics of a run's dataset in one pass over its store: lazy datasets by the statistics' names.

    dataset: what `open_run` returned, or a selection of it. names: of `FACTORIES`, or `Statistic`s.
    by: groups of windows, a dimension each: "season", "month", "hour", "weekday", "year", "site", any coordinate along
        time; "rain:4", "prediction:3": quantile bins of an input at the window's last step, of the prediction, or of a
        numeric coordinate; "rain:0,1.5": bins with these edges.
    where: only windows for which this holds, such as "rain > 0.5 and month in (6, 7, 8)".
    lags: "0:24" (both included), or a list; features, outputs, output_steps: lists of labels.
    ci: level of confidence intervals, such as 0.9: `NAME_low` and `NAME_high` beside every variable but counts and
        extremes, by a block bootstrap that respects serial dependence, drawn from `seed`.
    memory: what sums may take, in bytes or as "2GB". Raises `Refused` where they would take more.

    Each dataset has `count`: how many windows its values are from, which are those that are committed, whole, and
    chosen. The attribute `windows` says how many the dataset has, `committed` how many of these are committed.
    """
    chosen = tuple(statistic(name) if isinstance(name, str) else name for name in names)
    room = memory if isinstance(memory, int) else parse_bytes(memory)
    part = select(dataset, lags, features, outputs, output_steps)
    asked = question(part, chosen, by, where, None if ci is None else Sure(ci, seed), room)
    found = _lazy(asked, asked.reading.sums())
    return {one.name: answer.assign_attrs(_facts(dataset)) for one, answer in zip(chosen, found, strict=True)}


def question(
    dataset: xr.Dataset, chosen: tuple[Statistic, ...], by: By, where: str | None, sure: Sure | None, memory: int
) -> Question:
    """The question, with the finest leaves that there is room for. Raises `Refused` where there is room for none."""
    inputs = any({*INPUTS} & {*one.needs} for one in chosen)
    whole = canonical(dataset, inputs=inputs)
    groups = tuple(groupings(whole, by))
    holds = None if where is None else holding(whole, where)
    like = whole["jacobian"].data
    if sure is None:
        found = Question(whole, chosen, groups, combined(groups, holds, like))
        found.reading.require_room(memory)
        return found
    for count in LEAVES:
        apart = (*groups, leaves(whole, count))
        found = Question(whole, chosen, apart, combined(apart, holds, like), sure)
        if found.reading.held_bytes(count) <= memory:
            return found
    found.reading.require_room(memory, count)
    return found


def _facts(dataset: xr.Dataset) -> dict[str, Any]:
    committed = dataset["committed"] if "committed" in dataset.coords else dataset["time"].notnull()
    facts = {"windows": dataset.sizes["time"], "committed": int(committed.sum())}
    return facts | ({"run": dataset.attrs["run"]} if "run" in dataset.attrs else {})


def _lazy(asked: Question, parts: Sequence[Any]) -> list[xr.Dataset]:
    """The answers that there will be, shaped like those of no windows."""
    answers = dask.delayed(asked.answers, pure=False)(list(parts))
    return [_shaped(shape, answers[i]) for i, shape in enumerate(asked.shapes)]


def _shaped(shape: xr.Dataset, answer: Any) -> xr.Dataset:
    later: dict[Any, Any] = {}
    for name in (*shape.data_vars, *(name for name in FACTS if name in shape.coords)):
        values = dask.delayed(_values)(answer, name)
        known = shape[name]
        later[name] = (known.dims, da.from_delayed(values, known.shape, known.dtype), known.attrs)
    return shape.assign(later)


def _values(answer: xr.Dataset, name: str) -> np.ndarray:
    return answer[name].values


def asking(name: str) -> Callable[..., xr.Dataset]:
    """The function that asks for one statistic by itself."""
    factory = FACTORIES[name]
    own = set(inspect.signature(factory).parameters)

    def asked(dataset: xr.Dataset, **options: Any) -> xr.Dataset:
        made = factory(**{key: options.pop(key) for key in own & {*options}})
        return ask(dataset, [made], **options)[name]

    asked.__name__ = asked.__qualname__ = factory.__name__
    asked.__doc__ = (
        f"{factory.__doc__}\n\n    Lazy. Further arguments (by, where, lags, features, …) are those of `ask`.\n    "
    )
    return asked
