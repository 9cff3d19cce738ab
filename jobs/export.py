"""Answers written as people and programs read them: a table, CSV, JSON, Parquet, NetCDF, Zarr."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from sensitivity.errors import Refused

from .tables import Rows, render

if TYPE_CHECKING:
    import xarray as xr

ENDINGS = {".csv": "csv", ".json": "json", ".parquet": "parquet", ".nc": "netcdf", ".zarr": "zarr", ".txt": "table"}
IN_FILES = ("parquet", "netcdf", "zarr")


def require_writable(form: str | None, output: Path | None) -> None:
    """Refuse, before anything is read, what could not be written in the end."""
    if output is None:
        if form in IN_FILES:
            raise Refused("--format", given=form, allowed="a file to write it to", remedy="add -o FILE")
        return
    if form is None and output.suffix not in ENDINGS:
        raise Refused("--output", given=output, allowed=f"a file ending in {', '.join(ENDINGS)}", remedy="add --format")
    if not output.absolute().parent.is_dir():
        raise Refused("--output", given=output, allowed="a file in an existing directory", remedy="make the directory")
    if output.is_dir() and (form or ENDINGS[output.suffix]) != "zarr":
        raise Refused("--output", given=output, allowed="a file: this is a directory", remedy="choose another name")
    if output.exists() and (form or ENDINGS[output.suffix]) == "zarr":
        raise Refused("--output", given=output, allowed="a path where nothing is yet", remedy="choose another name")


def export(found: xr.Dataset, form: str | None, output: Path | None) -> None:
    """Print a statistic, or write it; notes on what it means go to stderr."""
    from sensitivity.query import rows
    from sensitivity.suspicions import of_outputs

    for name in ("note", "ci_method"):
        if name in found.attrs:
            click.echo(f"{name.replace('_', ' ')}: {found.attrs[name]}", err=True)
    if "near_zero" in found:
        for one in of_outputs(float(found["near_zero"].max())):
            click.echo(f"suspicious: {one}", err=True)
    _write(found, rows(found), form, output)


def export_top(found: xr.Dataset, form: str | None, output: Path | None) -> None:
    """The same of the windows that `top` found: a row each."""
    _write(found, _ranked(found, nested=_form(form, output) == "json"), form, output)


def shows_windows(form: str | None, output: Path | None) -> bool:
    """Whether what `export_top` writes has each window's input and Jacobian."""
    return _form(form, output) in ("json", "netcdf", "zarr")


def _form(form: str | None, output: Path | None) -> str:
    return form or (ENDINGS[output.suffix] if output is not None else "table")


def _write(found: xr.Dataset, listed: Rows, form: str | None, output: Path | None) -> None:
    chosen = _form(form, output)
    if output is None:
        click.echo(render(listed, chosen))
    elif chosen == "parquet":
        import pandas as pd

        pd.DataFrame(listed).to_parquet(output)
    elif chosen == "netcdf":
        _plain(found).to_netcdf(output, engine="h5netcdf")
    elif chosen == "zarr":
        _plain(found).to_zarr(output, zarr_format=3, consolidated=False, mode="w-")
    else:
        output.write_text(render(listed, chosen) + "\n")
    if output is not None:
        click.echo(str(output))


def _plain(found: xr.Dataset) -> xr.Dataset:
    """Texts as objects and attributes that every format takes."""
    texts = [name for name, field in found.variables.items() if field.dtype.kind == "T"]
    attrs = {name: value for name, value in found.attrs.items() if isinstance(value, (str, int, float))}
    return found.assign({name: found[name].astype(object) for name in texts}).assign_attrs(attrs)


def _ranked(found: xr.Dataset, *, nested: bool) -> Rows:
    """One row a window: its time and site, score, where its peak is, its prediction if it has one."""
    from sensitivity.query.roles import main_of, roles_of

    where = [f"at_{dim}" for dim in reversed(roles_of(found).dims)]
    columns = ["rank", "time", "site", "score", "peak", *where]
    listed: Rows = []
    for i in range(found.sizes["rank"]):
        window = found.isel(rank=i)
        row = {name: _value(window[name]) for name in columns if name in window}
        if "prediction" in window and window["prediction"].size == 1:
            row["prediction"] = float(window["prediction"].values.reshape(-1)[0])
        if nested:
            row |= {name: _tree(window[name]) for name in ("prediction", "input", main_of(found)) if name in window}
        listed.append(row)
    return listed


def _value(field: xr.DataArray) -> Any:
    from sensitivity.query.rows import text_of

    return str(text_of(field.values)) if field.dtype.kind == "M" else field.values.item()


def _tree(field: xr.DataArray) -> dict[str, Any]:
    """`dims` and nested lists of `values`, as JSON has them: null where no entry exists."""
    values = field.values.astype(object)
    values[np.isnan(field.values)] = None
    return {"dims": list(map(str, field.dims)), "values": json.loads(json.dumps(values.tolist()))}
