"""Which windows count, and for which group: `by` and `where`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import dask
import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr

from ..errors import Refused
from ..site_index import SiteIndex
from .expressions import Expression
from .histogram import quantile
from .inputs import features_of, newest, time_blocks
from .sums import DIMS, merged, sums_of

SEASONS = ("DJF", "MAM", "JJA", "SON")
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
CALENDAR: dict[str, Callable[[pd.DatetimeIndex], np.ndarray]] = {
    "season": lambda times: np.array(SEASONS, object)[times.month.to_numpy() % 12 // 3],
    "month": lambda times: times.month.to_numpy(),
    "hour": lambda times: times.hour.to_numpy(),
    "weekday": lambda times: np.array(WEEKDAYS, object)[times.day_of_week.to_numpy()],
    "year": lambda times: times.year.to_numpy(),
}
_ORDERED = {"season": SEASONS, "weekday": WEEKDAYS}
# What answers, and the sums they are made of, call something else.
TAKEN = {
    *("time", *DIMS, *chain.from_iterable(DIMS.values()), "leaf", "period", "resample", "which"),
    *("at", "component", "held", "mean", "mean_abs", "rms", "std", "min", "max", "share_positive", "sign_agreement"),
    *("quantile", "error", "input_std", "importance", "share", "effective_memory", "nu", "constant", "bound"),
    *("eigenvalue", "gap", "eigenvector", "activity", "periods", "near_zero", "block", "leaves", "resamples"),
}
EXACT = 1 << 24  # values whose quantiles are told from all of them; of more, from a histogram


@dataclass(frozen=True)
class Grouping:
    """labels: `(group)`. codes: int64 `(time)`, lazy, in blocks of the Jacobian's; below zero: in no group."""

    name: str
    labels: np.ndarray
    codes: da.Array


By = str | Grouping | Sequence[str | Grouping] | Mapping[str, Sequence[float] | int | None] | None


def groupings(dataset: xr.Dataset, by: By) -> list[Grouping]:
    """The groups that `by` asks for.

    A name of `names_of`: each value is a group; "name:4": four quantile bins of its values; "name:0,1.5,3": bins with
    these edges (each bin holds its upper edge). As a mapping: name → None, number of bins, or edges. A `Grouping` is
    taken as it is, its codes being those of the dataset's windows.
    """
    found = [
        replace(one, codes=_in_blocks(dataset, one.codes)) if isinstance(one, Grouping) else _grouping(dataset, *one)
        for one in listed(by)
    ]
    names = [one.name for one in found]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise Refused("by", given=f"{twice[0]} twice", allowed="each name once", remedy="leave one out")
    pairs = zip(found, listed(by), strict=True)
    taken = [one.name for one, asked in pairs if not isinstance(asked, Grouping) and one.name in TAKEN]
    if taken:
        raise Refused(
            "by",
            given=taken[0],
            allowed="names that an answer does not have for something else",
            remedy="rename the column, or ask by another one",
        )
    return found


def listed(by: By) -> list[Any]:
    """What `by` asks for one by one: groupings, and names with their bins."""
    if by is None:
        return []
    if isinstance(by, Mapping):
        return [(name, bins) for name, bins in by.items()]
    several = [by] if isinstance(by, (str, Grouping)) else by
    return [_parsed(one) if isinstance(one, str) else one for one in several]


def _parsed(text: str) -> tuple[str, Any]:
    name, colon, bins = text.rpartition(":")
    if not colon:
        return text, None
    try:
        return name, int(bins) if bins.strip().isdecimal() else [float(edge) for edge in bins.split(",")]
    except ValueError:
        return text, None


