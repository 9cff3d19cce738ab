"""The pictures of a report, each with what it shows in words."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import xarray as xr
from matplotlib.figure import Figure

from .. import plots
from ..plots import look
from . import facts, words
from .answers import Answers
from .markup import Markup, tag
from .state import State
from .vectors import svg

VECTOR_BYTES = 200_000  # more of SVG is drawn as pixels
DPI = 120


@dataclass(frozen=True)
class Shown:
    """asked: the names in `Answers` that it is drawn from. alt: what it shows, in words. caption: how it is read."""

    kind: str
    title: str
    asked: tuple[str, ...]
    alt: Callable[[xr.Dataset], str]
    caption: str


_SCALED = "{Nouns} are multiplied by {std}, so that features can be compared."
SHOWN = (
    Shown(
        "importance", "Importance", ("importance",), words.of_importance, "Mean |{letter}| over windows{lags}. {scaled}"
    ),
    Shown(
        "lag-profile",
        "Lag profile",
        ("mean-abs",),
        words.of_profile,
        "{right}",
    ),
    Shown(
        "lag-band",
        "How much that varies",
        ("mean-abs", "size-quantiles"),
        words.of_band,
        "A narrow band: windows agree. A wide one: the answer depends on the moment.",
    ),
    Shown(
        "heatmap",
        "Features by lag",
        ("mean-abs",),
        words.of_heatmap,
        "Mean |{letter}|{scaling}, a row for each {item}.",
    ),
    Shown(
        "time-lag",
        "Over time",
        ("time-lag",),
        words.of_times,
        "Each column is a stretch of the record{newest}; grey where there is no {noun}.",
    ),
    Shown(
        "month-lag",
        "Through the year",
        ("month-lag",),
        words.of_groups,
        "Each row is a part of the year, all years together.",
    ),
    Shown(
        "step-lag",
        "By output step",
        ("mean-abs",),
        words.of_steps,
        "Each row is a step of the output, the sum over {item}s.",
    ),
    Shown(
        "distribution",
        "Distribution of {nouns}",
        ("spread",),
        words.of_distribution,
        "{left_of_zero}",
    ),
    Shown(
        "window",
        "The window with the largest {noun}",
        ("window",),
        words.of_window,
        "{window}",
    ),
)


Section = tuple[str, str, Markup]  # id, heading, all of it


def pictures(state: State, answers: Answers) -> Iterator[Section]:
    """Those that there are numbers for."""
    for one in SHOWN:
        if answers.said and _fits(one, answers):
            yield _section(_said(one, answers), _found(one, answers), state)


def _fits(one: Shown, answers: Answers) -> bool:
    if any(name not in answers for name in one.asked):
        return False
    if plots.KINDS[one.kind].lagged and not answers.terms.lag:
        return False
    if one.kind == "month-lag":
        return words.of_several_groups(answers["month-lag"])
    return one.kind != "step-lag" or answers["mean-abs"].sizes["output_step"] > 1


def _said(one: Shown, answers: Answers) -> Shown:
    """Its title and caption with the words for what the report is of."""
    own = answers.terms
    nouns = facts.told(own.nouns)
    lag = "lag" if own.plain else own.lag
    raises = "a rise of the input lowers the output" if own.plain else f"{own.nouns} are negative"
    window = (
        "What went in, and the derivative of the output by it. Orange: a rise raises the output; blue: lowers it."
        if own.plain
        else f"The {own.nouns} of one window. Orange: positive; blue: negative."
    )
    zero = "the output's own step" if answers.by_own_step else "the window's newest step, on the right"
    newest = f"Lag 0 is {zero}." if lag == "lag" else "The last step is on the right."
    std = own.scaling.replace(" × ", "").replace("std", "standard deviation")
    named = {
        **{"letter": own.letter, "noun": own.noun, "nouns": own.nouns, "Nouns": nouns, "item": own.item},
        **{"scaling": own.scaling if answers.scaled else "", "lags": f" and {lag}s" if lag else ""},
        **{"newest": f", the newest {lag} below" if lag else "", "right": newest, "window": window},
        **{"left_of_zero": f"Left of zero: {raises}.", "scaled": _SCALED.format(Nouns=nouns, std=std) * answers.scaled},
    }
    return replace(one, title=one.title.format(**named), caption=one.caption.format(**named).strip())


def _found(one: Shown, answers: Answers) -> xr.Dataset:
    return xr.merge([answers[name] for name in one.asked], join="exact", compat="override", combine_attrs="override")


def _section(one: Shown, found: xr.Dataset, state: State) -> Section:
    alt = words.one_line(one.alt(found))
    picture = embedded(plots.draw(found, one.kind), f"p-{one.kind}", alt, f"Picture: {one.title}")
    command = f"sensitivity plot {state.path} {one.kind} -o {one.kind}.svg"
    caption = tag("figcaption", one.caption, " ", tag("code", command))
    key = f"picture-{one.kind}"
    return key, one.title, tag("section", tag("h3", one.title), tag("figure", picture, caption), id=key)


def embedded(picture: Figure, key: str, alt: str, name: str) -> Markup:
    """As vectors where these are few, else as pixels on a light card."""
    scrolls = {"tabindex": "0", "role": "region", "aria_label": name}
    drawn = svg(picture, key, alt)
    if len(drawn) <= VECTOR_BYTES:
        return tag("div", drawn, class_="picture", **scrolls)
    file = io.BytesIO()
    with look.style():
        picture.savefig(file, format="png", dpi=DPI)
    data = Markup(f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}")
    width, height = (round(DPI * inches) for inches in picture.get_size_inches())
    return tag("div", tag("img", src=data, width=width, height=height, alt=alt), class_="picture pixels", **scrolls)
