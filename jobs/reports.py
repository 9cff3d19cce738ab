"""The command that writes a run up: `report`. It imports what it needs when it runs."""

from __future__ import annotations

from pathlib import Path

import click

from .commands import errors_explained
from .questions import ALIGN, RUN, damage_refused


@click.command()
@RUN
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The HTML file; by default RUN's name with .html, in the working directory.",
)
@click.option("--force", is_flag=True, help="Write over FILE even if it is no report.")
@click.option("--memory", default="2GB", show_default=True, help="What sums may take; what does not fit is left out.")
@click.option(
    "--on",
    "scheduler",
    default="threads",
    show_default=True,
    metavar="WHERE",
    help="What computes it, as for query: threads, tcp://10.0.0.5:8786, ray.",
)
@ALIGN
@errors_explained
def report(run: str, output: Path | None, force: bool, memory: str, scheduler: str, align: str | None) -> None:
    """RUN as one HTML page that stands on its own: findings, pictures, tables, facts.

    Also of a run that is not complete. It loads nothing from anywhere, and has light and dark colours.
    """
    from sensitivity.report import name_of, write
    from sensitivity.sections import parse_bytes
    from sensitivity.store import Run

    from .query_on import on

    opened = Run.open(run)
    with damage_refused(run), on(scheduler):
        file = output or Path(f"{name_of(opened)}.html")
        written = write(opened, file, memory=parse_bytes(memory), force=force, align=align)
    click.echo(str(written))
