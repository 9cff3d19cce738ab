from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr
from hypothesis import given
from hypothesis import strategies as st

from sensitivity.addresses import place_at
from sensitivity.errors import Refused
from sensitivity.folders import Folder
from sensitivity.readers import blocks
from sensitivity.readers.columns import require_once
from sensitivity.sections import Scaling, SeriesSection
from sensitivity.series import first_windows, ingest, ingested, is_sliceable, open_series
from sensitivity.survey import survey
from sensitivity.times import TimeAxis
from sensitivity.windows import Windows
from tests.conftest import cut, frame

FORMATS = ("csv", "csv.gz", "parquet", "nc", "zarr", "npy")


def write(table: pd.DataFrame, path, form: str) -> SeriesSection:
    file = path / f"series.{form}"
    time: str | None = "time"
    if form.startswith("csv"):
        table.to_csv(file, index=False)
    elif form == "parquet":
        table.to_parquet(file)
    elif form == "nc":
        table.set_index("time").to_xarray().to_netcdf(file)
    elif form == "zarr":
        table.set_index("time").to_xarray().to_zarr(file, consolidated=False)
    else:
        np.save(file, table.drop(columns="time").to_numpy())
        time = None
    features = ["rain", "heat"] if form in ("npy", "zarr") else None  # neither keeps an order of names
    return SeriesSection(path=str(file), time=time, features=features)


def write_csv(table: pd.DataFrame, path) -> SeriesSection:
    return write(table, path, "csv")


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_tells_the_same_series(tmp_path, form, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_STEPS", 7)
    table = frame(50)
    table.loc[[6, 7, 20, 21, 22, 49], "rain"] = np.nan
    table.loc[8, "heat"] = np.inf
    found = survey(write(table, tmp_path, form))
    values = table.drop(columns="time").replace(np.inf, np.nan)
    assert found.features == ("rain", "heat")
    assert found.steps == 50
    assert found.missing == ((6, 9), (20, 23), (49, 50))
    np.testing.assert_allclose(found.mean, values.mean(), rtol=1e-12)
    np.testing.assert_allclose(found.std, values.std(ddof=0), rtol=1e-12)
    if form != "npy":
        np.testing.assert_array_equal(found.times(np.arange(50)), table["time"].to_numpy())
        monkeypatch.setattr(blocks, "BLOCK_STEPS", 1000)
        assert found.fingerprint == survey(write_csv(table, tmp_path)).fingerprint


@pytest.mark.parametrize("form", FORMATS)
def test_a_series_of_any_format_is_read_from_an_object_store(tmp_path, form, s3):
    section = write(frame(50), tmp_path, form)
    folder, bucket = Folder(tmp_path), place_at(s3.home)
    for name in folder.files():
        bucket.write(name, folder.read(name))
    remote = section.model_copy(update={"path": f"{s3.home}/series.{form}"})
    assert survey(remote) == survey(section)
    assert is_sliceable(remote, survey(section)) == (form in ("zarr", "parquet", "nc"))
    with pytest.raises(Refused, match=f"s3://.*gone.{form}"):
        survey(section.model_copy(update={"path": f"{s3.home}/gone.{form}"}))


@pytest.mark.parametrize("form", FORMATS)
def test_workers_read_only_the_steps_of_their_windows(tmp_path, form, monkeypatch):
    table = frame(300)
    section = write(table, tmp_path, form)
    found = survey(section)
    if form in ("csv", "csv.gz", "parquet"):
        ingest(section, found, Folder(tmp_path).zarr("copy.zarr"))
        section = ingested(section, found, str(tmp_path / "copy.zarr"))
        assert survey(section) == found
    series = open_series(section, "float64")
    asked = []
    read = series._reader.read
    monkeypatch.setattr(series._reader, "read", lambda start, stop: asked.append((start, stop)) or read(start, stop))
    windows, whole = series.windows(Windows(300, 10, 3), 20, 24)
    assert asked == [(60, 79)]
    assert whole.all()
    np.testing.assert_array_equal(windows, cut(table.drop(columns="time").to_numpy(), 10, 3)[20:24])


def test_a_csv_is_not_entered_in_the_middle(tmp_path):
    with pytest.raises(TypeError, match="ingest"):
        open_series(write_csv(frame(20), tmp_path), "float32")


def test_scaling_is_done_in_double_precision(tmp_path):
    table = frame(30)
    table["rain"] += 1e6
    section = write(table, tmp_path, "zarr")
    section = section.model_copy(update={"scaling": Scaling(mean=[1e6, 0.0], std=[2.0, 1.0])})
    windows, _ = open_series(section, "float32").windows(Windows(30, 5), 0, 1)
    expected = ((table[["rain", "heat"]].to_numpy()[:5] - [1e6, 0.0]) / [2.0, 1.0]).astype("float32")
    np.testing.assert_array_equal(windows[0], expected)


def mangle(change) -> pd.DataFrame:
    table = frame(40)
    table["time"] = table["time"].astype(str)
    return change(table)


def set_time(row: int, value):
    def change(table):
        table.loc[row, "time"] = value
        return table

    return change


@pytest.mark.parametrize(
    ("change", "row", "what"),
    [
        (set_time(10, "2020-01-01 09:00:00"), "row 11", "the same time again"),
        (lambda table: table.drop(index=[5, 6]), "row 6", "another step than before"),
        (lambda table: table.iloc[[*range(20), *range(10, 40)]], "row 21", "back in time"),
        (lambda table: table.iloc[::-1], "row 2", "back in time"),
        (set_time(10, "rubbish"), "row 11", "no time that can be read"),
        (set_time(10, None), "row 11", "no time that can be read"),
        (lambda table: table.assign(time=table["time"].str[11:]), "row 1", "without its date"),
    ],
)
def test_times_that_are_not_regular_are_refused_with_the_first_offending_row(tmp_path, change, row, what, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_STEPS", 10)
    with pytest.raises(Refused) as refusal:
        survey(write_csv(mangle(change), tmp_path))
    assert refusal.value.key == "series.time"
    assert f"{row}: " in str(refusal.value)
    assert what in str(refusal.value)


@pytest.mark.parametrize(
    "times",
    [
        pd.date_range("2000-01-01", periods=40, freq="MS"),
        pd.date_range("2000-01-31", periods=40, freq="3ME"),
        pd.date_range("1000-01-01", periods=40, freq="YS", unit="s"),
        pd.date_range("2020-03-28", periods=40, freq="h", tz="Europe/Berlin").tz_convert("UTC").tz_localize(None),
        np.arange(1900, 1940),
        np.arange(40) * 0.1,
    ],
    ids=["months", "quarter ends", "years before 1677", "hours", "integers", "fractions"],
)
def test_regular_times_of_every_kind(tmp_path, times):
    table = frame(40).assign(time=times)
    axis = survey(write_csv(table, tmp_path)).axis
    labels = axis.at(np.arange(40))
    expected = pd.Series(times).to_numpy()
    if axis.kind == "number":
        np.testing.assert_allclose(labels, expected, rtol=1e-12)
    else:
        np.testing.assert_array_equal(labels, expected.astype("datetime64[us]"))


def test_a_month_left_out_is_refused(tmp_path):
    table = frame(40).assign(time=pd.date_range("2000-01-01", periods=40, freq="MS")).drop(index=30)
    with pytest.raises(Refused, match="row 31"):
        survey(write_csv(table, tmp_path))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"features": ["rain", "snow"]}, "series.features"),
        ({"time": "tme"}, "series.time"),
        ({"time": None}, "series column 'time'"),
    ],
)
def test_columns_that_are_not_there_or_not_numbers_are_refused(tmp_path, changes, key):
    section = write_csv(frame(20), tmp_path).model_copy(update=changes)
    with pytest.raises(Refused) as refusal:
        survey(section)
    assert refusal.value.key == key