def _grouping(dataset: xr.Dataset, name: str, bins: Any) -> Grouping:
    if bins is not None:
        return _binned(dataset, name, bins)
    if name == "site" and name in dataset.coords and name not in dataset.xindexes:
        dataset = dataset.set_xindex(name, SiteIndex)  # of sites that were chosen, in the order they were
    if isinstance(index := dataset.xindexes.get(name), SiteIndex):
        return Grouping(name, np.array(index.names, object), _in_blocks(dataset, index.codes))
    if name not in _known(dataset):
        if name in names_of(dataset):
            raise Refused(
                "by", given=name, allowed="bins of its values", remedy=f"write {name}:4 for quarters, or {name}:0,1,2"
            )
        values_of(dataset, name)
    values = _known(dataset)[name](dataset)
    if name in _ORDERED:
        labels = np.array([label for label in _ORDERED[name] if (values == label).any()], object)
        codes = (values[:, None] == labels).argmax(axis=1) if len(labels) else np.zeros(len(values), np.int64)
    else:
        known = np.isfinite(values) if values.dtype.kind == "f" else np.ones(len(values), bool)
        labels, places = np.unique(values[known], return_inverse=True)
        codes = np.full(len(values), -1)  # what has no value is in no group
        codes[known] = places
    return Grouping(name, labels, _in_blocks(dataset, codes))


def _binned(dataset: xr.Dataset, name: str, bins: int | Sequence[float]) -> Grouping:
    values = values_of(dataset, name)
    if values.dtype.kind not in "iuf":
        raise Refused(
            "by", given=f"{name}, which is not of numbers", allowed="bins of numbers", remedy=f"ask for {name}"
        )
    if isinstance(bins, int):
        if bins < 2:
            raise Refused("by", given=f"{name}:{bins}", allowed="two bins or more", remedy=f"write {name}:4")
        edges = _edges(values, bins)
    else:
        edges = np.array(bins, float)
        if not (len(edges) and np.isfinite(edges).all() and (np.diff(edges) > 0).all()):
            raise Refused("by", given=f"{name}:{bins}", allowed="rising edges", remedy=f"write {name}:0,1.5,3")
    codes = da.map_blocks(_bin, values, edges=edges, dtype=np.int64, meta=np.empty(0, np.int64))
    return Grouping(name, _bin_labels(edges), codes)


