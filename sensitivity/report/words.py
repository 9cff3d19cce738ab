"""What a report says of the numbers: findings as sentences, pictures in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import xarray as xr

from ..plots import influence
from ..plots.lags import PANELS
from ..plots.look import most, newest_last, of_one_target, scaled, targets, total
from ..plots.terms import Terms, target_words, terms_of
from ..query.pairs import each_once, matrix_of
from ..query.roles import CALLED, in_words, roles_of
from ..query.rows import text_of
from ..query.sums import TARGET
from . import measures
from .answers import LEVEL, Answers
from .markup import named
from .measures import Feature
from .state import State

MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
_RAISED = str.maketrans("−0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
SMALL = 0.01
CONSTANT = 0.8  # of windows: above, a sign is called constant
STEADY = 1.25  # the most by the least: below, groups hardly differ
FADED = 0.1  # of the largest: below, the window is long enough to see influence end


def number(value: float) -> str:
    """To three digits, as tables have it."""
    if not np.isfinite(value):
        return "–"
    text = f"{value:,.0f}" if 1000 <= abs(float(f"{value:.3g}")) < 1e7 else f"{value:.3g}"
    digits, _, power = text.replace("-", "−").partition("e")
    return f"{digits}·10{power.replace('−0', '−').lstrip('+0').translate(_RAISED)}" if power else digits


def percent(part: float) -> str:
    if not np.isfinite(part):
        return "–"
    if 0 < part < 0.001:
        return "<\u00a00.1\u00a0%"
    if 0.995 <= part < 1:
        return ">\u00a099\u00a0%"
    return f"{100 * part:.2g}\u00a0%" if part < 0.0995 else f"{100 * part:.0f}\u00a0%"


def one_line(text: str) -> str:
    return " ".join(text.split())


def plural(count: float, what: str) -> str:
    return f"{count:,.0f} {what}{'' if count == 1 else 's'}"


def listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def time_text(time: np.ndarray | np.generic) -> str:
    return str(text_of(np.asarray(time))).replace("T", " ") if time.dtype.kind == "M" else str(time)


def label(value: object, dim: str) -> str:
    """A group's name: months by their names."""
    return MONTHS[int(value) - 1] if dim == "month" else str(value)  # type: ignore[call-overload]


# ---- findings ----------------------------------------------------------------------------------------


def coverage(state: State) -> str:
    parts = state.coverage
    windows = parts.windows
    if not parts.computed:
        return f"None of {plural(windows, 'window')} is computed yet: there is nothing to say of {state.terms.nouns}."
    done = f"All {plural(windows, 'window')} are done" if parts.complete else _unfinished(state)
    skipped = (
        f"; {parts.skipped:,} of them touch a missing value and have no {state.terms.noun}" if parts.skipped else ""
    )
    return f"{done}{skipped}."


def _unfinished(state: State) -> str:
    parts = state.coverage
    done = parts.computed + parts.skipped
    lacking = [
        text
        for count, text in (
            (parts.missing, f"{parts.missing:,} are missing"),
            (parts.failed, f"{parts.failed:,} failed"),
        )
        if count
    ]
    return f"The run is not complete: {done:,} of {plural(parts.windows, 'window')} are done, {listed(lacking)}"


def findings(answers: Answers) -> Iterator[str]:
    """The most important things first, in plain sentences."""
    if not answers.said:
        return
    found = measures.features(answers)
    by_lag = influence(answers["mean-abs"])
    if roles_of(answers["importance"]).of("feature"):
        yield from _importance(answers, found)
    if answers.terms.lag == "lag":
        yield from _memory(by_lag, answers.terms)
    yield from (_signs if answers.terms.signed else _signs_alone)(answers, found)
    yield from _groups(answers)
    yield from _moments(answers)


