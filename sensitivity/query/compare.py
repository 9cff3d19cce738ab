"""Differences, and how sure they are: between two groups of a run's windows, and between two runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import xarray as xr

from ..errors import Refused, suggested
from ..sections import parse_bytes
from .alignment import Alignment, aligned
from .ask import MEMORY, ask, facts, statistic
from .conditions import By, groupings, listed
from .intervals import LEAF, LEAVES, Sure, answered, changing, shaped
from .naming import Words, escaped, named, noted
from .passes import sums_together
from .periods import span_of
from .question import Answers, Question, lazily, question
from .roles import restored, roles_of
from .statistics import EXTREMES, Statistic
from .sums import Part

WHICH = "which"


def difference(
    dataset: xr.Dataset, of: str | Statistic, between: tuple[Any, Any], *, by: By, **conditions: Any
) -> xr.Dataset:
    """A statistic of one group of windows less that of another: lazy, in one pass.

    between: two labels of the first grouping of `by`, such as ("JJA", "DJF") by "season". For each variable NAME of
    the statistic: `NAME_a`, `NAME_b` and `NAME_difference` = a − b; `count_a`, `count_b`. With `ci`, `…_difference_low`
    and `…_difference_high`: both groups are resampled together, so that what they share is not counted as doubt.
    Further `conditions` are those of `ask`.
    """
    base = statistic(of) if isinstance(of, str) else of
    if not (asked := listed(by)):
        raise Refused("by", given="none", allowed="groups, to tell two of them apart", remedy='ask by "season", say')
    first, *others = asked
    grouping = groupings(dataset, [first] if not isinstance(first, tuple) else dict([first]))[0]
    labels = [str(label) for label in grouping.labels]
    missing = [label for label in between if str(label) not in labels]
    if missing or len(between) != 2 or str(between[0]) == str(between[1]):
        raise Refused(
            "between",
            given=", ".join(map(str, missing or between)),
            allowed=f"two of {', '.join(labels)}",
            remedy=suggested(missing, labels, f"name two groups by {grouping.name}"),
        )
    a, b = map(str, between)
    made = _less(base, grouping.name, (labels.index(a), labels.index(b)), (a, b))
    found = ask(dataset, [made], by=[grouping, *others], **conditions)[made.name]
    return noted(found, _sign(a, b)).assign_attrs(of=base.name, a=a, b=b)


def _sign(a: str, b: str) -> str:
    return f"each difference is a − b, where a is {a} and b is {b}"


def _less(base: Statistic, dim: str, places: tuple[int, int], called: tuple[str, str]) -> Statistic:
    finish = partial(_finish, base=base, dim=dim, places=places)
    extremes = tuple(f"{name}_difference" for name in EXTREMES)
    words: Words = {}
    a, b = map(escaped, called)
    for name, (long_name, units) in base.words.items():
        words |= {f"{name}_a": (f"{long_name}, of {a}", units), f"{name}_b": (f"{long_name}, of {b}", units)}
        words[f"{name}_difference"] = f"{long_name}, of {a} − that of {b}", units
    return Statistic("difference", base.needs, finish, extremes, "_difference", (dim, places), words=words)


def _finish(sums: xr.Dataset, base: Statistic, dim: str, places: tuple[int, int]) -> xr.Dataset:
    a, b = (base.finish(sums.isel({dim: place})) for place in places)
    a, b = (one.drop_vars({dim, "input_std"} & {*one.coords}) for one in (a, b))  # runs have each their own
    found: dict[str, Any] = {}
    for name in map(str, a.data_vars):
        found |= {f"{name}_a": a[name], f"{name}_b": b[name]}
        if name in changing(base, a):
            found[f"{name}_difference"] = a[name] - b[name]
    return xr.Dataset(found, attrs=a.attrs)


def compare(
    a: xr.Dataset,
    b: xr.Dataset,
    of: str | Statistic = "importance",
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
    align: str | None = None,
) -> xr.Dataset:
    """A statistic of run a less that of run b, such as of two models, or of one in two periods: lazy.

    Every difference is a − b, here, in tables and in pictures: positive where a has more. Variables as for
    `difference`, arguments as for `ask`. With `ci`, both runs are resampled by the same stretches of
    time, so that what a time does to both is not counted as doubt. Raises `Refused` where the two have other lags,
    features, outputs or output steps, count lags from something else, or one has dates and the other has none.
    """
    base = statistic(of) if isinstance(of, str) else of
    parts, alignments = zip(
        *(aligned(one, align, lags, features, outputs, output_steps) for one in (a, b)), strict=True
    )
    _require_comparable(
        *(part if own is None else own.relabelled(part) for part, own in zip(parts, alignments, strict=True))
    )
    room = (memory if isinstance(memory, int) else parse_bytes(memory)) // 2
    sure = None if ci is None else Sure(ci, seed)
    asked = _questions(parts, alignments, base, by, where, sure, room)
    _require_same_bins(by, *asked)
    called = _names(a, b)
    made = _less(base, WHICH, (0, 1), called)
    answers = _Compared(made, [one.answers for one in asked], sure)
    shape = _Compared(made, [_whole(one) for one in asked])(*(one.reading.nothing() for one in asked))
    shapes = shape if sure is None else [shaped(made, shape[0], sure)]
    found = lazily(answers, sums_together([one.reading for one in asked]), shapes)[0]
    found = named(found, made.words, asked[0].dataset)
    found = noted(found.assign_attrs(asked[0].roles | found.attrs), _sign(*called))
    sides = {f"{name}_{side}": value for side, one in (("a", a), ("b", b)) for name, value in facts(one).items()}
    return restored(found).assign_attrs(sides | {"of": base.name})


def _names(a: xr.Dataset, b: xr.Dataset) -> tuple[str, str]:
    """The runs' own names where they tell the two apart."""
    first, second = (PurePosixPath(str(one.attrs.get("run", ""))).name for one in (a, b))
    return (first, second) if first and second and first != second else ("the first run", "the second run")


