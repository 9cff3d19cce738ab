"""What a report asks of a run's store: one pass for all sums, each question within its share of the memory; one for
the windows that stand out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr

from .. import plots
from ..errors import Refused
from ..plots import bands
from ..plots.terms import TERMS, Terms, terms_of
from ..query import top
from ..query.alignment import aligned, counts_from
from ..query.ask import answers, put
from ..query.conditions import Grouping
from ..query.inputs import time_blocks
from ..query.near_zero import near_zero
from ..query.question import Question
from ..query.roles import JACOBIAN, main_of, scale_of
from ..query.statistics import Statistic
from ..query.sums import CELL
from ..sections import parse_bytes
from ..site_index import SiteIndex

LEVEL = 0.9
MEMORY = "2GB"
MOMENTS = 10
SURE_CELLS = 20_000  # derivatives of a window; of more, resamples take longer than the pass
SITES = (50, 20, 5)  # with the most windows: as many as there is room for
OWN = ("time-lag", "month-lag", "sites")  # questions of one statistic that has their name
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
    """found: datasets in memory, by what was asked. refused: what was not, and why. terms: what its entries are called.
    scaled: whether they are drawn in units of the output.
    """

    found: dict[str, xr.Dataset] = field(default_factory=dict)
    refused: dict[str, Refused] = field(default_factory=dict)
    terms: Terms = TERMS[JACOBIAN]
    scaled: bool = True

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def __getitem__(self, name: str) -> xr.Dataset:
        return self.found[name]

    def for_lack_of_memory(self) -> dict[str, Refused]:
        """What another report with more memory would have, in words."""
        return {IN_WORDS.get(name, name): why for name, why in self.refused.items() if why.key == "memory"}

    @property
    def by_own_step(self) -> bool:
        """Whether lags count back from each output's own step."""
        return "mean-abs" in self and counts_from(self["mean-abs"]) == "output"

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


def _signs(sums: xr.Dataset) -> xr.Dataset:
    """Shares of windows with J > 0 and J < 0 `(output_step, output, lag, feature)`; the others have J = 0."""
    whole = sums["count"].where(sums["count"] > 0)
    shares = {f"share_{name}": sums[name] / whole for name in ("positive", "negative")}
    return xr.Dataset({"count": sums["count"], **shares})


_NEEDS = ("count", "total", "total_abs", "total_squares", "least", "largest", "positive")
pooled = Statistic("pooled", _NEEDS, _pooled)
signs = Statistic("signs", ("count", "positive", "negative"), _signs)


def answers_of(dataset: xr.Dataset, memory: str | int = MEMORY, align: str | None = None) -> Answers:
    """All of them: one pass over the store for sums, one for the windows that stand out. align: as `query.ask` has it.
    Raises `Refused` where lags cannot count from there.
    """
    aligned(dataset, align)
    room = (memory if isinstance(memory, int) else parse_bytes(memory)) // len(IN_WORDS)
    own = terms_of(dataset)
    scaled = scale_of(dataset) is not None
    found, asked = Answers(terms=own, scaled=own.plain or scaled), dict[str, Question]()
    for name, ways in _questions(dataset, room, align):
        try:
            asked[name] = _first(ways)
        except Refused as refusal:
            found.refused[name] = refusal
    computed, outputs = dask.compute(answers(dataset, list(asked.values())), _near_zero(dataset) if own.plain else None)
    if outputs is not None:
        found.found["near-zero"] = outputs
    for name, several in zip(asked, computed, strict=True):
        for statistic, one in several.items():
            found.found[name if name in OWN else statistic] = _dressed(dataset, one)
    if not found.said:
        return found
    moments = top(dataset, MOMENTS, scaled=scaled, align=align)
    if moments.sizes["rank"]:
        found.found |= {"moments": moments, "window": _first_of(moments, dataset, align)}
    return found


def _near_zero(dataset: xr.Dataset) -> xr.Dataset | None:
    if "prediction" not in dataset:
        return None
    every = da.zeros(dataset.sizes["time"], np.int64, chunks=(time_blocks(dataset),))
    return xr.Dataset({"near_zero": near_zero(dataset, every)})


def _first(ways: Sequence[Callable[[], Question]]) -> Question:
    """The first of these questions that is not refused; else the last refusal."""
    for way in ways[:-1]:
        try:
            return way()
        except Refused:
            continue
    return ways[-1]()


def _questions(dataset: xr.Dataset, room: int, align: str | None) -> Iterator[tuple[str, list[Callable[[], Question]]]]:
    """By name, what to ask: first what says most, then what takes less."""

    def asking(*names: str | Statistic, **how: Any) -> Callable[[], Question]:
        return partial(put, dataset, names, memory=room, align=align, **how)

    def picture(kind: str) -> Question:
        by = plots.KINDS[kind].by
        assert by is not None
        how: dict[str, Any] = {"memory": room, "align": align}
        return put(dataset, ["mean-abs"], by=by(dataset, how), **how)

    def by_site(most: int) -> Question:
        return put(dataset, ["mean-abs"], by=_sites(dataset, most), memory=room, align=align)

    whole = ("importance", "mean-abs")
    few = math.prod(dataset[main_of(dataset)].shape[1:]) <= SURE_CELLS
    yield "whole", [*([asking(*whole, ci=LEVEL)] if few else []), asking(*whole)]
    yield "signs", [asking(signs, pooled)]
    yield "spread", [asking(bands.sizes, bands.spread)]
    for kind in ("time-lag", "month-lag"):
        yield kind, [partial(picture, kind)]
    if "site" in dataset.xindexes:
        yield "sites", [partial(by_site, most) for most in SITES]


def _first_of(moments: xr.Dataset, dataset: xr.Dataset, align: str | None) -> xr.Dataset:
    """The first moment, as the picture of a window takes it."""
    first = moments.isel(rank=0)
    part = dataset.sel(site=first["site"].item()) if "site" in dataset.xindexes else dataset
    at = int(np.flatnonzero(part["time"].values == first["time"].values)[0])
    (found,) = dask.compute(plots.wanted(part.isel(time=slice(at, at + 1)), ["window"], align=align)["window"])
    return found.assign_attrs(windows=dataset.sizes["time"])


def _sites(dataset: xr.Dataset, most: int) -> Grouping:
    """Those with the most windows that can be had; all others are in no group."""
    index = dataset.xindexes["site"]
    assert isinstance(index, SiteIndex)
    names, borders = index.parts
    there = dataset["committed"].values & ~dataset["skipped"].values
    counts = np.add.reduceat(there, borders[:-1], dtype=np.int64)
    kept = np.sort(np.argsort(-counts, kind="stable")[:most])
    codes = np.full(len(names), -1, np.int8)
    codes[kept] = np.arange(len(kept))
    along = da.from_array(np.repeat(codes, np.diff(borders)), chunks=(time_blocks(dataset),))
    return Grouping("site", np.asarray(names, object)[kept], along)


def _dressed(dataset: xr.Dataset, found: xr.Dataset) -> xr.Dataset:
    """With the unit that the store gives outputs."""
    named = dataset["prediction"].attrs.get("units") if "prediction" in dataset else None
    return found.assign_attrs({"units": named} if named else {})