def _importance(answers: Answers, found: list[Feature]) -> Iterator[str]:
    if not found[0].importance > 0:
        yield _unimportant(found, answers.terms)
        return
    first, own = found[0], answers.terms
    if len(found) == 1:
        yield f"{named(first.name)} is the only {own.item}: its share of the {own.item}s' importance is 100\u00a0%."
        return
    ends = "" if np.isnan(first.share_interval[0]) else f", {_interval(first.share_interval)}"
    others = [f"{named(one.name)} ({percent(one.share)})" for one in found[1:3] if one.importance > 0]
    then = f", then {listed(others)}" if others else ""
    part = f"{percent(first.share)} of all {own.item}s' importance"
    yield f"{named(first.name)} {own.leads.format(outputs=_outputs(answers))}: {part}{ends}{then}."
    small = [one for one in found if one.share < SMALL]
    if 0 < len(small) < len(found):
        names = f": {listed([named(one.name) for one in small])}" if len(small) <= 3 else ""
        yield f"{plural(len(small), own.item)} of {len(found):,} hold less than 1 % each{names}."


def _unimportant(found: list[Feature], own: Terms) -> str:
    if not own.plain and not any(one.mean_abs > 0 for one in found):
        return f"Every {own.noun} is zero."
    if not any(one.mean_abs > 0 for one in found):
        return "Every derivative is zero: the output does not depend on any input."
    if not any(one.std > 0 for one in found):
        return "No input varies over the series: importance cannot be told."
    return "The output depends only on inputs that do not vary over the series: their importance cannot be told."


def _interval(ends: tuple[float, float]) -> str:
    return f"{percent(LEVEL)} interval {percent(ends[0])} to {percent(ends[1])}"


def _outputs(answers: Answers) -> str:
    found = answers["importance"]
    if of_one_target(found):
        name = str(found["output"].values[0]) if "output" in found.coords else "output"
        return "the output" if name == "output" else named(name)
    parts = [f"{found.sizes[dim]:,} {target_words(found, dim)}" for dim in targets(found) if found.sizes[dim] > 1]
    return f"the outputs (mean over {listed(parts)})"


def _memory(by_lag: xr.DataArray, own: Terms) -> Iterator[str]:
    whole = total(by_lag)
    half, most = (measures.lags_holding(whole, part) for part in measures.HELD)
    if not np.isfinite(float(half)):
        return
    lags = by_lag.sizes["lag"]
    left = measures.faded(by_lag)
    if lags == 1:
        return
    yield (
        f"{_newest(float(half))} of {lags:,} {_hold(float(half))} at least half of the influence of all {own.item}s "
        f"together, {_newest(float(most)).lower()} {_hold(float(most))} 90\u00a0%."
    )
    if left >= FADED:
        yield (
            f"Influence has not faded at the oldest lag ({percent(left)} of its largest value): what lies further back "
            "than the window cannot be seen."
        )
    elif np.isfinite(left):
        yield f"At the oldest lag influence has faded to {percent(left)} of its largest value."


def _newest(lags: float) -> str:
    return "The newest lag" if lags == 1 else f"The newest {lags:,.0f} lags"


def _hold(lags: float) -> str:
    return "holds" if lags == 1 else "hold"


def _signs(answers: Answers, found: list[Feature]) -> Iterator[str]:
    one_target = of_one_target(answers["importance"])
    what, it, where = ("the output", "it", "windows") if one_target else ("outputs", "them", "all cases")
    for one in found[:3]:
        if not np.isfinite(one.positive) or not one.importance > 0:
            continue
        ways = sorted(((one.positive, "raises"), (one.negative, "lowers")), reverse=True)
        said = f"{ways[0][1]} {what} in {percent(ways[0][0])} of {where}"
        others = [f"{ways[1][1]} {it} in {percent(ways[1][0])}"] if ways[0][0] < CONSTANT else []
        others += (
            [f"has no effect in {percent(max(0.0, round(1 - sum(part for part, _ in ways), 9)))}"]
            if ways[0][0] < CONSTANT
            else []
        )
        rise = f"A rise of {named(one.name)}{_where(one, answers.terms)}, where it counts most,"
        yield f"{rise} {listed([said, *others])}."


def _where(one: Feature, own: Terms) -> str:
    return f" at {own.lag} {one.peak_lag}" if own.lag else ""


def _signs_alone(answers: Answers, found: list[Feature]) -> Iterator[str]:
    """Where a sign does not say what a rise does."""
    own = answers.terms
    told = found[:3] if roles_of(answers["importance"]).of("feature") else []
    for one in told:
        if np.isfinite(one.positive) and one.importance > 0:
            shares = f"positive in {percent(one.positive)} of all cases and negative in {percent(one.negative)}"
            where = _where(one, own)
            yield f"The {own.noun} of {named(one.name)}{where}{', where it is largest,' if where else ''} is {shares}."


