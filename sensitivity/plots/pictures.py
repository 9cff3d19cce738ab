"""Figures: drawn from what is computed, shown in notebooks, saved to files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import dask
import xarray as xr
from matplotlib.figure import Figure

from ..query.roles import gathered, main_of
from . import look
from .kinds import KINDS, kind_of, require_drawable, wanted


class Picture(Figure):
    """A figure that a notebook shows when it is a cell's last value, also without pyplot."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        with look.style():
            self.savefig(file, format="png", dpi=110)
        return file.getvalue()


def draw(found: xr.Dataset, kind: str, *, top: int | None = None) -> Picture:
    """The picture of what `wanted` named, computed; nothing is read. top: how many features, at most, are drawn."""
    found = gathered(found)
    require_drawable(found, kind)
    with look.style():
        picture = Picture(figsize=(look.WIDTH, look.HEIGHT), layout="constrained")
        kind_of(kind).draw(found, picture, top)
    return picture


def save(picture: Figure, file: str | Path) -> None:
    """Into a PNG, SVG or PDF file, by its ending; text in SVG stays text."""
    with look.style():
        picture.savefig(file, dpi=150)


def show(source: xr.Dataset, kind: str | None = None, *, top: int | None = None, **how: Any) -> Picture:
    """One call from a run, or from a statistic, to a figure, which a notebook displays.

        plots.show(sensitivity.open_run("runs/soil"), "heatmap", where="month in (6, 7, 8)")
        plots.show(query.importance(dataset))

    source: a run's dataset, read in one pass with what `wanted` takes (how), or what `query` returned, lazy or not.
    kind: one of `KINDS`; left out, the first that source can be drawn as. top: features drawn, at most.
    """
    main = main_of(source)
    if main in source and "time" in source[main].dims:
        kind = kind or "lag-profile"
        return draw(dask.compute(wanted(source, [kind], **how))[0][kind], kind, top=top)
    if how:
        raise TypeError(f"a statistic is drawn as it is; {', '.join(how)} must be said when it is asked for")
    whole = gathered(source.compute())
    return draw(whole, kind or _first(whole), top=top)


def _first(found: xr.Dataset) -> str:
    """The kind whose variables, and groups, these are; importance before the others, which need less."""
    for name in sorted(KINDS, key=lambda name: name != "importance"):
        try:
            require_drawable(found, name)
        except ValueError:
            continue
        return name
    require_drawable(found, "lag-profile")
    raise AssertionError("unreachable")


def plot(dataset: xr.Dataset, kind: str, file: str | Path, *, top: int | None = None, **how: Any) -> None:
    """Draw `kind`, one of `KINDS`, of a run's dataset into a PNG, SVG or PDF file: `show`, saved."""
    save(show(dataset, kind, top=top, **how), file)
