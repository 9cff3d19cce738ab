"""What each picture needs of a run, and how it is drawn: needs of several are met in one pass over the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from ..errors import Refused, suggested
from ..query import statistic
from ..query.alignment import aligned, counts_from
from ..query.ask import MEMORY, answers, put, question
from ..query.conditions import By
from ..query.opening import LABEL_BLOCK
from ..query.pairs import by_pairs
from ..query.roles import roles_of
from ..query.statistics import Statistic
from ..query.sums import CELL
from ..sections import parse_bytes
from . import bands, bars, comparison, lags, times, window

INTERVALS = ("ci",)  # what `ask` is told for intervals: only for pictures that draw them
PER_MONTH = 20  # windows; where there are fewer, months are noise and seasons are shown
Grouped = Callable[[xr.Dataset, dict[str, Any]], By]


def _by_month(dataset: xr.Dataset, how: dict[str, Any]) -> By:
    if dataset["time"].dtype.kind != "M":
        raise Refused(
            "kind", given="month-lag of a series whose steps have no dates", allowed="dates", remedy="draw time-lag"
        )
    times = dataset["time"].values
    parts = (times[start : start + LABEL_BLOCK].astype("datetime64[M]") for start in range(0, len(times), LABEL_BLOCK))
    months = {month for part in parts for month in np.unique(part).tolist()}
    return "month" if len(times) >= PER_MONTH * len(months) else "season"


def _by_time(dataset: xr.Dataset, how: dict[str, Any]) -> By:
    """As many bins as a page and half of the memory have room for."""
    selection = {key: how.get(key) for key in ("align", "lags", "features", "outputs", "output_steps")}
    reading = question(aligned(dataset, **selection)[0], (statistic("mean-abs"),)).reading
    memory = how.get("memory", MEMORY)
    room = (memory if isinstance(memory, int) else parse_bytes(memory)) // (2 * reading.held_bytes())
    return times.time_bins(dataset, max(1, min(times.BINS, room)))


@dataclass(frozen=True)
class Kind:
    """A picture: what it is drawn from, and by what.

    statistics: whose variables it draws, of windows grouped `by` what that returns for a dataset. variables: those it
    cannot do without. grouped: the result has one dimension of groups. intervals: drawn where there are some.
    lagged: only of products that have lags, or steps of a layer.
    """

    statistics: tuple[str | Statistic, ...]
    variables: tuple[str, ...]
    draw: Callable[[xr.Dataset, Figure, int | None], None]
    by: Grouped | None = None
    grouped: bool = False
    intervals: bool = False
    lagged: bool = False


KINDS: dict[str, Kind] = {
    "lag-profile": Kind(("mean-abs",), ("mean_abs",), lags.draw_profile, intervals=True, lagged=True),
    "lag-band": Kind(("mean-abs", bands.sizes), ("mean_abs", "size_quantile"), lags.draw_band, lagged=True),
    "heatmap": Kind(("mean-abs",), ("mean_abs",), lags.draw_heatmap, lagged=True),
    "time-lag": Kind(("mean-abs",), ("mean_abs",), times.draw_times, by=_by_time, grouped=True),
    "month-lag": Kind(("mean-abs",), ("mean_abs",), lags.draw_months, by=_by_month, grouped=True),
    "importance": Kind(("importance",), ("importance",), bars.draw_importance, intervals=True),
    "step-lag": Kind(("mean-abs",), ("mean_abs",), lags.draw_steps, lagged=True),
    "window": Kind((), ("jacobian",), window.draw_window),
    "distribution": Kind((bands.spread,), ("pooled_quantile",), bars.draw_distribution),
    "comparison": Kind(("mean-abs", "importance"), ("importance", "influence"), comparison.draw_comparison),
}


def kind_of(name: str) -> Kind:
    if name not in KINDS:
        raise Refused("kind", given=name, allowed=", ".join(KINDS), remedy=suggested(name, KINDS, "name one of these"))
    return KINDS[name]


def wanted(
    dataset: xr.Dataset,
    kinds: Sequence[str],
    *,
    time: Any = None,
    against: xr.Dataset | None = None,
    names: Sequence[str] | None = None,
    **asking: Any,
) -> dict[str, Any]:
    """What these pictures are drawn from, by kind, lazy: `dask.compute` reads each block once for them all.

    dataset: a run's. asking: as `query.ask` has it (where, lags, features, outputs, output_steps, memory, align).
    time: of the last step of the window that "window" shows. against: the dataset that "comparison" sets beside this
    one, and names: what the two are called.
    """
    for name in kinds:
        _require(dataset, name, against)
    groups: dict[Any, list[str]] = {}
    for name in kinds:
        if name not in ("window", "comparison"):
            groups.setdefault((KINDS[name].by, KINDS[name].intervals and _sure(asking)), []).append(name)
    found: dict[str, Any] = {}
    asked = [(members, by, asking if sure else _unsure(asking)) for (by, sure), members in groups.items()]
    for one in _asked(dataset, asked):
        found |= one
    if "window" in kinds:
        own = ("where", "align", "lags", "features", "outputs", "output_steps")
        found["window"] = window.story(dataset, time=time, **{key: asking[key] for key in own if key in asking})
    if "comparison" in kinds:
        both = [_asked(one, [(["comparison"], None, _unsure(asking))])[0]["comparison"] for one in (dataset, against)]
        _require_same_lags(*both)
        found["comparison"] = comparison.side_by_side(both, names)
    return {name: found[name] for name in kinds}


def _require_same_lags(*both: xr.Dataset) -> None:
    first, second = (counts_from(found["mean_abs"]) for found in both)
    if first != second and first and second:
        raise Refused(
            "against",
            given=f"a run whose lags count from the {second}, beside a run whose lags count from the {first}",
            allowed="two runs whose lags count from the same step",
            remedy='draw both with align="window" (on the command line: --align window)',
        )


def possible(dataset: xr.Dataset, kinds: Sequence[str] = tuple(KINDS), **how: Any) -> list[str]:
    """Those of `kinds` that `wanted` would not refuse: no months without dates, no bands beyond the memory, …"""
    return [kind for kind in kinds if not _refused(dataset, kind, how)]


def _refused(dataset: xr.Dataset, kind: str, how: dict[str, Any]) -> bool:
    try:
        wanted(dataset, [kind], **how)
    except Refused:
        return True
    return False


def _require(dataset: xr.Dataset, name: str, against: xr.Dataset | None) -> None:
    kind_of(name)
    if name == "comparison" and against is None:
        raise Refused("against", given="nothing", allowed="a second dataset", remedy="say what to compare with")
    roles = roles_of(dataset)
    if KINDS[name].lagged and not roles.of("lag"):
        allowed = ", ".join(one for one, kind in KINDS.items() if not kind.lagged)
        raise Refused("kind", given=f"{name} of {roles}", allowed=allowed, remedy="draw one of these")
    if name == "comparison" and against is not None and roles_of(against) != roles:
        raise Refused(
            "against", given=f"{roles_of(against)}, beside {roles}", allowed="the same product", remedy="compare like"
        )
    if name == "step-lag" and (not roles.of("output_step") or dataset.sizes.get("output_step", 1) < 2):
        raise Refused(
            "kind", given="step-lag of one output step", allowed="a model with several", remedy="draw lag-profile"
        )


def _sure(asking: dict[str, Any]) -> bool:
    return any(asking.get(key) for key in INTERVALS)


def _unsure(asking: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in asking.items() if key not in INTERVALS}


Asked = tuple[Sequence[str], Grouped | None, dict[str, Any]]


def _asked(dataset: xr.Dataset | None, each: Sequence[Asked]) -> list[dict[str, xr.Dataset]]:
    """Kinds with the same groups are one question; all questions together are one pass."""
    assert dataset is not None
    questions = []
    for members, by, asking in each:
        named = {_name(one): one for member in members for one in KINDS[member].statistics}
        groups = None if by is None else by(dataset, asking)
        questions.append({"names": list(named.values()), "by": groups, **asking})
    found_by = answers(dataset, [put(dataset, **one) for one in questions])
    return [
        {member: _merged(dataset, [found[_name(one)] for one in KINDS[member].statistics]) for member in members}
        for (members, _, _), found in zip(each, found_by, strict=True)
    ]


def _name(one: str | Statistic) -> str:
    return one if isinstance(one, str) else one.name


def _merged(dataset: xr.Dataset, found: list[xr.Dataset]) -> xr.Dataset:
    """Statistics as one dataset, with what the store calls its units and its times."""
    if any("pairs" in one.attrs for one in found):
        found = [by_pairs(one) for one in found]
    first, *others = found  # of two, importance has as a variable what the other has as a label
    parts = [first, *(one.drop_vars("input_std") if "input_std" in one.data_vars else one for one in others)]
    whole = xr.merge(parts, join="exact", compat="override", combine_attrs="override")
    if "time" in whole.coords:
        whole["time"].attrs |= dataset["time"].attrs
    named = dataset["prediction"].attrs.get("units") if "prediction" in dataset else None
    return whole.assign_attrs({"units": named} if named else {})


def require_drawable(found: xr.Dataset, name: str) -> None:
    """Refuse what is no such picture's data: variables that lack, or groups that it has no place for."""
    kind = kind_of(name)
    lacking = [variable for variable in kind.variables if variable not in found]
    if lacking:
        raise Refused(
            "kind",
            given=f"{name} of a result without {', '.join(lacking)}",
            allowed=_drawable(found),
            remedy="draw one",
        )
    dims = [str(dim) for dim in found[kind.variables[0]].dims if dim not in (*CELL, "at", "run")]
    if len(dims) != kind.grouped:
        raise Refused(
            "kind",
            given=f"{name} of groups: {', '.join(dims) or 'none'}",
            allowed="one dimension of groups" if kind.grouped else "no groups",
            remedy="select one group" if dims else f"ask for groups with by=, or let `wanted` ask for {name}",
        )


def _drawable(found: xr.Dataset) -> str:
    fitting = [name for name, kind in KINDS.items() if all(variable in found for variable in kind.variables)]
    return ", ".join(fitting) or "a run's dataset, or one of the statistics that pictures show"
