"""The windows with the largest derivatives, no two of them of the same event."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import dask
import numpy as np
import pandas as pd
import xarray as xr

from ..errors import Refused, suggested
from ..site_index import SiteIndex
from .alignment import Alignment, aligned
from .naming import Words, named
from .picking import Candidates, Rule, merged, picked, thinned
from .roles import as_jacobian, in_words, main_of, roles_of, scale_of
from .sums import CELL

SCORES = ("max", "sum")
TILE_BYTES = 1 << 20  # of float64: stays in a processor's cache
MERGED = 8  # parts at a time


def top(
    dataset: xr.Dataset,
    count: int = 10,
    *,
    by: str = "max",
    separation: int | str | timedelta | np.timedelta64 | None = None,
    features: str | Sequence[str] | None = None,
    lags: int | str | Sequence[int] | None = None,
    outputs: str | Sequence[str] | None = None,
    output_steps: int | str | Sequence[int] | None = None,
    scaled: bool = False,
    align: str | None = None,
) -> xr.Dataset:
    """The `count` windows with the highest score, at least a separation apart: the highest, then the highest among
    those far enough from it, and so on; of equal scores the window that stands first in the dataset.

    Not lazy: how many there are depends on the data. It reads the selected part of `jacobian` once, block by block,
    then the picked windows again, and returns them in memory. Between blocks it keeps the windows that may still be
    picked, those of at most 3 × count stretches one separation long.

    by: a window's score is the largest |J| of its selection ("max") or the sum of them all ("sum"). A window with a
        value in the selection that is not finite (not committed, skipped) is never picked.
    separation: of two picks of a site, in windows (int), or in time ("3D", a timedelta) where times are dates. None: as
        many windows as there are lags. 0 or 1: any two windows.
    features, lags, outputs, output_steps: only these, as for `select`. None: all.
    scaled: each |J| × its feature's `input_std`, comparable between features; scores are then in units of the output,
        else of the output per unit of the feature.
    align: what lags count back from, "output" or "window", as for `ask`. Entries that do not exist are NaN, and inputs
        have a dim `output_step` where lags count back from the output's own step.

    Returns, with `rank` 1, 2, … (fewer than count where no more were found):

    - `score` `(rank)`, float64, and `peak` `(rank)`, the J that is largest by size (× `input_std` where scaled) and has
      the labels `at_output_step`, `at_output`, `at_lag`, `at_feature` `(rank)`, or those of the product's own dims
    - `jacobian` `(rank, output_step, output, lag, feature)`, `prediction` `(rank, output_step, output)` and `input`
      `(rank, lag, feature)`, the selection of what the dataset has of them, each in its own dtype and units
    - `time` and, of a panel, `site` `(rank)`: the window's

    Of another product, its variable in place of `jacobian`, and all else that it has along time.

    Raises `Refused` (a ValueError) for what the dataset does not have, and for an impossible count or separation.
    """
    _check(count, by)
    rule, times = _rule(dataset, count, separation)
    chosen, alignment = aligned(dataset, align, lags, features, outputs, output_steps)
    weights = _weights(chosen) if scaled else None
    reads = None if alignment is None else alignment.reads
    picks = picked(_candidates(as_jacobian(chosen), by, scaled, times, rule, reads), rule)
    found = _described(chosen, picks, weights, alignment)
    stored = {main_of(chosen): "{unit}", "prediction": "{output}", "input": "{source_unit}"}
    others = {str(name): "not stated" for name in found.data_vars if name not in ("score", "peak")}
    return named(found, _words(by, chosen, scaled), chosen, others | stored)


def _words(by: str, dataset: xr.Dataset, scaled: bool) -> Words:
    unit, std = ("{scaled}", "{std}") if scaled else ("{unit}", "")
    of = "largest" if by == "max" else "sum of all"
    return {
        "score": (f"{of} |{{letter}}|{std} in the window", unit),
        "peak": (f"{{noun}}{std} with the largest |{{letter}}|{std} in the window", unit),
        **{f"at_{dim}": (f"{in_words(dim)} of the window's largest {{noun}}", "1") for dim in roles_of(dataset).dims},
        "rank": ("rank of the window, 1 for the highest score", "1"),
    }


def _check(count: int, by: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
        raise Refused(
            "count", given=repr(count), allowed="a whole number from 1", remedy="say how many windows to find"
        )
    if by not in SCORES:
        raise Refused(
            "by",
            given=repr(by),
            allowed=", ".join(SCORES),
            remedy=suggested(by, SCORES, "score windows by one of these"),
        )


def _rule(dataset: xr.Dataset, count: int, separation: Any) -> tuple[Rule, np.ndarray | None]:
    """The rule, and the places that it holds for: times as int64 `(time)`, or None where it counts windows."""
    wanted = dataset.sizes.get("lag", dataset.attrs.get("length", 1)) if separation is None else separation
    if isinstance(wanted, str | timedelta | np.timedelta64):
        ticks, times = _ticks(dataset["time"], wanted), dataset["time"].values.view(np.int64)
        return (Rule(int(count), ticks), times) if ticks else (Rule(int(count), 1), None)
    if isinstance(wanted, bool) or not isinstance(wanted, int | np.integer) or wanted < 0:
        raise _refused_separation(wanted)
    return Rule(int(count), max(1, min(int(wanted), dataset.sizes["time"]))), None


def _ticks(time: xr.DataArray, separation: Any) -> int:
    """A separation in time's own unit, rounded up."""
    if time.dtype.kind != "M":
        raise _refused_separation(
            separation, f"a whole number of windows from 0: times here are {time.dtype}, no dates"
        )
    unit = pd.Timedelta(f"1{np.datetime_data(time.dtype)[0]}").as_unit("ns").value
    try:
        if isinstance(separation, str) and separation.strip().isdecimal():
            raise ValueError("a number without a unit")
        wanted = pd.Timedelta(separation).as_unit("ns")
        if not wanted >= pd.Timedelta(0):  # NaT compares as False
            raise ValueError("a separation is not negative")
    except (ValueError, OverflowError) as error:
        raise _refused_separation(separation) from error
    return -(-wanted.value // unit)


def _refused_separation(
    given: Any, allowed: str = 'windows, 0 or more; or a time up to 292 years such as "3D"'
) -> Refused:
    remedy = "say how far apart two events of a site are at least, or leave it out: as many windows as there are lags"
    return Refused("separation", given=repr(given), allowed=allowed, remedy=remedy)


def _weights(dataset: xr.Dataset) -> xr.DataArray:
    """float64 `(feature)`, in units of the features."""
    weights = scale_of(dataset)
    if weights is not None:
        return weights
    if "input_std" in dataset.coords:
        allowed, remedy = f"False: {roles_of(dataset)} is not per unit of a feature", "leave it out"
    else:
        allowed = "False: the dataset has no input_std"
        remedy = "open the run with sensitivity.open_run, or give each feature's standard deviation as input_std"
    raise Refused("scaled", given="True", allowed=allowed, remedy=remedy)


def _candidates(
    dataset: xr.Dataset, by: str, scaled: bool, times: np.ndarray | None, rule: Rule, reads: np.ndarray | None
) -> Candidates:
    """What may be picked of all windows: each block is thinned by itself, then several together, and so on."""
    scores = _scores(dataset, by, dataset["input_std"].values.astype(np.float64) if scaled else None, reads).data
    borders = np.cumsum([0, *scores.chunks[0]]).tolist()
    numbers, edges = _sites(dataset)
    parts = []
    for block, start, stop in zip(scores.to_delayed(), borders, borders[1:], strict=False):
        runs = np.diff(np.clip(edges, start, stop))
        own = None if times is None else times[start:stop]
        parts.append(dask.delayed(_of_block)(block, start, numbers[runs > 0], runs[runs > 0], own, rule))
    while len(parts) > 1:
        parts = [dask.delayed(merged)(parts[i : i + MERGED], rule) for i in range(0, len(parts), MERGED)]
    return dask.compute(parts[0])[0]


def _scores(dataset: xr.Dataset, by: str, weights: np.ndarray | None, reads: np.ndarray | None) -> xr.Variable:
    """Lazy float64 `(time)`, NaN or infinite where a value is: cut along time as `jacobian` is. reads: which entries
    count, bool `(output_step, lag)`; None: all.
    """
    jacobian = dataset["jacobian"].variable.chunk({"output": -1, "lag": -1, "feature": -1}).transpose("time", *CELL)
    count = () if reads is None else (xr.Variable(("output_step", "lag"), reads),)
    by_step = xr.apply_ufunc(
        _reduced,
        jacobian,
        *(one.chunk({"output_step": jacobian.chunksizes["output_step"]}) for one in count),
        input_core_dims=[CELL[1:], *(["lag"] for _ in count)],
        kwargs={"by": by, "weights": weights},
        dask="parallelized",
        output_dtypes=[np.float64],
    )
    # First within steps, then over them: a sum is rounded alike however steps are cut into blocks.
    return xr.apply_ufunc(
        getattr(np, by),
        by_step.chunk({"output_step": -1}),
        input_core_dims=[["output_step"]],
        kwargs={"axis": -1},
        dask="parallelized",
        output_dtypes=[np.float64],
    )


def _reduced(block: np.ndarray, reads: np.ndarray | None = None, *, by: str, weights: np.ndarray | None) -> np.ndarray:
    """`(time, output_step, output, lag, feature)` → float64 `(time, output_step)`, a few windows at a time; of the
    entries that `reads` `(output_step, lag)` names.
    """
    found = np.empty(block.shape[:2])
    windows = max(1, TILE_BYTES // (8 * math.prod(block.shape[1:])))
    for start in range(0, len(block), windows):
        tile = np.abs(block[start : start + windows], dtype=np.float64, order="C")
        if weights is not None:
            with np.errstate(invalid="ignore"):  # an infinite J of a constant feature
                tile *= weights
        if reads is not None:
            tile = np.where(reads[:, None, :, None], tile, 0)
        rows = tile.reshape(*tile.shape[:2], math.prod(tile.shape[2:]))
        found[start : start + windows] = getattr(rows, by)(axis=-1)
    return found


def _sites(dataset: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Runs of windows of one site: its number `(run)` and the runs' borders `(run + 1)`; one run without sites."""
    if not _has_sites(dataset):
        return np.zeros(1, np.int64), np.array([0, dataset.sizes["time"]])
    index = dataset.xindexes.get("site")
    if not isinstance(index, SiteIndex):
        index = SiteIndex.from_variables({"site": dataset["site"].variable}, options={})
    names, borders = index.parts
    known: dict[str, int] = {}
    return np.array([known.setdefault(name, len(known)) for name in names.tolist()], np.int64), borders


def _has_sites(dataset: xr.Dataset) -> bool:
    return "site" in dataset.coords and dataset["site"].dims == ("time",)


def _of_block(
    scores: np.ndarray, start: int, numbers: np.ndarray, runs: np.ndarray, times: np.ndarray | None, rule: Rule
) -> Candidates:
    """What may be picked of a block, `scores` `(time)`, that begins at window `start` with `runs` windows of a site."""
    windows = np.arange(start, start + len(scores))
    every = Candidates(windows, scores, np.repeat(numbers, runs), windows if times is None else times)
    return thinned(every.at(np.flatnonzero(np.isfinite(scores))), rule)


def _described(
    dataset: xr.Dataset, picks: Candidates, weights: xr.DataArray | None, alignment: Alignment | None
) -> xr.Dataset:
    """The picked windows as a dataset along `rank`."""
    roles = roles_of(dataset)
    beside = [] if roles.plain else [str(name) for name, one in dataset.data_vars.items() if "time" in one.dims]
    names = dict.fromkeys(name for name in (main_of(dataset), "prediction", "input", *beside) if name in dataset)
    read = dask.compute(*(_windows(dataset[name].variable, picks.window) for name in names))
    along = [name for name in ("time", "site") if name == "time" or _has_sites(dataset)]
    ranked: dict[str, Any] = {name: ("rank", dataset[name].values[picks.window]) for name in along}
    ranked["rank"] = np.arange(1, len(picks) + 1)
    own = {*CELL, *roles.dims}
    fixed = {str(name): coord for name, coord in dataset.coords.items() if set(coord.dims) < own}
    found = xr.Dataset(dict(zip(names, read, strict=True)), coords=ranked | fixed)
    if not roles.plain:
        found = found.assign_attrs(product=roles.product, dims=" ".join(roles.dims))
    found = found.assign(score=("rank", picks.score))
    return _with_peaks(found if alignment is None else alignment.of_entries(found), weights).load()


def _windows(variable: xr.Variable, windows: np.ndarray) -> xr.Variable:
    """Some windows of a lazy variable, along `rank`: each a slice, so that no more than its own chunk is read."""
    spans = [slice(window, window + 1) for window in windows.tolist()] or [slice(0, 0)]
    found = xr.Variable.concat([variable.isel(time=span) for span in spans], "time")
    return xr.Variable(["rank" if dim == "time" else dim for dim in found.dims], found.data, found.attrs)


def _with_peaks(found: xr.Dataset, weights: xr.DataArray | None) -> xr.Dataset:
    """`peak` and its labels added."""
    jacobian = found[main_of(found)]
    dims = [dim for dim in roles_of(found).dims if dim in jacobian.dims]
    jacobian = jacobian.transpose("rank", *dims)
    sizes = abs(jacobian) if weights is None else abs(jacobian) * weights
    flat = np.nan_to_num(sizes.values.reshape(len(sizes), math.prod(sizes.shape[1:])), nan=-1.0)
    at = dict(zip(dims, np.unravel_index(flat.argmax(axis=1), sizes.shape[1:]), strict=True))
    peak = jacobian.isel({dim: xr.Variable("rank", places) for dim, places in at.items()})
    labels = {f"at_{dim}": ("rank", jacobian[str(dim)].values[places]) for dim, places in at.items()}
    return found.assign(peak=peak.variable).assign_coords(labels)