def test_text_among_numbers_is_refused_with_its_row(tmp_path):
    table = frame(20).astype({"rain": str})
    table.loc[3, "rain"] = "much"
    with pytest.raises(Refused, match="row 4: 'much'"):
        survey(write_csv(table, tmp_path))


@pytest.mark.parametrize(
    ("name", "content"),
    [("x.csv", b""), ("x.csv", b"a,b\n"), ("x.parquet", b"junk"), ("x.nc", b"junk"), ("x.npy", b"junk")],
)
def test_unreadable_and_empty_files_are_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Refused):
        survey(SeriesSection(path=str(tmp_path / name)))


def test_layouts_of_zarr_and_netcdf(tmp_path):
    values = np.arange(40.0).reshape(20, 2)
    labelled = xr.Dataset(
        {"v": (("time", "site"), values)}, coords={"site": np.array(["a", "b"], object), "time": np.arange(20)}
    )
    labelled.to_zarr(tmp_path / "labelled.zarr", consolidated=False)
    zarr.save_array(tmp_path / "bare.zarr", values)
    for name, features in (("labelled", ["b", "a"]), ("bare", ["feature_1", "feature_0"])):
        section = SeriesSection(path=str(tmp_path / f"{name}.zarr"), features=features)
        assert survey(section).features == tuple(features)
        series = open_series(section, "float64")
        np.testing.assert_array_equal(series.windows(Windows(20, 3), 4, 5)[0][0], values[4:7, ::-1])


@pytest.mark.parametrize("array", [np.zeros((3, 4, 5)), np.array(["a", "b"]), np.zeros((4, 2))])
def test_bare_arrays_that_are_no_series_are_refused(tmp_path, array):
    np.save(tmp_path / "x.npy", array)
    time = "time" if array.ndim == 2 else None
    with pytest.raises(Refused):
        survey(SeriesSection(path=str(tmp_path / "x.npy"), time=time))


