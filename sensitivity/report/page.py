"""The page: everything in one file, which loads nothing and runs nothing but what its own hashes name."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterator
from importlib import resources

from .. import __version__
from ..commits import Failure
from ..versions import OURS
from . import facts, measures, words
from .answers import LEVEL, Answers
from .markup import Markup, joined, tag
from .pictures import pictures
from .state import State, next_commands
from .tables import tables

GENERATOR = f"{OURS} report"
_READING = (
    "J is the derivative of an output by an input at a lag: by how much the output moves for one unit more of that "
    "input at that step of the window, in units of the output per unit of the input, all else as it is. It is what the "
    "model does, not what nature does: a model that fits poorly has derivatives, too.",
    "{lags} A window is named by the time of its last step. Influence and importance are mean |J| × the input's "
    "standard deviation over the series: what one typical change of the input moves the output by, in units of the "
    "output.",
    "Derivatives are local. They hold for small changes around what was observed; inputs that move together (two "
    "sensors of one thing) share what they do in a way that only the training decided. |J| has no sign: what raises "
    "and what lowers the output adds up.",
)
_LAST_STEP = "A lag is counted back from the window's last step: lag 0 is the newest."
_OWN_STEP = (
    "The model has an output at each step of the window. A lag is counted back from the output's own step, which is "
    "lag 0{later}. Only entries that exist count: before the window's first step there is no input."
)
_INTERVALS = (
    "Intervals are {level} intervals by a circular block bootstrap over {leaves:,} stretches of the record, in blocks "
    "of {block:,}, {resamples:,} resamples: they say how much the record could have been another one of the same kind, "
    "not how good the model is. Extremes have none."
)
_CITE = (
    "To cite: name the library and version below, the run's fingerprint, and the model and series under “The run”. "
    "The numbers follow from these and from nothing else."
)


def page(state: State, answers: Answers) -> Markup:
    """The report as one HTML document."""
    style, script = (resources.files(__package__).joinpath(f"page.{kind}").read_text() for kind in ("css", "js"))
    title = f"Sensitivity of {state.name}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=f"{GENERATOR} {__version__}"),
        tag("title", title),
        Markup(f"<style>{style}</style>"),
    )
    parts = list(_parts(state, answers))
    body = tag(
        "body",
        tag("a", "To the findings", href="#findings", class_="skip"),
        tag("div", _header(state, title), _nav(parts), tag("main", *map(_part, parts)), _footer(), class_="page"),
        Markup(f"<script>{script}</script>"),
    )
    return Markup(f"<!doctype html>\n{tag('html', head, body, lang='en')}\n")


def _policy(style: str, script: str) -> str:
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    allowed = f"img-src data:; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def _header(state: State, title: str) -> Markup:
    asked = state.run.job.sensitivity
    what = (
        f"{facts.told(state.terms.nouns)} of {asked.of} by {asked.wrt}, of every window of {state.run.job.series.path}"
    )
    button = tag("button", "Dark", id="theme", type="button", hidden=True, aria_label="Light or dark colours")
    return tag("header", tag("div", tag("h1", title), tag("p", what, class_="lead")), button)


Part = tuple[str, str, list[Markup], list[tuple[str, str]]]  # id, heading, what is below it, its anchors


def _parts(state: State, answers: Answers) -> Iterator[Part]:
    yield "findings", "Findings", list(_findings(state, answers)), []
    drawn = list(pictures(state, answers))
    if drawn:
        yield "pictures", "Pictures", [one for *_, one in drawn], [(key, title) for key, title, _ in drawn]
    made = list(tables(state, answers))
    yield "tables", "Tables", [one.markup() for one in made], [(one.key, one.title) for one in made]
    yield "run", "The run", list(_run(state)), []
    if state.failed or state.odd:
        yield "failures", "Failures", list(_failures(state)), []
    yield "reading", "How to read this", list(_reading(answers)), []
    yield "next", "Going on", [_commands(state)], []


def _part(part: Part) -> Markup:
    key, heading, inside, _ = part
    return tag("section", tag("h2", heading), *inside, id=key)


def _nav(parts: list[Part]) -> Markup:
    items = []
    for key, heading, _, anchors in parts:
        below = [tag("li", tag("a", name, href=f"#{anchor}")) for anchor, name in anchors]
        items.append(tag("li", tag("a", heading, href=f"#{key}"), *([tag("ul", *below)] if below else [])))
    return tag("nav", tag("ul", *items), aria_label="Contents")


def _findings(state: State, answers: Answers) -> Iterator[Markup]:
    yield bar(state)
    said = words.coverage(state)
    if state.coverage.computed:
        said += f" What follows is of {words.plural(state.coverage.computed, 'window')}."
    whole = state.coverage.complete and state.coverage.computed > 0
    yield tag("p", said) if whole else tag("p", said, class_="notice", role="note")
    if state.driver is not None:
        yield tag("p", "A driver is at work: this is how the run stood when the report was written.", class_="notice")
    for one in (*state.run.suspicions, *measures.suspicions(answers)):
        yield tag("p", f"Suspicious: {one}.", class_="notice", role="note")
    found = list(words.findings(answers))
    if found:
        yield tag("ul", *(tag("li", one) for one in found), class_="findings")
    elif state.coverage.computed:
        lacking = "whole" in answers.refused
        why = (
            f"There is no memory for sums: {answers.refused['whole']}"
            if lacking
            else f"No {state.terms.noun} is finite."
        )
        yield tag("p", why, class_="notice", role="note")


def bar(state: State) -> Markup:
    """Coverage as a bar, and in words."""
    parts, whole = state.coverage.parts(), max(1, state.coverage.windows)
    rects, start = [], 0.0
    for name, count in parts.items():
        width = 1000 * count / whole
        rects.append(
            tag("rect", x=f"{start:.2f}", y="0", width=f"{width:.2f}", height="10", class_=name) if count else ""
        )
        start += width
    said = ", ".join(f"{count:,} {name}" for name, count in parts.items())
    drawn = {"viewBox": "0 0 1000 10", "preserveAspectRatio": "none", "role": "img"}
    legend = [
        tag("li", _mark(name), f"{name} {count:,} ({words.percent(count / whole)})")
        for name, count in parts.items()
        if count
    ]
    picture = tag("svg", *rects, aria_label=f"Coverage of {whole:,} windows: {said}.", **drawn)
    return tag("div", picture, tag("ul", *legend), class_="coverage")


def _mark(name: str) -> Markup:
    return tag(
        "svg", tag("rect", width="8", height="8", class_=name), viewBox="0 0 8 8", class_="mark", aria_hidden="true"
    )


def _run(state: State) -> Iterator[Markup]:
    for heading, values in facts.sections(state).items():
        yield tag("h3", heading)
        yield tag("dl", *(joined([tag("dt", name), tag("dd", value)]) for name, value in values))
    yield tag("h3", "Job")
    yield tag("pre", tag("code", _long(facts.job_text(state))), tabindex="0", role="region", aria_label="Job")


def _long(text: str) -> Markup:
    return joined(text.splitlines(keepends=True))


def _failures(state: State) -> Iterator[Markup]:
    rows = [tag("li", _failure(one)) for one in state.failures]
    rows += [tag("li", str(one)) for one in state.odd]
    yield tag("ul", *rows, class_="findings")
    if state.failed > len(state.failures):
        more = state.failed - len(state.failures)
        yield tag("p", f"And {more:,} more, in {state.run.place}/failures.", class_="note")


def _failure(one: Failure) -> str:
    where = f"shard {one.shard} (windows {one.start:,}–{one.stop - 1:,})"
    return f"{where}, {words.plural(one.attempts, 'attempt')}, the last on {one.host}: {one.reason}"


def _of_product(answers: Answers) -> Iterator[str]:
    """What is read, of products other than derivatives by the input."""
    own = answers.terms
    yield f"{own.letter} is {own.is_}. It is what the model does, not what nature does."
    scaled = own.scaling if answers.scaled else ""
    unit = f"in units of the output{own.left if answers.scaled else own.per}"
    size = f"Influence and importance are mean |{own.letter}|{scaled}, {unit}."
    back = f"{_lags(answers)} " if own.lag == "lag" else ""
    yield f"{back}A window is named by the time of its last step. {size} |{own.letter}| has no sign."


def _lags(answers: Answers) -> str:
    if not answers.by_own_step:
        return _LAST_STEP
    later = "; a lag below 0 is of a later input" if int(answers["mean-abs"]["lag"].min()) < 0 else ""
    return _OWN_STEP.format(later=later)


def _reading(answers: Answers) -> Iterator[Markup]:
    texts = (text.replace("{lags}", _lags(answers)) for text in _READING)
    yield from (tag("p", text) for text in (texts if answers.terms.plain else _of_product(answers)))
    found = answers.found.get("importance")
    if found is not None and "block" not in found.coords:
        yield tag(
            "p",
            f"Without intervals: these need more memory, or windows have too many {answers.terms.nouns}.",
            class_="note",
        )
    elif found is not None and bool(found["importance_low"].notnull().any()):
        known = {name: int(found[name]) for name in ("leaves", "block", "resamples")}
        yield tag("p", _INTERVALS.format(level=words.percent(LEVEL), **known))
    for what, refusal in answers.for_lack_of_memory().items():
        said = f"Left out for lack of memory: {what} ({refusal.given}, where there was room for {refusal.allowed})."
        yield tag("p", said, " With --memory it may have more.", class_="note")
    yield tag("p", _CITE)


def _commands(state: State) -> Markup:
    found = [joined([tag("dt", tag("code", command)), tag("dd", what)]) for command, what in next_commands(state)]
    python = f"sensitivity.open_run({str(state.run.place)!r})"
    found.append(joined([tag("dt", tag("code", python)), tag("dd", "in Python: an xarray.Dataset of Dask arrays")]))
    return tag("dl", *found, class_="commands")


def _footer() -> Markup:
    return tag(
        "footer",
        tag("p", f"Written {facts.moment(time.time())} by {OURS} {__version__}. It loads nothing from anywhere."),
    )
