"""Series that cannot be served, and what is said of each."""

from __future__ import annotations

import io
import os

import numpy as np
import pandas as pd
import xarray as xr

from tests.conftest import frame
from tests.jobs.bad_files import (
    FORMATS,
    GARBAGE,
    array,
    cells,
    content,
    dataset,
    directory,
    gzipped,
    parquet_twice,
    pickling_zarr,
    rows,
    table,
    torn,
    zarr_array,
    zarr_with,
)


def arrays() -> bytes:
    written = io.BytesIO()
    np.savez(written, rain=np.zeros(60))
    return written.getvalue()


def days(n: int = 60, **variables: tuple[str, ...]) -> xr.Dataset:
    """Zeros along these dimensions."""
    return xr.Dataset(
        {name: (dims, np.zeros([{"time": n}.get(d, 3) for d in dims])) for name, dims in variables.items()},
        coords={"time": pd.date_range("2020", periods=n)},
    )


PARQUET_NESTED = table(lambda found: found.assign(rain=[{"mm": x} for x in found["rain"]]))
PARQUET_LISTS = table(lambda found: found.assign(rain=[[x, x] for x in found["rain"]]))
TIMED = 'time = "time"'
RECORDS = np.zeros(60, [("rain", "f8"), ("heat", "f8")])

