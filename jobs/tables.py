"""Results as people and programs read them: a table, CSV, JSON."""

from __future__ import annotations

import csv
import io
import json
import sys

Rows = list[dict[str, object]]


def render(rows: Rows, form: str) -> str:
    """`rows` as "table", "csv" or "json" (a list of objects), without a trailing newline."""
    if form == "json":
        return json.dumps(rows, indent=1, allow_nan=False)
    if form == "csv":
        return _csv(rows)
    return table(rows)


def _csv(rows: Rows) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")


def table(rows: Rows, title: str | None = None) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, value in rows[0].items():
        drawn.add_column(Text(name), justify="left" if isinstance(value, str) else "right", no_wrap=True)
    for row in rows:
        drawn.add_row(*(Text(_cell(value)) for value in row.values()))
    text = io.StringIO()
    console = Console(file=text, width=None if sys.stdout.isatty() else 200, color_system=None)
    console.print(drawn)
    lines = [line.rstrip() for line in text.getvalue().rstrip().splitlines()]
    return "\n".join([title, *lines] if title else lines)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
