"""Tables of a report: what is in them, and how they are written as HTML that sorts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from ..plots import influence
from ..plots.look import targets
from ..survey import Survey
from . import measures, words
from .answers import LEVEL, Answers
from .markup import Markup, named, tag
from .state import State

FEATURES, GROUPS, LAGS, COLUMNS = 50, 50, 60, 6
SHORT = 25  # rows that a printed page has room for
_IMPORTANCE = (
    "Importance: mean |J| × the input's std, in units of the output. 50 % lags: how many of the newest hold half of a "
    "feature's influence. J > 0 there: the share of windows in which a rise at its strongest lag raises the output."
)
_PROFILE = "Mean |J| × the input's std by lag, the most important features first, in units of the output."
_DISTRIBUTION = (
    "J of all windows, lags and outputs together, in units of the output per unit of the feature; quantiles to 1.6 %."
)
_MOMENTS = "Windows with the largest |J| × the input's std, no two of the same event."
_GROUPS = "Influence: mean |J| × the input's std, its mean over lags summed over features, in units of the output."
NUMBER = (int, float, np.integer, np.floating)


@dataclass(frozen=True)
class Table:
    """columns: titles, the first that of rows' headers. rows: a value a column; (value, text) where they differ, of
    which the first is what rows are sorted by. note: what was left out, and how to see it.
    """

    key: str
    title: str
    caption: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[object, ...]]
    note: str = ""
    command: str = ""

    def markup(self) -> Markup:
        head = tag(
            "tr",
            *(tag("th", named(column), scope="col", class_=self._side(i)) for i, column in enumerate(self.columns)),
        )
        body = [tag("tr", *(self._cell(i, cell) for i, cell in enumerate(row))) for row in self.rows]
        table = tag(
            "table",
            tag("caption", tag("span", self.caption)),
            tag("thead", head),
            tag("tbody", *body),
            class_="sorts",
        )
        short = "short" if len(self.rows) <= SHORT else None
        around = tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=f"Table: {self.title}")
        return tag("section", tag("h3", self.title), around, self._below(), id=self.key, class_=short)

    def _below(self) -> Markup:
        if not self.note:
            return Markup("")
        shell = [" ", tag("code", self.command)] if self.command else []
        return tag("p", self.note, *shell, class_="note")

    def _side(self, column: int) -> str | None:
        if column == 0 and any(isinstance(row[0], tuple) for row in self.rows):
            return None  # names with an order of their own
        values = [_parts(row[column])[0] for row in self.rows]
        return "number" if values and all(value is None or isinstance(value, NUMBER) for value in values) else None

    def _cell(self, column: int, cell: object) -> Markup:
        value, text = _parts(cell)
        key = _key(value)
        if column == 0:
            return tag("th", text, scope="row", data_value=key, class_=self._side(0))
        return tag("td", text, data_value=key, class_=self._side(column))


def _parts(cell: object) -> tuple[object, str]:
    if isinstance(cell, tuple):
        return cell[0], named(cell[1])
    if cell is None or (isinstance(cell, (float, np.floating)) and not np.isfinite(cell)):
        return None, "–"
    if isinstance(cell, (int, np.integer)):
        return cell, f"{cell:,}"
    return cell, words.number(float(cell)) if isinstance(cell, (float, np.floating)) else named(cell)


def _key(value: object) -> str | None:
    """What a number is sorted by; texts are sorted as they stand."""
    if not isinstance(value, NUMBER):
        return "" if value is None else None
    return repr(float(value)) if np.isfinite(value) else ""


def _note(shown: int, whole: int, what: str, command: str) -> tuple[str, str]:
    return ("", "") if whole <= shown else (f"{shown:,} of {whole:,} {what}. All of them:", command)


def tables(state: State, answers: Answers) -> Iterator[Table]:
    if answers.said:
        yield from _of_derivatives(state, answers)
    yield _series(state)


def _of_derivatives(state: State, answers: Answers) -> Iterator[Table]:
    found = measures.features(answers)
    yield _importance(state, found)
    yield _profile(state, answers)
    if "pooled" in answers:
        yield _distribution(state, answers, [one.name for one in found])
    if "moments" in answers:
        yield _moments(state, answers["moments"])
    if "month-lag" in answers and words.of_several_groups(answers["month-lag"]):
        yield _groups(answers["month-lag"], state)
    if "sites" in answers:
        yield _groups(answers["sites"], state, len(state.run.survey.sites))
    for dim in targets(answers["mean-abs"]):
        if answers["mean-abs"].sizes[dim] > 1:
            yield _targets(answers["mean-abs"], dim, state)


def _importance(state: State, found: list[measures.Feature]) -> Table:
    rows = [
        (
            one.name,
            (one.importance, words.number(one.importance) + _ends(one.interval)),
            (one.share, words.percent(one.share) + _ends(one.share_interval, 100)),
            *((lags, words.number(lags)) for lags in one.held),
            one.peak_lag,
            (one.positive, words.percent(one.positive)),
        )
        for one in found[:FEATURES]
    ]
    columns = (
        *("Feature", "Importance", "Share"),
        *("50\u00a0% lags", "90\u00a0% lags", "Strongest lag", "J\u00a0>\u00a00 there"),
    )
    sure = np.isfinite([one.interval for one in found]).any()
    caption = f"{_IMPORTANCE} In brackets: {words.percent(LEVEL)} intervals." if sure else _IMPORTANCE
    command = f"sensitivity query {state.path} importance --ci 0.9"
    note, shell = _note(len(rows), len(found), "features", command)
    return Table("importance", "Importance and memory", caption, columns, rows, note or "By output:", shell or command)


def _ends(interval: tuple[float, float], times: float = 1) -> str:
    low, high = (words.number(float(f"{times * end:.2g}")) for end in interval)
    return f" ({low} … {high})" if np.isfinite(interval[0]) else ""


def _profile(state: State, answers: Answers) -> Table:
    values = influence(answers["mean-abs"]).transpose("lag", "feature").sortby("lag")
    order = np.argsort(-np.nan_to_num(values.sum("lag").values), kind="stable")[:COLUMNS]
    lags = values.sizes["lag"]
    some = np.unique(np.linspace(0, lags - 1, min(lags, LAGS)).round().astype(int))
    rows = [(int(values["lag"].values[i]), *(float(values[i, j]) for j in order)) for i in some]
    columns = ("Lag", *(str(values["feature"].values[j]) for j in order))
    command = f"sensitivity query {state.path} lag-profile"
    whole = lags * values.sizes["feature"]
    note = (
        ""
        if len(some) * len(order) == whole
        else (
            f"{len(some):,} of {lags:,} lags and {len(order):,} of {values.sizes['feature']:,} features. All of them:"
        )
    )
    return Table("profile", "Lag profile", _PROFILE, columns, rows, note, command if note else "")


def _distribution(state: State, answers: Answers, order: list[str]) -> Table:
    found = answers["pooled"]
    quantiles = answers["spread"]["pooled_quantile"] if "spread" in answers else None
    at = (0.05, 0.5, 0.95) if quantiles is not None else ()
    rows = []
    for name in order[:FEATURES]:
        one = found.sel(feature=name)
        ends = float(one["min"]), float(one["max"])
        ranks = (
            [] if quantiles is None else [float(np.clip(quantiles.sel(feature=name, at=part), *ends)) for part in at]
        )
        share = float(one["share_positive"])
        rows.append(
            (
                name,
                *(float(one[key]) for key in ("mean", "mean_abs", "std", "min")),
                *ranks,
                float(one["max"]),
                (share, words.percent(share)),
            )
        )
    ranks_of = tuple(f"{part:.0%}".replace("%", " %") for part in at)
    columns = ("Feature", "Mean J", "Mean |J|", "Std of J", "Least", *ranks_of, "Largest", "J > 0")
    command = f"sensitivity query {state.path} summary"
    note, shell = _note(len(rows), len(order), "features", command)
    return Table(
        "distribution", "Distribution", _DISTRIBUTION, columns, rows, note or "By lag and output:", shell or command
    )


def _moments(state: State, found: xr.Dataset) -> Table:
    site = ("Site",) if "site" in found.coords else ()
    rows = []
    for i in range(found.sizes["rank"]):
        one = found.isel(rank=i)
        at = [one[f"at_{name}"].item() for name in ("feature", "lag", "output", "output_step")]
        where = (str(one["site"].item()),) if site else ()
        sizes = float(one["score"]), float(one["peak"])
        rows.append((i + 1, words.time_text(one["time"].values[()]), *where, *sizes, *at))
    columns = (
        "Rank",
        "Window ends",
        *site,
        "|J|\u00a0×\u00a0std",
        "J there",
        "Feature",
        "Lag",
        "Output",
        "Output step",
    )
    return Table(
        "moments",
        "Moments that stand out",
        _MOMENTS,
        columns,
        rows,
        "More of them:",
        f"sensitivity top {state.path} --scaled --count 100",
    )


def _groups(found: xr.Dataset, state: State, of: int = 0) -> Table:
    """A row for each month, season or site."""
    dim, sums = words.by_group(found)
    by_lag = influence(found).sel({dim: sums[dim]})
    counts = found["count"].sel({dim: sums[dim]}).max([name for name in found["count"].dims if name != dim])
    rows = [
        ((_place(dim, i, value), words.label(value, dim)), int(counts[i]), *_told(by_lag.isel({dim: i})))
        for i, value in enumerate(sums[dim].values.tolist())
    ]
    command = f"sensitivity query {state.path} importance --by {dim}"
    note, shell = _note(len(rows), of, f"{dim}s, those with the most windows", command)
    columns = (dim.capitalize(), "Windows", *TOLD)
    return Table(f"by-{dim}", f"By {dim}", _GROUPS, columns, rows, note or "In full:", shell or command)


TOLD = ("Influence", "First feature", "Its share", "Second feature", "Its share", "90\u00a0% lags")


def _place(dim: str, i: int, value: object) -> object:
    """What a group is sorted by: sites by their names, all else in order."""
    return value if dim in ("site", "output") else i


def _told(by_lag: xr.DataArray) -> tuple[object, ...]:
    """Of influence `(lag, feature)`: its mean over lags summed over features, and who holds it."""
    importance = by_lag.mean("lag")
    whole = float(importance.sum())
    order = np.argsort(-np.nan_to_num(importance.values), kind="stable")[:2]
    found: list[object] = [whole]
    for i in order:
        share = float(importance[i]) / whole if whole > 0 else np.nan
        found += [str(importance["feature"].values[i]), (share, words.percent(share))]
    found += ["–", None] * (2 - len(order))
    held = float(measures.lags_holding(by_lag.sum("feature"), 0.9))
    return (*found, (held, words.number(held)))


def _targets(found: xr.Dataset, dim: str, state: State) -> Table:
    """A row for each output, or output step; of many as many as there is room for, evenly spaced."""
    values = found[dim].values
    some = np.unique(np.linspace(0, len(values) - 1, min(len(values), GROUPS)).round().astype(int))
    rows = [
        (values[i].item() if dim == "output_step" else str(values[i]), *_told(influence(found.isel({dim: [i]}))))
        for i in some
    ]
    name = dim.replace("_", " ")
    note, shell = _note(len(rows), len(values), f"{name}s", f"sensitivity query {state.path} importance")
    return Table(f"by-{dim.replace('_', '-')}", f"By {name}", _GROUPS, (name.capitalize(), *TOLD), rows, note, shell)


def _series(state: State) -> Table:
    found: Survey = state.run.survey
    rows = list(zip(found.features, found.mean, found.std, found.largest, strict=True))[:FEATURES]
    note, _ = _note(len(rows), len(found.features), "features", "")
    columns = ("Feature", "Mean", "Std", "Largest |value|")
    return Table(
        "features", "Features", "The series, in its own units.", columns, list(rows), note.replace(" All of them:", "")
    )
