"""Columns of the user's own beside a run's windows: what regimes are told apart by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from ..errors import Refused


def with_columns(dataset: xr.Dataset, table: pd.DataFrame | str | Path) -> xr.Dataset:
    """The dataset with a table's columns as coordinates along time, to be asked `by` or `where`.

    table: with a column `time` (or an index of times) and, for a run with sites, `site`, each pair once; a path is of a
    CSV or Parquet file. Windows whose time, the one of their last step, the table does not have get NaN, or "" for
    texts. Raises `Refused` where no window has a row.
    """
    frame = _read(table)
    keys = ["time", *(["site"] if "site" in dataset.coords and "site" in frame else [])]
    frame = _checked(dataset, frame, keys)
    windows = pd.DataFrame({key: dataset[key].values for key in keys})
    if "site" in keys:
        windows["site"] = windows["site"].astype(str)
    found = windows.merge(frame, how="left", on=keys, sort=False, indicator="_matched")
    if not (found["_matched"] == "both").any():
        raise Refused(
            "columns",
            given=f"a table from {frame['time'].min()} to {frame['time'].max()}",
            allowed=f"rows for windows from {windows['time'].min()} to {windows['time'].max()}",
            remedy="give each row the time of a window's last step",
        )
    return dataset.assign_coords({name: ("time", _values(found[name])) for name in frame if name not in keys})


def _read(table: pd.DataFrame | str | Path) -> pd.DataFrame:
    if isinstance(table, pd.DataFrame):
        frame = table
    else:
        try:
            frame = pd.read_parquet(table) if str(table).endswith(".parquet") else pd.read_csv(table)
        except (OSError, ValueError) as error:
            raise Refused(
                "columns", given=f"{table} ({error})", allowed="a CSV or Parquet file", remedy="check the path"
            ) from error
    return frame if "time" in frame else frame.rename_axis("time").reset_index()


def _checked(dataset: xr.Dataset, frame: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """With times as the dataset has them, each key once, and no name that is taken."""
    taken = [str(name) for name in frame if name not in keys and name in dataset.variables]
    if taken:
        raise Refused("columns", given=taken[0], allowed="names that the run does not have", remedy="rename the column")
    try:
        times = frame["time"].to_numpy()
        frame = frame.assign(time=pd.to_datetime(times) if dataset["time"].dtype.kind == "M" else times)
        frame["time"] = frame["time"].astype(dataset["time"].dtype)
    except (TypeError, ValueError) as error:
        raise Refused(
            "columns",
            given=f"times that are not as the run's ({error})",
            allowed="a column `time` such as the series has",
            remedy="write dates as 2014-01-31 13:00:00, without a time zone",
        ) from error
    if "site" in keys:
        frame["site"] = frame["site"].astype(str)
    twice = frame[frame.duplicated(keys)]
    if len(twice):
        raise Refused(
            "columns",
            given=f"{' '.join(str(value) for value in twice[keys].iloc[0])} twice",
            allowed=f"each {' and '.join(keys)} once",
            remedy="drop repeated rows" if len(keys) > 1 else "drop repeated rows, or add a column `site`",
        )
    return frame


def _values(column: pd.Series) -> np.ndarray:
    if pd.api.types.is_numeric_dtype(column) or column.dropna().map(lambda value: isinstance(value, bool)).all():
        return column.to_numpy(np.float64)
    return column.astype(object).where(column.notna(), "").astype(str).to_numpy(object)