def _bin(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    codes = np.searchsorted(edges, values, side="left")
    return np.where(np.isfinite(values), codes, -1)


def _bin_labels(edges: np.ndarray) -> np.ndarray:
    shown = next(
        texts for digits in range(4, 18) if len({*(texts := [f"{edge:.{digits}g}" for edge in edges])}) == len(edges)
    )
    middle = [f"{low} to {high}" for low, high in zip(shown, shown[1:], strict=False)]
    return np.array([f"≤ {shown[0]}", *middle, f"> {shown[-1]}"], object)


def _edges(values: da.Array, bins: int) -> np.ndarray:
    """The inner edges of quantile bins; fewer, where a value is so frequent that it would fill several."""
    at = np.arange(1, bins) / bins
    if values.size <= EXACT:
        known = values.compute().astype(np.float64)
        known = known[np.isfinite(known)]
        edges = np.quantile(known, at, method="inverted_cdf") if len(known) else np.empty(0)
        highest = known.max(initial=-np.inf)
    else:
        needs = ("largest", "histogram", "tops")
        parts = [dask.delayed(_counted)(block, needs) for block in values.to_delayed().ravel()]
        found = dask.delayed(merged)(parts).compute().sums
        edges = quantile(found["histogram"], found["tops"], at, found["largest"].dtype).ravel()
        highest = found["largest"].max()
    edges = np.unique(edges[edges < highest])
    if not len(edges):
        raise Refused(
            "by",
            given=f"{bins} quantile bins of something that has one value, or none",
            allowed="values that differ",
            remedy="give the edges, as in rain:0,1.5,3",
        )
    return edges


def _counted(values: np.ndarray, needs: tuple[str, ...]) -> Any:
    cells = values.reshape(-1, 1, 1, 1, 1).astype(np.float32 if values.dtype == np.float32 else np.float64)
    return sums_of(cells, np.zeros(len(values), np.int64), needs)


def holding(dataset: xr.Dataset, where: str) -> da.Array:
    """Where an expression holds: bool `(time)`, lazy, in blocks of the Jacobian's."""
    expression = Expression(where)
    if not expression.names:
        raise Refused(
            "where", given=where, allowed="a condition on windows", remedy=f"name one of {_listed(names_of(dataset))}"
        )
    named = [values_of(dataset, name, "where") for name in expression.names]
    try:
        expression(dict(zip(expression.names, map(_sample, named), strict=True)))
    except (TypeError, ValueError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(
            "where",
            given=f"{where} ({error})",
            allowed="numbers compared with numbers, texts with 'texts', time with 'YYYY-MM-DD'",
            remedy="mend the comparison",
        ) from error

    def held(*blocks: np.ndarray) -> np.ndarray:
        return expression(dict(zip(expression.names, blocks, strict=True)))

    return da.map_blocks(held, *named, dtype=bool, meta=np.empty(0, bool))


def _sample(values: da.Array) -> np.ndarray:
    """Something of their kind."""
    return np.array([""], object) if values.dtype == object else np.ones(1, values.dtype)


def values_of(dataset: xr.Dataset, name: str, key: str = "by") -> da.Array:
    """What windows have by that name: `(time)`, lazy, in blocks of the Jacobian's. Raises `Refused` for other names."""
    known = _known(dataset)
    if name in known:
        return _in_blocks(dataset, known[name](dataset))
    if name == "prediction" and name in dataset:
        return _prediction(dataset, key)
    if name in features_of(dataset):
        return newest(dataset, name)
    raise Refused(
        key,
        given=name,
        allowed=_listed(names_of(dataset)),
        remedy="name one of these; columns of your own are added with `columns`",
    )


def names_of(dataset: xr.Dataset) -> list[str]:
    """All that conditions can be about: the calendar, coordinates along time, prediction, features of the series."""
    prediction = ["prediction"] if "prediction" in dataset else []
    return list(dict.fromkeys([*_known(dataset), *prediction, *features_of(dataset)]))


def _known(dataset: xr.Dataset) -> dict[str, Callable[[xr.Dataset], np.ndarray]]:
    """What is in memory: functions that give it, by name."""
    found: dict[str, Callable[[xr.Dataset], np.ndarray]] = {}
    if dataset["time"].dtype.kind == "M":
        found |= {name: _part_of_calendar(part) for name, part in CALENDAR.items()}
    hidden = ("committed", "skipped", "window")
    along = [str(name) for name, values in dataset.coords.items() if values.dims == ("time",) and name not in hidden]
    return found | {name: lambda dataset, name=name: _plain(dataset[name].values) for name in along}


def _part_of_calendar(part: Callable[[pd.DatetimeIndex], np.ndarray]) -> Callable[[xr.Dataset], np.ndarray]:
    return lambda dataset: part(pd.DatetimeIndex(dataset["time"].values))


def _plain(values: np.ndarray) -> np.ndarray:
    return values.astype(object) if values.dtype.kind == "T" else values


def _prediction(dataset: xr.Dataset, key: str) -> da.Array:
    prediction = dataset["prediction"]
    if prediction.size != prediction.sizes["time"]:
        raise Refused(
            key,
            given=f"prediction, of which a window has {prediction.size // max(1, prediction.sizes['time'])}",
            allowed="one prediction a window",
            remedy="choose one output and one output step",
        )
    return _in_blocks(dataset, prediction.data.reshape(-1))


def _in_blocks(dataset: xr.Dataset, values: Any) -> da.Array:
    chunks = time_blocks(dataset)
    if isinstance(values, da.Array):
        return values.rechunk((chunks,), method="tasks")
    return da.from_array(values, chunks=(chunks,))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:30]) + (", …" if len(names) > 30 else "")
