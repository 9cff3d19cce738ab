"""Tables of a report: what is in them, and how they are written as HTML that sorts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from ..plots import influence
from ..plots.look import targets
from ..plots.terms import Terms, target_words
from ..query.roles import in_words, roles_of
from ..survey import Survey
from . import measures, words
from .answers import LEVEL, Answers
from .markup import Markup, named, tag
from .state import State

FEATURES, GROUPS, LAGS, COLUMNS = 50, 50, 60, 6
SHORT = 25  # rows that a printed page has room for
_HELD = " 50 % lags: how many of the newest hold half of a {item}'s influence."
_RAISES = " J > 0 there: the share of windows in which a rise at its strongest lag raises the output."
_POSITIVE = " {letter} > 0 there: the share of windows in which it is positive where it is strongest."
_IMPORTANCE = "Importance: mean {size}, {unit}{both}. Share: of the importance of {all}."
_PROFILE = "Mean {size} by {lag}, the most important {item}s first, {unit}."
_DISTRIBUTION = (
    "J of all windows, lags and outputs together, in units of the output per unit of the feature; quantiles to 1.6 %."
)
_TOGETHER = "{letter} of all windows, of each {item} by itself, in units of the output{per}; quantiles to 1.6 %."
_MOMENTS = "Windows with the largest {size}, no two of the same event."
_GROUPS = "Influence: mean {size}, {mean}summed over {item}s, {unit}."
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


def _said(text: str, answers: Answers) -> str:
    """A caption of what the report is of."""
    own = answers.terms
    size = f"|{own.letter}|{own.scaling if answers.scaled else ''}"
    unit = f"in units of the output{own.left if answers.scaled else own.per}"
    mean = f"its mean over {own.lag}s " if own.lag else ""
    return text.format(size=size, unit=unit, mean=mean, letter=own.letter, item=own.item, lag=own.lag, per=own.per)


def tables(state: State, answers: Answers) -> Iterator[Table]:
    if answers.said:
        yield from _of_derivatives(state, answers)
    yield _series(state)


def _of_derivatives(state: State, answers: Answers) -> Iterator[Table]:
    found = measures.features(answers)
    yield _importance(state, answers, found)
    if answers.terms.lag:
        yield _profile(state, answers)
    if "pooled" in answers:
        yield _distribution(state, answers, _by_importance(answers, found))
    if "moments" in answers:
        yield _moments(state, answers)
    if "month-lag" in answers and words.of_several_groups(answers["month-lag"]):
        yield _groups(answers, "month-lag", state)
    if "sites" in answers:
        yield _groups(answers, "sites", state, len(state.run.survey.sites))
    for dim in targets(answers["mean-abs"]):
        if answers["mean-abs"].sizes[dim] > 1:
            yield _targets(answers, dim, state)


def _importance(state: State, answers: Answers, found: list[measures.Feature]) -> Table:
    own, held = answers.terms, answers.terms.lag == "lag"
    rows = [
        (
            one.name,
            (one.importance, words.number(one.importance) + _ends(one.interval)),
            (one.share, words.percent(one.share) + _ends(one.share_interval, 100)),
            *((lags, words.number(lags)) for lags in one.held if held),
            *([one.peak_lag] if own.lag else []),
            (one.positive, words.percent(one.positive)),
        )
        for one in found[:FEATURES]
    ]
    columns = (
        *(own.item.capitalize(), "Importance", "Share"),
        *(("50\u00a0% lags", "90\u00a0% lags") if held else ()),
        *((f"Strongest {own.lag}",) if own.lag else ()),
        f"{own.letter}\u00a0>\u00a00 there",
    )
    whole = f"all {len(found):,} {own.item}s" if len(found) > 1 else f"this {own.item}, the only one"
    both = ", both orders of a pair together" if "pairs" in answers["importance"].attrs else ""
    size = _IMPORTANCE.replace("{all}", whole).replace("{both}", both)
    about = _said(size + _HELD * held + (_RAISES if own.plain else _POSITIVE), answers)
    sure = np.isfinite([one.interval for one in found]).any()
    caption = f"{about} In brackets: {words.percent(LEVEL)} intervals." if sure else about
    command = f"sensitivity query {state.path} importance --ci 0.9"
    note, shell = _note(len(rows), len(found), f"{own.item}s", command)
    title = "Importance and memory" if held else "Importance"
    return Table("importance", title, caption, columns, rows, note or "By output:", shell or command)


def _ends(interval: tuple[float, float], times: float = 1) -> str:
    low, high = (words.number(float(f"{times * end:.2g}")) for end in interval)
    return f" ({low} … {high})" if np.isfinite(interval[0]) else ""


def _profile(state: State, answers: Answers) -> Table:
    own = answers.terms
    values = influence(answers["mean-abs"]).transpose("lag", "feature").sortby("lag")
    order = np.argsort(-np.nan_to_num(values.sum("lag").values), kind="stable")[:COLUMNS]
    lags = values.sizes["lag"]
    some = np.unique(np.linspace(0, lags - 1, min(lags, LAGS)).round().astype(int))
    rows = [(int(values["lag"].values[i]), *(float(values[i, j]) for j in order)) for i in some]
    columns = (own.lag.capitalize(), *(str(values["feature"].values[j]) for j in order))
    command = f"sensitivity query {state.path} lag-profile"
    whole = lags * values.sizes["feature"]
    note = (
        ""
        if len(some) * len(order) == whole
        else (
            f"{len(some):,} of {lags:,} {own.lag}s and {len(order):,} of {values.sizes['feature']:,} {own.item}s. "
            "All of them:"
        )
    )
    title, caption = f"{own.lag.capitalize()} profile", _said(_PROFILE, answers)
    return Table("profile", title, caption, columns, rows, note, command if note else "")


def _by_importance(answers: Answers, found: list[measures.Feature]) -> list[str]:
    """The features, the most important first; where importance is of pairs, the largest first."""
    if "pairs" not in answers["importance"].attrs:
        return [one.name for one in found]
    pooled = answers["pooled"]
    return [str(name) for name in pooled["feature"].values[np.argsort(-np.nan_to_num(pooled["mean_abs"].values))]]


def _distribution(state: State, answers: Answers, order: list[str]) -> Table:
    found, own, letter = answers["pooled"], answers.terms, answers.terms.letter
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
    means = (f"Mean {letter}", f"Mean |{letter}|", f"Std of {letter}")
    columns = (own.item.capitalize(), *means, "Least", *ranks_of, "Largest", f"{letter} > 0")
    command = f"sensitivity query {state.path} summary"
    note, shell = _note(len(rows), len(order), f"{own.item}s", command)
    caption, each = _said(_DISTRIBUTION if own.plain else _TOGETHER, answers), "By lag and output:"
    note = note or (each if own.plain else "Each by itself:")
    return Table("distribution", "Distribution", caption, columns, rows, note, shell or command)


def _moments(state: State, answers: Answers) -> Table:
    found, own = answers["moments"], answers.terms
    dims = ("feature", "lag", "output", "output_step") if own.plain else roles_of(found).dims[::-1]
    site = ("Site",) if "site" in found.coords else ()
    rows = []
    for i in range(found.sizes["rank"]):
        one = found.isel(rank=i)
        at = [one[f"at_{name}"].item() for name in dims]
        where = (str(one["site"].item()),) if site else ()
        sizes = float(one["score"]), float(one["peak"])
        rows.append((i + 1, words.time_text(one["time"].values[()]), *where, *sizes, *at))
    columns = (
        "Rank",
        "Window ends",
        *site,
        f"|{own.letter}|" + "\u00a0×\u00a0std" * answers.scaled,
        f"{own.letter} there",
        *(in_words(dim).capitalize() for dim in dims),
    )
    return Table(
        "moments",
        "Moments that stand out",
        _said(_MOMENTS, answers),
        columns,
        rows,
        "More of them:",
        f"sensitivity top {state.path}{' --scaled' * answers.scaled} --count 100",
    )


def _groups(answers: Answers, asked: str, state: State, of: int = 0) -> Table:
    """A row for each month, season or site."""
    found, own = answers[asked], answers.terms
    dim, sums = words.by_group(found)
    by_lag = influence(found).sel({dim: sums[dim]})
    counts = found["count"].sel({dim: sums[dim]}).max([name for name in found["count"].dims if name != dim])
    rows = [
        ((_place(dim, i, value), words.label(value, dim)), int(counts[i]), *_told(by_lag.isel({dim: i}), own))
        for i, value in enumerate(sums[dim].values.tolist())
    ]
    command = f"sensitivity query {state.path} importance --by {dim}"
    note, shell = _note(len(rows), of, f"{dim}s, those with the most windows", command)
    columns = (dim.capitalize(), "Windows", *_titles(own))
    return Table(f"by-{dim}", f"By {dim}", _said(_GROUPS, answers), columns, rows, note or "In full:", shell or command)


def _titles(own: Terms) -> tuple[str, ...]:
    """Of what `_told` tells."""
    lags = ("90\u00a0% lags",) if own.lag == "lag" else ()
    return ("Influence", f"First {own.item}", "Its share", f"Second {own.item}", "Its share", *lags)


def _place(dim: str, i: int, value: object) -> object:
    """What a group is sorted by: sites by their names, all else in order."""
    return value if dim in ("site", "output") else i


def _told(by_lag: xr.DataArray, own: Terms) -> tuple[object, ...]:
    """Of influence `(lag, feature)`: its mean over lags summed over features, and who holds it."""
    importance = by_lag.mean("lag")
    whole = float(importance.sum())
    order = np.argsort(-np.nan_to_num(importance.values), kind="stable")[:2]
    found: list[object] = [whole]
    for i in order:
        share = float(importance[i]) / whole if whole > 0 else np.nan
        found += [str(importance["feature"].values[i]), (share, words.percent(share))]
    found += ["–", None] * (2 - len(order))
    if own.lag != "lag":
        return tuple(found)
    held = float(measures.lags_holding(by_lag.sum("feature"), 0.9))
    return (*found, (held, words.number(held)))


def _targets(answers: Answers, dim: str, state: State) -> Table:
    """A row for each output, or output step; of many as many as there is room for, evenly spaced."""
    found, own = answers["mean-abs"], answers.terms
    values = found[dim].values
    some = np.unique(np.linspace(0, len(values) - 1, min(len(values), GROUPS)).round().astype(int))
    rows = [
        (values[i].item() if dim == "output_step" else str(values[i]), *_told(influence(found.isel({dim: [i]})), own))
        for i in some
    ]
    several = target_words(found, dim)
    name = several.removesuffix("s")
    note, shell = _note(len(rows), len(values), several, f"sensitivity query {state.path} importance")
    return Table(
        f"by-{dim.replace('_', '-')}",
        f"By {name}",
        _said(_GROUPS, answers),
        (name.capitalize(), *_titles(own)),
        rows,
        note,
        shell,
    )


def _series(state: State) -> Table:
    found: Survey = state.run.survey
    largest = found.largest[: len(found.features)]  # of a loss's labels, too
    rows = list(zip(found.features, found.mean, found.std, largest, strict=True))[:FEATURES]
    note, _ = _note(len(rows), len(found.features), "features", "")
    columns = ("Feature", "Mean", "Std", "Largest |value|")
    return Table(
        "features", "Features", "The series, in its own units.", columns, list(rows), note.replace(" All of them:", "")
    )
