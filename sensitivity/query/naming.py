"""What the variables of an answer are called: each names itself and its units, whatever it was made from."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xarray as xr

from .roles import PRODUCTS, roles_of
from .terms import terms

Words = dict[str, tuple[str, str]]  # by variable: long_name and units, with the fields of `fields`
ENDS = {"_low": "lower", "_high": "upper"}
SHOWN = 3  # features that a share names
COUNT: dict[str, tuple[str, str]] = {"count": ("number of windows that the values are of", "1")}
BESIDE: Words = {
    "input_std": ("standard deviation of the {source} over the series{of_both}", "{source_unit}"),
    "at": ("share of windows whose {noun} is at most the quantile", "1"),
    "held": ("share of the sum over lags that the newest lags hold", "1"),
    "component": ("number of the eigenvector, that of the largest eigenvalue first", "1"),
    "resamples": ("number of resamples that intervals are from", "1"),
    "leaves": ("number of leaves, equal stretches of time, that hold windows", "1"),
    "block": ("number of neighbouring leaves that are resampled together", "1"),
}


def named(found: xr.Dataset, words: Words, dataset: xr.Dataset, stored: Mapping[str, str] | None = None) -> xr.Dataset:
    """The answer with `long_name` and `units` of its own on every variable, and on what the statistic adds as labels.

    words: of the statistic. dataset: what was asked, which says what an entry is and in which units. stored: units of
    variables that are the store's own, and keep what it says of them.
    """
    known, stored = fields(dataset), stored or {}
    made = found.copy()
    for name in map(str, made.variables):
        if name in stored:
            made[name].attrs = {"units": stored[name].format(**known)} | made[name].attrs
            continue
        if name in words or name in made.data_vars:
            long_name, units = _of(name, words, made)
        elif name in BESIDE:
            long_name, units = BESIDE[name]
        else:
            continue
        made[name].attrs = {"long_name": long_name.format(**known), "units": units.format(**known)}
    return made


def _of(name: str, words: Words, found: xr.Dataset) -> tuple[str, str]:
    """The words for a variable. An interval's ends have those of what it is of, its level and its kind."""
    base, edge = next(((name.removesuffix(one), one) for one in ENDS if name.endswith(one)), (name, ""))
    if name not in words and edge and base in found:
        long_name, units = _of(base, words, found)
        return end_of(long_name, edge, found.attrs["ci"], found.attrs["ci_method"]), units
    return words.get(name, (f"{name.replace('_', ' ')} of the {{noun}}", "not stated"))


def end_of(long_name: str, edge: str, level: float, kind: str) -> str:
    return f"{ENDS[edge]} end of the {100 * level:g} % interval of: {long_name} ({kind})"


def fields(dataset: xr.Dataset) -> dict[str, str]:
    """What words are filled with. noun, letter: of an entry, such as derivative, J; unit: its own; scaled: that of an
    entry × the standard deviation of what it is by; output: of the output; source, source_unit: of what it is by;
    over: what importance is averaged over; features: whose importance a share is of.
    """
    own = terms(roles_of(dataset))
    output = units_of_output(dataset)
    std = "input_std" in dataset.coords and PRODUCTS[roles_of(dataset).product].scaled
    both = "both" in own.times
    return {
        "noun": own.noun,
        "letter": own.letter,
        "unit": f"{output}{own.per}",
        "scaled": f"{output}{own.left if std else own.per}",
        "output": output,
        "source": own.source,
        "source_unit": f"{'squared ' * both}units of the {own.source}",
        "of_both": f", multiplied by that of the second {own.source}" if both else "",
        "std": own.times if std else "",
        "over": f"windows and {own.lag}s" if own.lag else "windows",
        "features": shared_by(dataset),
    }


def units_of_output(dataset: xr.Dataset) -> str:
    """As the store has them, else in words."""
    known = dataset["prediction"].attrs.get("units") if "prediction" in dataset else None
    return str(known or "units of the output")


def shared_by(dataset: xr.Dataset) -> str:
    """Whose importance a share is of: "rain, heat, wind and 4 other features together", or "rain alone"."""
    roles = roles_of(dataset)
    dim = roles.of("feature")[0] if roles.of("feature") else "feature"
    if dim not in roles.labels.coords and dim not in dataset.coords:
        return "the whole"
    labels = (roles.labels if dim in roles.labels.coords else dataset)[dim].values
    names = [str(name) for name in np.atleast_1d(labels).tolist()]
    if len(names) == 1:
        return f"{names[0]} alone, the only {dim} asked for"
    rest = len(names) - SHOWN
    if rest <= 0:
        return f"{', '.join(names[:-1])} and {names[-1]} together"
    return f"{', '.join(names[:SHOWN])} and {rest} other {dim}s together"


def escaped(text: str) -> str:
    """A text of the user's, whose braces stand for themselves."""
    return text.replace("{", "{{").replace("}", "}}")


def noted(found: xr.Dataset, *notes: str) -> xr.Dataset:
    """With these notes beside those that it has; a command prints them."""
    every = [one for one in (found.attrs.get("note", ""), *notes) if one]
    return found.assign_attrs(note="; ".join(every)) if every else found
