"""Results as people and programs read them: a table, CSV, JSON."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
from dataclasses import dataclass

Rows = list[dict[str, object]]
WIDE = 200  # where there is no terminal to fit into
LOW, HIGH = "_low", "_high"
STATISTICS_BEGIN = ("count", "count_a", "windows")
SINGLE = ("output_step", "output")  # labels that most models have one of


def render(rows: Rows, form: str) -> str:
    """`rows` as "table", "csv" or "json" (a list of objects), without a trailing newline."""
    if form == "json":
        return json.dumps(rows, indent=1, allow_nan=False)
    if form == "csv":
        return _csv(rows)
    return table(rows)


def _csv(rows: Rows) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")


def table(rows: Rows, title: str | None = None) -> str:
    """Rows as a table that fits: columns that do not are put below, beside the same labels.

    An interval stands in one column with what it is of; labels that are the same throughout are left out.
    """
    if not rows:
        return "nothing found"
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE
    columns = _columns(rows)
    labels = [column for column in columns if column.label]
    parts = [list(labels)]
    for column in columns:
        if column.label:
            continue
        if sum(one.width for one in parts[-1]) + column.width >= width and len(parts[-1]) > len(labels):
            parts.append(list(labels))
        parts[-1].append(column)
    text = "\n\n".join(_drawn(part) for part in parts)
    return f"{title}\n{text}" if title else text


@dataclass(frozen=True)
class _Column:
    name: str
    cells: list[str]
    label: bool
    left: bool

    @property
    def width(self) -> int:
        """With what stands between columns."""
        return max(map(len, [self.name, *self.cells])) + 3


def _columns(rows: Rows) -> list[_Column]:
    names = list(rows[0])
    first = next((names.index(name) for name in STATISTICS_BEGIN if name in names), 0)
    found = []
    for i, name in enumerate(names):
        values = [row[name] for row in rows]
        label = i < first
        if name.endswith((LOW, HIGH)) and name.rpartition("_")[0] in names:
            continue
        if label and len(rows) > 1 and name in SINGLE and len(set(map(str, values))) == 1:
            continue
        cells = [_cell(value) for value in values]
        if f"{name}{LOW}" in names:
            ends = [(_cell(row[f"{name}{LOW}"]), _cell(row[f"{name}{HIGH}"])) for row in rows]
            cells = [f"{cell} ({low} … {high})" for cell, (low, high) in zip(cells, ends, strict=True)]
        found.append(_Column(name, cells, label, any(isinstance(value, str) for value in values)))
    return found


def _drawn(columns: list[_Column]) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        drawn.add_column(Text(column.name), justify="left" if column.left else "right", no_wrap=True)
    for cells in zip(*(column.cells for column in columns), strict=True):
        drawn.add_row(*map(Text, cells))
    text = io.StringIO()
    wide = max(WIDE, sum(column.width for column in columns))
    Console(file=text, width=wide, color_system=None).print(drawn)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