def _groups(answers: Answers) -> Iterator[str]:
    if "month-lag" not in answers or not of_several_groups(answers["month-lag"]):
        return
    dim, sums = by_group(answers["month-lag"])
    if not float(sums.max()) > 0:
        return
    places = int(sums.values.argmax()), int(sums.values.argmin())
    high, low = (label(sums[dim].values[place], dim) for place in places)
    most, least = (f"{float(edge / sums.mean()):.2g}" for edge in (sums.max(), sums.min()))
    own = answers.terms
    size = "How much the output depends on its inputs" if own.plain else f"How large {own.nouns} are"
    is_ = "the output depends on its inputs most" if own.plain else f"{own.nouns} are largest"
    if float(sums.max()) < STEADY * float(sums.min()):
        yield f"{size} hardly varies by {dim}: {least} to {most} times the mean."
    else:
        least_in = "least" if own.plain else "smallest"
        yield f"By {dim}, {is_} in {high} and {least_in} in {low}: {most} and {least} times the mean."


def of_several_groups(found: xr.Dataset) -> bool:
    return by_group(found)[1].size > 1


def by_group(found: xr.Dataset) -> tuple[str, xr.DataArray]:
    """The group's dimension, and the sum of influence over lags and features of each group that has any window."""
    values = influence(found)
    (dim,) = (str(dim) for dim in values.dims if dim not in ("lag", "feature"))
    sums = values.sum(["lag", "feature"], min_count=1)
    return dim, sums.isel({dim: np.isfinite(sums.values)})


def _moments(answers: Answers) -> Iterator[str]:
    first = answers["moments"].isel(rank=0) if "moments" in answers else None
    if first is None or not float(first["score"]) > 0:
        return
    site = f" at {named(first['site'].item())}" if "site" in first.coords else ""
    units = ", in units of the input's spread," if answers.scaled else ""
    step = f"of output step {first['at_output_step'].item()} " if answers.by_own_step else ""
    yield (
        f"The largest single {answers.terms.noun}{units} is that {step}{_place(first, answers.terms)}in the window "
        f"that ends {time_text(first['time'].values[()])}{site}."
    )


def _place(moment: xr.Dataset, own: Terms) -> str:
    """Where its largest entry is: "by rain at lag 3 "."""
    if own.plain:
        return f"by {named(moment['at_feature'].item())} at lag {moment['at_lag'].item()} "
    dims = [dim for dim in roles_of(moment).dims if dim not in TARGET]
    labels = [f"{in_words(dim)} {named(moment[f'at_{dim}'].item())}" for dim in dims]
    return f"at {listed(labels)} " if labels else ""


# ---- pictures in words -------------------------------------------------------------------------------


def of_importance(found: xr.Dataset) -> str:
    values = each_once(found)["importance"].mean(targets(found))
    chart = "Bar chart" if matrix_of(found) is None else "Matrix"
    order = np.argsort(-np.nan_to_num(values.values))[:5]
    share = values.values / max(float(values.sum()), np.finfo(float).tiny)
    parts = [
        f"{named(values['feature'].values[i])} {number(float(values[i]))} ({percent(float(share[i]))})" for i in order
    ]
    return f"{chart} of {plural(values.sizes['feature'], terms_of(found).item)} by importance: {'; '.join(parts)}."


def of_profile(found: xr.Dataset) -> str:
    values = influence(found)
    order = np.argsort(-np.nan_to_num(values.sum("lag").values))[:4]
    parts, lag = [], terms_of(found).lag
    for i in order:
        one = values.isel(feature=int(i))
        if not bool(one.notnull().any()):
            continue
        at = int(one["lag"].values[int(np.nan_to_num(one.values).argmax())])
        parts.append(f"{named(one['feature'].item())} is largest at {lag} {at} with {number(float(one.max()))}")
    return f"Line chart of influence over {plural(values.sizes['lag'], lag)}: {'; '.join(parts)}."


