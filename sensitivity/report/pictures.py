"""The pictures of a report, each with what it shows in words."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import xarray as xr
from matplotlib.figure import Figure

from .. import plots
from ..plots import look
from . import words
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


_SCALED = "Derivatives are multiplied by the input's standard deviation, so that features can be compared."
SHOWN = (
    Shown(
        "importance", "Importance", ("importance",), words.of_importance, f"Mean |J| over windows and lags. {_SCALED}"
    ),
    Shown(
        "lag-profile",
        "Lag profile",
        ("mean-abs",),
        words.of_profile,
        "Lag 0 is the window's newest step, on the right.",
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
        "Mean |J| × the input's std, a row for each feature.",
    ),
    Shown(
        "time-lag",
        "Over time",
        ("time-lag",),
        words.of_times,
        "Each column is a stretch of the record, the newest lag below; grey where there is no derivative.",
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
        "Each row is a step of the output, the sum over features.",
    ),
    Shown(
        "distribution",
        "Distribution of derivatives",
        ("spread",),
        words.of_distribution,
        "Left of zero: a rise of the input lowers the output.",
    ),
    Shown(
        "window",
        "The window with the largest derivative",
        ("window",),
        words.of_window,
        "What went in, and the derivative of the output by it. Orange: a rise raises the output; blue: lowers it.",
    ),
)


Section = tuple[str, str, Markup]  # id, heading, all of it


def pictures(state: State, answers: Answers) -> Iterator[Section]:
    """Those that there are numbers for."""
    for one in SHOWN:
        if answers.said and _fits(one, answers):
            yield _section(one, _found(one, answers), state)


def _fits(one: Shown, answers: Answers) -> bool:
    if any(name not in answers for name in one.asked):
        return False
    if one.kind == "month-lag":
        return words.of_several_groups(answers["month-lag"])
    return one.kind != "step-lag" or answers["mean-abs"].sizes["output_step"] > 1


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
