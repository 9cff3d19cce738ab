"""The command that looks into a run's recurrent layers: `recurrent`. It imports what it needs when it runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .commands import TRUST, OneOf, errors_explained
from .questions import RUN, damage_refused, opened

if TYPE_CHECKING:
    from sensitivity.plots import Picture
    from sensitivity.recurrent import RunLayer
    from sensitivity.store import Run


@click.command()
@RUN
@click.option("--layer", "layers", multiple=True, metavar="NAME", help="Of this layer alone. May be repeated.")
@click.option("--windows", type=int, default=32, show_default=True, metavar="N", help="At most, evenly chosen.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FOLDER", help="Draw pictures into it, as PNG files."
)
@click.option("--format", "form", type=OneOf(["table", "csv", "json"]), default="table", show_default=True)
@TRUST
@errors_explained
def recurrent(
    run: str, layers: tuple[str, ...], windows: int, output: Path | None, form: str, trust_model: bool
) -> None:
    """How far back the LSTM, GRU and SimpleRNN layers of RUN's model remember, on windows of its own series.

    \b
    A row for each layer and direction:
    rate       of |∂ state at the last step / ∂ state at a lag|: its factor from one step to the next further back
    half_life  steps in which it halves
    verdict    vanishing, exploding or stable
    alarms     NaN and infinite numbers in weights and norms; or why a layer cannot be told of

    With -o also norms by lag, and weights by gate as histograms and matrices; of a RUN by one of the layers, its
    gradients over the steps.
    """
    from sensitivity.store import Run

    from .resources import hold, quiet
    from .tables import render

    whole = replace(Run.open(run), trust_model=trust_model)
    _make(output)
    with quiet():
        from sensitivity.recurrent import of_run

        hold(whole.job, gpu=False)
    with damage_refused(run):
        found = of_run(whole, layers, windows=windows)
    click.echo(render([row for layer in found for row in layer.rows], form))
    _tell(found)
    if output is not None:
        with damage_refused(run):
            _draw(whole, found, output)


def _make(output: Path | None) -> None:
    from sensitivity.errors import Refused

    if output is None:
        return
    try:
        output.mkdir(exist_ok=True)
    except OSError as error:
        raise Refused(
            "--output",
            given=f"{output} ({error.strerror})",
            allowed="a folder, or a new one in an existing directory that can be written to",
            remedy="choose another name" if output.exists() else "make the directory, or choose another",
        ) from error


def _tell(found: Sequence[RunLayer]) -> None:
    """What the rates are of, and what is not finite."""
    decays = [decay for layer in found for decay in layer.decays]
    for quantity in dict.fromkeys(decay.quantity for decay in decays):
        of = dict.fromkeys(decay.layer for decay in decays if decay.quantity == quantity)
        click.echo(f"rate a step, half-life in steps: {quantity} ({', '.join(of)})", err=True)
    for alarm in (part.alarm for layer in found for part in layer.parts if part.alarm):
        click.echo(f"NOT FINITE: {alarm}", err=True)


def _draw(run: Run, found: Sequence[RunLayer], folder: Path) -> None:
    from sensitivity.plots import save

    names = [layer.name for layer in found]
    for number, layer in enumerate(found, 1):
        called = layer.name if names.count(layer.name) == 1 else f"{layer.name} {number}"
        for what, picture in _pictures(run, layer):
            file = folder / (re.sub(r"[^\w.]+", "-", f"{called} {what}") + ".png")
            save(picture, file)
            click.echo(f"written: {file}", err=True)


def _pictures(run: Run, layer: RunLayer) -> Iterator[tuple[str, Picture]]:
    from sensitivity.recurrent import draw_run_gradients

    yield from layer.pictures()
    source = run.facts.source
    if (run.facts.product, source.kind, source.name) != ("jacobian", "layer", layer.name):
        return
    dataset, _ = opened(str(run.place), (), None)
    if (dataset["committed"] & ~dataset["skipped"]).any():
        yield from draw_run_gradients(dataset, layer)
    else:
        click.echo(f"gradients by {layer.name} are not drawn: none is computed yet", err=True)