geometry = st.tuples(st.integers(1, 60), st.integers(1, 15), st.integers(1, 20))


@given(geometry, st.lists(st.booleans(), min_size=60, max_size=60), st.data())
def test_window_geometry_against_brute_force(shape, gaps, data):
    steps, length, stride = shape
    windows = Windows(steps, length, stride)
    missing = np.array(gaps[:steps])
    edges = np.flatnonzero(np.diff(missing.astype(int), prepend=0, append=0)).reshape(-1, 2)
    runs = tuple((int(start), int(stop)) for start, stop in edges)
    starts = [start for start in range(0, steps, stride) if start + length <= steps]
    touched = np.array([missing[start : start + length].any() for start in starts], bool)
    assert windows.count == len(starts)
    assert windows.skipped_count(runs) == touched.sum()
    np.testing.assert_array_equal(windows.whole(runs, steps), np.flatnonzero(~touched))
    if starts:
        first = data.draw(st.integers(0, len(starts) - 1))
        last = data.draw(st.integers(first + 1, len(starts)))
        np.testing.assert_array_equal(windows.skipped(runs, first, last), touched[first:last])
        assert windows.span(first, last) == (starts[first], starts[last - 1] + length)
        np.testing.assert_array_equal(windows.last_steps(first, last), np.array(starts[first:last]) + length - 1)


def test_time_axis_goes_through_json():
    axis = TimeAxis("datetime", 0, 10)
    assert TimeAxis(**vars(axis)) == axis


def test_values_beyond_the_dtype_are_refused(tmp_path):
    table = frame(20)
    table.loc[3, "heat"] = -1e300
    section = write_csv(table, tmp_path)
    found = survey(section)
    assert found.largest[1] == 1e300
    found.require_fits("float64", section)
    with pytest.raises(Refused, match="'heat'"):
        found.require_fits("float32", section)


@pytest.mark.parametrize(("column", "scale"), [("flow", 1.0), ("trust", 1e290)])
def test_labels_and_weights_beyond_the_dtype_are_refused(tmp_path, column, scale):
    table = frame(20).assign(flow=1.0, trust=1.0)
    table.loc[3, column] = 1e300
    labels = {"labels": ("flow",), "weights": "trust", "label_scaling": Scaling(mean=[0.0], std=[scale])}
    section = write_csv(table, tmp_path).model_copy(update=labels)
    found = survey(section)
    found.require_fits("float64", section)
    with pytest.raises(Refused) as refusal:
        found.require_fits("float32", section)
    assert refusal.value.key == f"series column '{column}'"


def test_labels_that_fit_once_they_are_scaled_are_taken(tmp_path):
    table = frame(20).assign(flow=1e300)
    scaling = Scaling(mean=[0.0], std=[1e290])
    section = write_csv(table, tmp_path).model_copy(update={"labels": ("flow",), "label_scaling": scaling})
    survey(section).require_fits("float32", section)


def test_columns_without_any_value_are_named(tmp_path):
    table = frame(20)
    table["empty"], table["rain"] = np.nan, np.nan
    table.to_csv(tmp_path / "s.csv", index=False)
    section = SeriesSection(path=str(tmp_path / "s.csv"), time="time")
    with pytest.raises(Refused, match=r"(?s)series.features.*'rain', 'empty', of which all 20 values are missing"):
        survey(section)


def test_damage_inside_a_store_is_refused(tmp_path):
    section = write(frame(20), tmp_path, "zarr")
    next((tmp_path / "series.zarr" / "heat" / "c").rglob("0")).write_bytes(b"damage")
    with pytest.raises(Refused) as refusal:
        survey(section)
    assert refusal.value.key == "series.path"


def test_first_windows_look_past_gaps(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_STEPS", 8)
    table = frame(40)
    table.loc[:15, "rain"] = np.nan
    found = first_windows(write_csv(table, tmp_path), Windows(40, 5), "float64", 3)
    known = cut(table[["rain", "heat"]].to_numpy(), 5)[16:]
    assert len(found) == 3
    assert all((window == known).all(axis=(1, 2)).any() for window in found)
    table["rain"] = np.nan
    with pytest.raises(Refused, match="every window"):
        first_windows(write_csv(table, tmp_path), Windows(40, 5), "float64", 3)


def test_columns_that_are_there_twice_are_told_by_their_key():
    section = SeriesSection(path="x.csv", time="t", features=["rain"], labels=["q"], weights="w")
    for name, key in {"q": "labels", "w": "weights", "t": "time", "rain": "features"}.items():
        with pytest.raises(Refused) as refusal:
            require_once([name], ["rain", "q", "w", "t", name], section)
        assert refusal.value.key == f"series.{key}"