def of_band(found: xr.Dataset) -> str:
    drawn, _ = most(influence(found), PANELS)
    values = scaled(found, "size_quantile").isel(feature=drawn).transpose("lag", "feature", "at")
    widths = (values.sel(at=0.75) - values.sel(at=0.25)).values
    peak = np.unravel_index(int(np.nan_to_num(widths, nan=-1).argmax()), widths.shape)
    one = values[peak[0], peak[1]]
    low, high = (number(float(one.sel(at=edge))) for edge in (0.25, 0.75))
    wide = [number(float(one.sel(at=edge))) for edge in (0.05, 0.95)]
    own = terms_of(found)
    where = f"{named(one['feature'].item())} at {own.lag} {one['lag'].item()}"
    return (
        f"Panels of |{own.letter}| by {own.lag} for the {own.item}s that matter most. The middle half of windows is "
        f"widest for {where}: from {low} to {high}; nine tenths lie between {wide[0]} and {wide[1]}."
    )


def of_heatmap(found: xr.Dataset) -> str:
    values = influence(found).transpose("feature", "lag")
    return f"Heat map of {_shape(values)}; {_largest(values)}."


def of_times(found: xr.Dataset) -> str:
    along = "time" if "time" in found.dims else "window"
    values = total(influence(found)).transpose(along, "lag")
    ends = [time_text(values[along].values[place]) for place in (0, -1)]
    lag = _and_lag(found)
    return f"Heat map of influence by time{lag}, from {ends[0]} to {ends[1]}; {_largest(values)}."


def _and_lag(found: xr.Dataset) -> str:
    lag = terms_of(found).lag
    return f" and {lag}" if lag else ""


def of_groups(found: xr.Dataset) -> str:
    dim, _ = by_group(found)
    lag = _and_lag(found)
    return f"Heat map of influence by {dim}{lag}; {_largest(total(influence(found)).transpose(dim, 'lag'))}."


def of_steps(found: xr.Dataset) -> str:
    values = newest_last(total(scaled(found, "mean_abs")).mean("output")).transpose("output_step", "lag")
    return f"Heat map of {_shape(values)}; {_largest(values)}."


def of_distribution(found: xr.Dataset) -> str:
    values = scaled(found, "pooled_quantile").transpose("feature", "at")
    order = np.argsort(-np.nan_to_num(np.abs(values.values).max(axis=1)))[:4]
    parts = [
        f"{named(values['feature'].values[i])} {number(float(values[int(i)].sel(at=0.05)))} to "
        f"{number(float(values[int(i)].sel(at=0.95)))}"
        for i in order
    ]
    return f"Box chart of {terms_of(found).nouns}; the middle nine tenths are: {'; '.join(parts)}."


def of_window(found: xr.Dataset) -> str:
    values = scaled(found, "jacobian").transpose("output_step", "output", "lag", "feature")
    if not bool(values.notnull().any()):
        return f"One window, without {terms_of(found).nouns}."
    place = np.unravel_index(int(np.nan_to_num(np.abs(values.values)).argmax()), values.shape)
    cell, own = values[tuple(map(int, place))], terms_of(found)
    shown = f"Inputs and {own.nouns}" if "input" in found or own.plain else f"The {own.nouns}"
    at = f" at {own.lag} {cell['lag'].item()}" if own.lag else ""
    return (
        f"{shown} of the window that ends at {time_text(found['time'].values[()])}; the largest is "
        f"{number(float(cell))} by {named(cell['feature'].item())}{at}."
    )


def _shape(values: xr.DataArray) -> str:
    return " by ".join(plural(values.sizes[dim], _called(values, str(dim))) for dim in values.dims)


def _called(values: xr.DataArray, dim: str) -> str:
    """What a dim is, in words; "" for one that stands for nothing."""
    return values[dim].attrs.get(CALLED, dim.replace("_", " ")) if dim in values.coords else dim.replace("_", " ")


def _largest(values: xr.DataArray) -> str:
    """Where the largest value stands, in words."""
    filled = np.nan_to_num(values.values, nan=-1.0)
    cell = values[tuple(map(int, np.unravel_index(int(filled.argmax()), filled.shape)))]
    called = {str(dim): _called(values, str(dim)) for dim in values.dims}
    labels = [f"{words} {_at(cell, dim)}" for dim, words in called.items() if words]
    return f"the largest value, {number(float(cell))}, is at {listed(labels)}"


def _at(cell: xr.DataArray, dim: str) -> str:
    if dim not in cell.coords:
        return ""
    return time_text(cell[dim].values[()]) if cell[dim].dtype.kind == "M" else named(label(cell[dim].item(), dim))
