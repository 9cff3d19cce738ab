"""Sites of a panel: which column or dimension tells them, and what they are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import Refused
from ..sections import SeriesSection
from .blocks import Block
from .columns import no_column

USUAL = "site"


def site_column(section: SeriesSection, names: Sequence[str]) -> str | None:
    """The column or dimension of sites: the one asked for, else one called `site` that is nothing else."""
    if section.site is False:
        return None
    if section.site is None:
        free = USUAL in names and USUAL != section.time and USUAL not in (section.features or ())
        return USUAL if free else None
    if section.site == section.time:
        raise Refused(
            "series.site",
            given=f"{section.site!r}, the time column",
            allowed="a column or dimension of its own",
            remedy="name the one that tells sites apart, or leave it out",
        )
    if section.site not in names:
        raise no_column("series.site", [section.site], names)
    return section.site


def split_by_site(column: Any, first_row: int, times: Any, values: np.ndarray) -> Iterator[Block]:
    """Rows of a table, of which `column` names the sites, as a block a site; sites in the order they come."""
    import pandas as pd

    if not len(values):
        return
    labels, found = pd.factorize(column)
    _require_named(labels < 0, first_row)
    own, known = pd.factorize(np.array(site_names(found), object))  # labels may differ in spaces
    codes, names = own[labels], known.tolist()
    _require_named(np.isin(codes, [i for i, name in enumerate(names) if not name]), first_row)
    borders = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
    if len(borders) == len(names) + 1:
        for start, stop in zip(borders, borders[1:], strict=False):
            yield Block(_some(times, slice(start, stop)), values[start:stop], names[codes[start]])
        return
    order = np.argsort(codes, kind="stable")
    for name, own_rows in zip(names, np.split(order, np.cumsum(np.bincount(codes))[:-1]), strict=True):
        yield Block(_some(times, own_rows), values[own_rows], name, mixed=True)


def _require_named(nameless: np.ndarray, first_row: int) -> None:
    if nameless.any():
        rows = ", ".join(str(first_row + i + 1) for i in np.flatnonzero(nameless)[:3])
        raise Refused(
            "series.site",
            given=f"rows without a site, first row {rows}",
            allowed="a site in every row",
            remedy="name the site there, or take the rows out",
        )


def _some(times: Any, rows: Any) -> Any:
    return times.iloc[rows] if hasattr(times, "iloc") else None if times is None else times[rows]


def site_names(labels: Any) -> list[str]:
    """Labels as text: what a CSV says and what a typed format says is then the same site."""
    return [_text(label) for label in np.asarray(labels, object).tolist()]


def _text(label: Any) -> str:
    if isinstance(label, bytes):
        label = label.decode()
    if isinstance(label, str):
        return label.strip()
    if isinstance(label, float) and label.is_integer():  # what whole numbers are read as where some are missing
        label = int(label)
    if isinstance(label, (int, np.integer)) and not isinstance(label, bool):
        return str(label)
    raise Refused(
        "series.site",
        given=f"{label!r}",
        allowed="text or whole numbers that name sites",
        remedy="name the column or dimension that tells sites apart as series.site",
    )


def require_told_apart(names: Sequence[str], path: str) -> None:
    """Refuse a dimension of sites of which two have one name, or one has none."""
    bad = [name or "nothing" for name, count in Counter(names).items() if count > 1 or not name]
    if bad:
        raise Refused(
            "series.site",
            given=f"{', '.join(bad[:3])}, as the name of several sites of {path}" if names else "no site",
            allowed="a name for every site, each once",
            remedy="name them apart",
        )