def _questions(
    parts: Sequence[xr.Dataset],
    alignments: Sequence[Alignment | None],
    base: Statistic,
    by: By,
    where: str | None,
    sure: Sure | None,
    room: int,
) -> list[Question]:
    """With the same leaves: the finest that both have room for."""
    span, pairs = span_of(*parts), list(zip(parts, alignments, strict=True))
    asked = [question(one, (base,), by, where, sure, room, LEAVES[0], span, own) for one, own in pairs]
    if sure is not None:
        finest = min(len(one.groupings[-1].labels) for one in asked)
        asked = [question(one, (base,), by, where, sure, room, finest, span, own) for one, own in pairs]
    return asked


def _whole(asked: Question) -> Answers:
    """Answers of all leaves together."""
    return replace(asked, groupings=tuple(one for one in asked.groupings if one.name != LEAF)).answers


@dataclass(frozen=True)
class _Compared:
    """The difference made of the sums of two runs."""

    statistic: Statistic
    runs: list[Answers]
    sure: Sure | None = None

    def __call__(self, a: list[Part], b: list[Part]) -> list[xr.Dataset]:
        sides = [one.sums(parts) for parts, one in zip((a, b), self.runs, strict=True)]
        empty = {
            "least": np.inf,
            "largest": -np.inf,
            **dict.fromkeys(set(sides[0].data_vars) - {"least", "largest"}, 0),
        }
        if "input_std" in sides[0].coords:
            sides = [side.reset_coords("input_std") for side in sides]
        sums = xr.concat(sides, WHICH, join="outer", fill_value=empty, combine_attrs="override", data_vars="all")
        if "input_std" in sums:
            sums = sums.set_coords("input_std")
        if self.sure is None:
            return [self._blanked(self.statistic.finish(sums))]
        return [self._blanked(answered(self.statistic, sums[list(self.statistic.needs)], self.sure))]

    def _blanked(self, answer: xr.Dataset) -> xr.Dataset:
        return self.runs[1].blanked(self.runs[0].blanked(answer))


def _require_comparable(a: xr.Dataset, b: xr.Dataset) -> None:
    told, roles = [], [roles_of(one) for one in (a, b)]
    if roles[0] != roles[1]:
        told.append(f"product: {roles[0]} against {roles[1]}")
    for dim in [dim for dim in roles[0].dims if dim in roles[1].dims]:
        first, second = (np.atleast_1d(one[dim].values).tolist() for one in (a, b))
        if first != second:
            told.append(f"{dim}: {_shown(first)} against {_shown(second)}")
    meant = [one["lag"].attrs.get("long_name") if "lag" in one.coords else None for one in (a, b)]
    if meant[0] != meant[1]:
        told.append(f"lag: {meant[0]} against {meant[1]}")
    kinds = ["dates" if one["time"].dtype.kind == "M" else "numbers" for one in (a, b)]
    if kinds[0] != kinds[1]:
        told.append(f"time: {kinds[0]} against {kinds[1]}")
    if told:
        raise Refused(
            "compare",
            given="runs that differ in\n" + "\n".join(told),
            allowed="two runs of the same lags, features, outputs and output steps",
            remedy="choose those that both have, with lags, features, outputs or output_steps",
        )


def _require_same_bins(by: By, a: Question, b: Question) -> None:
    for one, first, second in zip(listed(by), a.groupings, b.groupings, strict=False):
        own = isinstance(one, tuple) and isinstance(one[1], int)
        if own and first.labels.tolist() != second.labels.tolist():
            raise Refused(
                "by",
                given=f"{first.name}:{one[1]}, whose bins are {_shown(first.labels.tolist())} against "
                f"{_shown(second.labels.tolist())}",
                allowed="the same bins in both runs",
                remedy=f"give the edges, as in {first.name}:0,1.5,3",
            )


def _shown(labels: list[Any]) -> str:
    shown = [str(label) for label in labels]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:3], "…", *shown[-3:]])