# What stands in the file, the file's name, further lines of [series], and what is said.
SERIES: dict[str, tuple] = {
    "no bytes": (content(""), "x.csv", TIMED, "x.csv (EmptyDataError"),
    "line breaks only": (content("\n\n\n"), "x.csv", TIMED, "x.csv"),
    "header only": (rows(), "x.csv", TIMED, "no steps"),
    "no header": (content("2020-01-01,1,2\n2020-01-02,3,4\n"), "x.csv", TIMED, "series.time"),
    "NUL in a cell": (rows("2020-01-01,1\0,2", "2020-01-02,1,2"), "x.csv", TIMED, "'rain'"),
    "a row too long": (rows("2020-01-01,1,2", "2020-01-02,1,2,3"), "x.csv", TIMED, "line 3"),
    "all rows too long": (rows("2020-01-01,1,2,3", "2020-01-02,1,2,3"), "x.csv", TIMED, "more values than"),
    "a row too short": (rows("2020-01-01", "2020-01-02"), "x.csv", TIMED, "values are missing"),
    "quote without end": (rows('2020-01-01,"1,2', "2020-01-02,1,2"), "x.csv", TIMED, "x.csv"),
    "semicolons": (content("time;rain;heat\n2020-01-01;1;2\n"), "x.csv", TIMED, "commas"),
    "decimal commas": (rows('2020-01-01,"1,5",2', '2020-01-02,"1,5",2'), "x.csv", TIMED, "row 1: '1,5'"),
    "text in a column": (cells("rain", 8, "dry"), "x.csv", TIMED, "row 8: 'dry'"),
    "text column": (table(lambda found: found.assign(rain="a")), "x.csv", TIMED, "'rain'"),
    "dates in a column": (table(lambda found: found.assign(rain=found["time"])), "x.csv", TIMED, "'rain'"),
    "a number too large": (cells("rain", 8, 1e39), "x.csv", TIMED, "'rain'"),
    "complex": (cells("rain", 8, "1+2j"), "x.csv", TIMED, "row 8: '1+2j'"),
    "hexadecimal": (cells("rain", 8, "0x1F"), "x.csv", TIMED, "row 8: '0x1F'"),
    "column twice": (content("time,rain,rain\n2020-01-01,1,2\n2020-01-02,1,2\n"), "x.csv", TIMED, "rain, 2 columns"),
    "column twice, one wanted": (
        content("time,rain,rain\n2020-01-01,1,2\n2020-01-02,1,2\n"),
        "x.csv", 'features = ["rain", "time"]', "rain, 2 columns",
    ),
    "column twice in Parquet": (parquet_twice, "x.parquet", TIMED, "heat, 2 columns"),
    "labels twice": (
        dataset(days(all=("time", "feature")).assign_coords(feature=["a", "b", "a"])), "x.nc", TIMED, "a, 2 columns"
    ),
    "time twice": (content("time,time,rain\n2020-01-01,1,2\n2020-01-02,1,2\n"), "x.csv", TIMED, "time, 2 columns"),
    "three features": (table(lambda found: found.assign(wind=1.0)), "x.csv", TIMED, "series.features"),
    "times only": (table(lambda found: found[["time"]]), "x.csv", TIMED, "series.features"),
    "time repeated": (cells("time", 8, "2020-01-01 06:00:00"), "x.csv", TIMED, "row 8: "),
    "times backward": (table(lambda found: found.iloc[::-1]), "x.csv", TIMED, "row 2: "),
    "time missing": (cells("time", 8, None), "x.csv", TIMED, "row 8: "),
    "time not of this world": (cells("time", 8, "2020-02-30 00:00:00"), "x.csv", TIMED, "row 8: "),
    "year 10000": (rows("9999-12-31,1,2", "10000-01-01,1,2"), "x.csv", TIMED, "row 2: "),
    "times are numbers and NaN": (rows("1,1,2", ",1,2", "3,1,2"), "x.csv", TIMED, "row 2: "),
    "times infinite": (rows("1,1,2", "inf,1,2", "3,1,2"), "x.csv", TIMED, "row 2: "),
    "times of truth": (rows("True,1,2", "False,1,2", "True,1,2"), "x.csv", TIMED, "row 1: "),
    "too short": (table(lambda found: found[:5]), "x.csv", TIMED, "windows.length"),
    "one step": (table(lambda found: found[:1]), "x.csv", TIMED, "windows.length"),
    "all NaN": (table(lambda found: found.assign(rain=np.nan)), "x.csv", TIMED, "values are missing"),
    "all infinite": (table(lambda found: found.assign(rain=np.inf)), "x.csv", TIMED, "values are missing"),
    "gaps in every window": (
        table(lambda found: found.assign(rain=found["rain"].where(found.index % 5 > 0))), "x.csv", TIMED, "every window"
    ),
    "Latin-1": (content("time,rain,W\xe4rme\n".encode("latin-1")), "x.csv", TIMED, "UTF-8"),
    "UTF-16": (content("time,rain,heat\n".encode("utf-16")), "x.csv", TIMED, "UTF-8"),
    "folder": (directory, "x.csv", TIMED, "a directory"),
    "pipe": (os.mkfifo, "x.csv", TIMED, "read twice"),
    "device": (lambda file: file.symlink_to("/dev/zero"), "x.csv", TIMED, "x.csv"),
    "link to itself": (lambda file: file.symlink_to(file), "x.csv", TIMED, "x.csv"),
    "not compressed": (rows("2020-01-01,1,2"), "x.csv.gz", TIMED, "x.csv.gz"),
    "compressed nothing": (gzipped(""), "x.csv.gz", TIMED, "x.csv.gz"),
    "compressed garbage": (lambda file: gzipped(GARBAGE.decode("latin-1"))(file), "x.csv.gz", TIMED, "series.time"),
    "lists in a column": (PARQUET_LISTS, "x.parquet", TIMED, "rain"),
    "nested column": (PARQUET_NESTED, "x.parquet", TIMED, "rain"),
    "bytes in a column": (table(lambda found: found.assign(rain=b"\xff")), "x.parquet", TIMED, "'rain'"),
    "a CSV by another name": (lambda file: frame(60).to_csv(file), "x.parquet", TIMED, "x.parquet"),
    "text in Parquet": (table(lambda found: found.assign(rain="wet")), "x.parquet", TIMED, "'rain'"),
    "objects": (array(np.array([{"a": 1}, None], object)), "x.npy", "", "x.npy"),
    "three axes": (array(np.zeros((60, 6, 2))), "x.npy", "", "(60, 6, 2)"),
    "no axes": (array(np.float64(1)), "x.npy", "", "shape ()"),
    "no columns": (array(np.zeros((60, 0))), "x.npy", "", "series.features"),
    "no rows": (array(np.zeros((0, 2))), "x.npy", "", "no steps"),
    "records": (array(RECORDS), "x.npy", "", "x.npy"),
    "complex numbers": (array(np.zeros((60, 2), complex)), "x.npy", "", "complex128"),
    "text": (array(np.full((60, 2), "a")), "x.npy", "", "dtype <U1"),
    "dates": (array(np.zeros((60, 2), "M8[s]")), "x.npy", "", "datetime64"),
    "times of a bare array": (array(np.zeros((60, 2))), "x.npy", TIMED, "series.time"),
    "an archive of arrays": (content(arrays()), "x.npy", "", "x.npy"),
    "no variables": (dataset(xr.Dataset()), "x.nc", TIMED, "series.time"),
    "no numeric variables": (
        dataset(days().assign(rain=("time", ["a"] * 60))), "x.nc", TIMED, "without numeric columns",
    ),
    "time of two axes": (dataset(days(rain=("time", "place"))), "x.nc", 'time = "rain"', "one-dimensional"),
    "steps along another axis": (dataset(days(rain=("place", "band"))), "x.nc", TIMED, "without numeric columns"),
    "variables of several lengths": (dataset(days(a=("x",)).assign(b=("y", [1.0]))), "x.nc", "", "dimensions"),
    "complex variables": (zarr_array(dtype="c16"), "x.zarr", "", "complex128"),
    "a Zarr of three axes": (zarr_array(shape=(60, 6, 2)), "x.zarr", "", "(60, 6, 2)"),
    "empty Zarr": (directory, "x.zarr", TIMED, "x.zarr"),
    "torn metadata": (zarr_with("zarr.json", '{"zarr_format": 3, "node'), "x.zarr", TIMED, "x.zarr"),
    "metadata of garbage": (zarr_with("zarr.json", GARBAGE), "x.zarr", TIMED, "x.zarr"),
    "metadata of nothing": (zarr_with("zarr.json", "null"), "x.zarr", TIMED, "x.zarr"),
    "torn metadata of a variable": (zarr_with("rain/zarr.json", "{"), "x.zarr", TIMED, "x.zarr"),
    "unknown codec": (
        zarr_with(
            "rain/zarr.json",
            '{"zarr_format": 3, "node_type": "array", "shape": [60], "data_type": "float64", "fill_value": 0,'
            '"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [60]}}, "codecs": [{"name": "magic"}],'
            '"chunk_key_encoding": {"name": "default"}, "attributes": {}, "dimension_names": ["time"]}',
        ), "x.zarr", TIMED, "magic",
    ),
    "chunk of garbage": (zarr_with("rain/c/0", GARBAGE), "x.zarr", TIMED, "x.zarr"),
    "pickled objects": (pickling_zarr, "x.zarr", "", "x.zarr"),
    "a file where a folder should be": (content(GARBAGE), "x.zarr", TIMED, "x.zarr"),
    "ending in other letters": (content("a"), "x.CSV", TIMED, ".csv"),
    **{f"garbage in {form}": (content(GARBAGE), f"x.{form}", "", f"x.{form}") for form in FORMATS[:-1]},
    **{f"torn {form}": (torn(0.5), f"x.{form}", "" if form == "npy" else TIMED, f"x.{form}") for form in FORMATS[1:-1]},
}  # fmt: skip
