"""What a report asks of a run's store: many questions, one pass, each within its share of the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr

from .. import plots
from ..errors import Refused
from ..job import parse_bytes
from ..plots import bands
from ..query import ask
from ..query.conditions import Grouping
from ..query.inputs import time_blocks
from ..query.statistics import Statistic
from ..query.sums import CELL
from ..query.tasks import shared_blocks
from ..query.top import later
from ..site_index import SiteIndex

LEVEL = 0.9
MEMORY = "2GB"
MOMENTS = 10
SURE_CELLS = 20_000  # derivatives of a window; of more, resamples take longer than the pass
SITES = (50, 20, 5)  # with the most windows: as many as there is room for
QUESTIONS = 7
IN_WORDS = {
    "whole": "importance and profiles",
    "signs": "signs and extremes",
    "spread": "quantiles and their pictures",
    "time-lag": "the picture over time",
    "month-lag": "the picture through the year",
    "sites": "the table by site",
}


@dataclass
class Answers:
    """found: datasets in memory, by what was asked. refused: what was not, and why."""

    found: dict[str, xr.Dataset] = field(default_factory=dict)
    refused: dict[str, Refused] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def __getitem__(self, name: str) -> xr.Dataset:
        return self.found[name]

    def for_lack_of_memory(self) -> dict[str, Refused]:
        """What another report with more memory would have, in words."""
        return {IN_WORDS.get(name, name): why for name, why in self.refused.items() if why.key == "memory"}

    @property
    def said(self) -> bool:
        """Whether there is any derivative to speak of."""
        return "mean-abs" in self and bool(self["mean-abs"]["mean_abs"].notnull().any())


def _pooled(sums: xr.Dataset) -> xr.Dataset:
    """J of all windows, targets and lags of a feature together `(feature)`."""
    over = [dim for dim in CELL if dim != "feature"]
    count = sums["count"].sum(over)
    whole = count.where(count > 0)
    mean = sums["total"].sum(over) / whole
    variance = sums["total_squares"].sum(over) / whole - np.square(mean)
    return xr.Dataset(
        {
            "count": count,
            "mean": mean,
            "mean_abs": sums["total_abs"].sum(over) / whole,
            "std": np.sqrt(variance.clip(min=0)),
            "min": sums["least"].where(sums["count"] > 0).min(over),
            "max": sums["largest"].where(sums["count"] > 0).max(over),
            "share_positive": sums["positive"].sum(over) / whole,
        }
    )


_NEEDS = ("count", "total", "total_abs", "total_squares", "least", "largest", "positive")
pooled = Statistic("pooled", _NEEDS, _pooled)


def answers_of(dataset: xr.Dataset, memory: str | int = MEMORY) -> Answers:
    """All of them, in one pass over the store, and a second look at the few windows that stand out."""
    room = (memory if isinstance(memory, int) else parse_bytes(memory)) // QUESTIONS
    answers, wanted = Answers(), {}
    with shared_blocks():
        for name, question in _questions(dataset, room).items():
            try:
                wanted[name] = question()
            except Refused as refusal:
                answers.refused[name] = refusal
        moments, described = later(dataset, MOMENTS, scaled="input_std" in dataset.coords)
    computed, picked = dask.compute(wanted, moments)
    for found in computed.values():
        answers.found |= {name: _dressed(dataset, one) for name, one in found.items()}
    return _with_moments(answers, described(picked))


def _with_moments(answers: Answers, found: xr.Dataset) -> Answers:
    if found.sizes["rank"]:
        answers.found["moments"] = found
    return answers


def _questions(dataset: xr.Dataset, room: int) -> dict[str, Callable[[], dict[str, xr.Dataset]]]:
    whole = ("importance", "mean-abs", "effective-memory")
    own = {name: partial(_picture, dataset, name, room) for name in ("time-lag", "month-lag", "window")}
    found: dict[str, Callable[[], dict[str, xr.Dataset]]] = {
        "whole": partial(_sure, dataset, whole, room),
        "signs": partial(ask, dataset, ["share-positive", pooled], memory=room),
        "spread": partial(ask, dataset, [bands.sizes, bands.spread], memory=room),
        **own,
    }
    return found | ({"sites": partial(_by_site, dataset, room)} if "site" in dataset.xindexes else {})


def _sure(dataset: xr.Dataset, names: Sequence[str], room: int) -> dict[str, xr.Dataset]:
    """With intervals where these are to be had."""
    if int(np.prod([dataset.sizes[dim] for dim in CELL])) <= SURE_CELLS:
        try:
            return ask(dataset, list(names), ci=LEVEL, memory=room)
        except Refused:
            pass
    return ask(dataset, list(names), memory=room)


def _picture(dataset: xr.Dataset, kind: str, room: int) -> dict[str, xr.Dataset]:
    asking: dict[str, Any] = {} if kind == "window" else {"memory": room}
    return plots.wanted(dataset, [kind], **asking)


def _by_site(dataset: xr.Dataset, room: int) -> dict[str, xr.Dataset]:
    for most in SITES[:-1]:
        try:
            return {"sites": ask(dataset, ["mean-abs"], by=_sites(dataset, most), memory=room)["mean-abs"]}
        except Refused:
            continue
    return {"sites": ask(dataset, ["mean-abs"], by=_sites(dataset, SITES[-1]), memory=room)["mean-abs"]}


def _sites(dataset: xr.Dataset, most: int) -> Grouping:
    """Those with the most windows that can be had; all others are in no group."""
    index = dataset.xindexes["site"]
    assert isinstance(index, SiteIndex)
    names, borders = index.parts
    whole = np.concatenate([[0], np.cumsum((dataset["committed"] & ~dataset["skipped"]).values)])
    counts = whole[borders[1:]] - whole[borders[:-1]]
    kept = np.sort(np.argsort(-counts, kind="stable")[:most])
    codes = np.full(len(names), -1)
    codes[kept] = np.arange(len(kept))
    along = da.from_array(np.repeat(codes, np.diff(borders)), chunks=(time_blocks(dataset),))
    return Grouping("site", np.asarray(names, object)[kept], along)


def _dressed(dataset: xr.Dataset, found: xr.Dataset) -> xr.Dataset:
    """With the unit that the store gives outputs."""
    named = dataset["prediction"].attrs.get("units") if "prediction" in dataset else None
    return found.assign_attrs({"units": named} if named else {})
