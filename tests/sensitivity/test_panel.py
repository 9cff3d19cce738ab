"""Series of many sites: every form tells the same panel, windows never cross sites, slices are those asked for."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from sensitivity import series as series_module
from sensitivity import times
from sensitivity.addresses import place_at
from sensitivity.errors import Refused
from sensitivity.folders import Folder
from sensitivity.job import SeriesSection
from sensitivity.readers import blocks, datasets, open_reader, tables
from sensitivity.series import first_windows, ingest, ingested, is_sliceable, open_series
from sensitivity.survey import Survey, survey
from sensitivity.windows import Windows
from tests.conftest import cut, frame

SITES = {"01013500": 40, "NA": 4, "Isar, oben": 25}
LENGTH = 6


def panel(sites: dict[str, int] = SITES) -> dict[str, pd.DataFrame]:
    """Hourly tables by site, each with times of its own; the first and the last step of the panel are missing."""
    found = {}
    for i, (name, steps) in enumerate(sites.items()):
        table = frame(steps, seed=i)
        table["time"] += pd.Timedelta(minutes=30 + 90 * i)
        found[name] = table
    *_, last = found.values()
    found[next(iter(found))].loc[[0, 13, 14], "rain"] = np.nan
    last.loc[len(last) - 1, "heat"] = np.nan
    return found


def together(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    return pd.concat([table.assign(site=name) for name, table in tables.items()], ignore_index=True)


def mixed(table: pd.DataFrame) -> pd.DataFrame:
    """Row by row from each site, the first of each site in the order of sites."""
    return table.iloc[np.argsort(table.groupby("site").cumcount(), kind="stable")].reset_index(drop=True)


def values(table: pd.DataFrame) -> np.ndarray:
    return table[["rain", "heat"]].to_numpy()


def write(table: pd.DataFrame, path, form: str, **changes) -> SeriesSection:
    file = path / f"series.{form}"
    if form == "csv":
        table.to_csv(file, index=False)
    elif form == "parquet":
        table.to_parquet(file, row_group_size=7)
    else:
        columns = {name: ("row", table[name].to_numpy(object if name == "site" else None)) for name in table}
        stored = xr.Dataset(columns).set_coords(["time", "site"])
        stored.to_zarr(file, consolidated=False) if form == "zarr" else stored.to_netcdf(file)
    return SeriesSection(**{"path": str(file), "time": "time", "features": ["rain", "heat"], **changes})


@pytest.mark.parametrize("block_steps", [5, 1000])
@pytest.mark.parametrize("order", ["grouped", "mixed"])
@pytest.mark.parametrize("form", ["csv", "parquet", "nc", "zarr"])
def test_every_format_tells_the_same_panel(tmp_path, form, order, block_steps, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_STEPS", block_steps)
    expected = panel()
    table = together(expected)
    found = survey(write(mixed(table) if order == "mixed" else table, tmp_path, form))
    assert {site.name: site.steps for site in found.sites} == SITES
    assert list(SITES) == [site.name for site in found.sites]
    assert found.starts == (0, 40, 44)
    assert found.missing == ((0, 1), (13, 15), (68, 69))
    assert found.grouped == (order == "grouped")
    np.testing.assert_array_equal(found.times(np.arange(69)), table["time"].to_numpy())
    np.testing.assert_array_equal(found.times(np.array([3, 41, 42, 68])), table["time"].to_numpy()[[3, 41, 42, 68]])
    np.testing.assert_array_equal(found.site_of(np.arange(69)), table["site"])
    np.testing.assert_allclose(found.mean, table[["rain", "heat"]].mean(), rtol=1e-12)
    assert Survey.from_json(found.to_json()) == found
    monkeypatch.setattr(blocks, "BLOCK_STEPS", 1 << 18)
    (tmp_path / "reference").mkdir()
    assert found.fingerprint == survey(write(table, tmp_path / "reference", "csv")).fingerprint


@pytest.mark.parametrize("form", ["csv", "parquet", "zarr"])
def test_sites_that_are_mixed_stand_one_after_another_in_the_copy(tmp_path, form, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_STEPS", 9)
    monkeypatch.setattr(series_module, "INGESTED_STEPS", 16)
    monkeypatch.setattr(series_module, "HELD_BYTES", 200)
    table = together(panel())
    section = write(mixed(table), tmp_path, form)
    found = survey(section)
    assert not is_sliceable(section, found)
    ingest(section, found, Folder(tmp_path).zarr("copy.zarr"))
    copy = ingested(section, str(tmp_path / "copy.zarr"))
    again = survey(copy)
    assert (again.fingerprint, again.sites, again.grouped) == (found.fingerprint, found.sites, True)
    np.testing.assert_array_equal(open_reader(copy).read(0, 69), values(table))
    plain = xr.open_zarr(tmp_path / "copy.zarr", chunks=None, consolidated=False)
    np.testing.assert_array_equal(plain["site"], table["site"])
    shorter = write(mixed(table).iloc[:-1], tmp_path, "csv")
    with pytest.raises(Refused, match="has changed since it was surveyed"):
        ingest(shorter, found, Folder(tmp_path).zarr("other.zarr"))


def by_dimension(tables: dict[str, pd.DataFrame], dims: tuple[str, str]) -> xr.Dataset:
    first = next(iter(tables.values()))
    stacked = np.stack([values(table) for table in tables.values()])  # (site, time, feature)
    data = {name: (("site", "time"), stacked[..., i]) for i, name in enumerate(("rain", "heat"))}
    coordinates = {"site": np.array(list(tables), object), "time": first["time"].to_numpy()}
    return xr.Dataset(data, coords=coordinates).transpose(*dims)


@pytest.fixture
def square() -> dict[str, pd.DataFrame]:
    """Three sites with the same times."""
    tables = panel({"b": 30, "a": 30, "c": 30})
    for table in tables.values():
        table["time"] = tables["b"]["time"]
    return tables


@pytest.mark.parametrize("rows", [1, 20, 1000])
@pytest.mark.parametrize("dims", [("time", "site"), ("site", "time")])
@pytest.mark.parametrize("form", ["nc", "zarr"])
def test_sites_along_a_dimension(tmp_path, square, form, dims, rows, monkeypatch):
    monkeypatch.setattr(datasets, "ROWS", rows)
    dataset = by_dimension(square, dims)
    file = str(tmp_path / f"x.{form}")
    dataset.to_netcdf(file) if form == "nc" else dataset.to_zarr(file, consolidated=False)
    section = SeriesSection(path=file, time="time", features=["heat", "rain"])
    found = survey(section)
    table = together(square)
    assert [(site.name, site.steps) for site in found.sites] == [("b", 30), ("a", 30), ("c", 30)]
    np.testing.assert_array_equal(found.times(np.arange(90)), table["time"])
    read = open_reader(section).read
    for start, stop in ((0, 90), (5, 9), (25, 65), (60, 61)):
        np.testing.assert_array_equal(read(start, stop), table[["heat", "rain"]].to_numpy()[start:stop])
    assert found.fingerprint == survey(write(table, tmp_path, "csv", features=["heat", "rain"])).fingerprint


@pytest.mark.parametrize(
    ("chunks", "sliceable"), [({"time": 10, "site": 2}, True), ({"time": 10, "site": 6}, False), (None, False)]
)
def test_sites_that_lie_close_together_are_copied_apart(tmp_path, chunks, sliceable):
    """A worker that wants one of them would read the others as well, again and again."""
    tables = {str(i): frame(20, seed=i) for i in range(6)}
    dataset = by_dimension(tables, ("time", "site"))
    sizes = chunks and {name: {"chunksizes": tuple(chunks.values())} for name in ("rain", "heat")}
    dataset.to_netcdf(tmp_path / "x.nc", encoding=sizes)
    section = SeriesSection(path=str(tmp_path / "x.nc"), time="time")
    found = survey(section)
    assert is_sliceable(section, found) == sliceable
    ingest(section, found, Folder(tmp_path).zarr("copy.zarr"))
    copied = open_reader(ingested(section, str(tmp_path / "copy.zarr"))).read(0, 120)
    np.testing.assert_array_equal(copied, open_reader(section).read(0, 120))
    by_site = SeriesSection(path=str(tmp_path / "y.nc"), time="time")
    dataset.transpose("site", "time").to_netcdf(by_site.path)
    assert is_sliceable(by_site, survey(by_site))
    assert survey(by_site).fingerprint == found.fingerprint


def test_sites_of_other_names_without_labels_and_with_features_along_a_dimension(tmp_path, square):
    stacked = np.stack([values(table) for table in square.values()])
    forcing = ("time", np.arange(30.0))
    dataset = xr.Dataset({"v": (("basin", "band", "time"), stacked.swapaxes(1, 2)), "forcing": forcing})
    dataset = dataset.assign_coords(band=["rain", "heat"], gauge=("basin", [7, 8, 9]))
    dataset.to_netcdf(tmp_path / "x.nc")
    for site, names in (("basin", ["0", "1", "2"]), ("gauge", ["7", "8", "9"])):
        section = SeriesSection(path=str(tmp_path / "x.nc"), site=site, features=["rain", "forcing", "heat"])
        found = survey(section)
        assert [one.name for one in found.sites] == names
        np.testing.assert_array_equal(found.times(np.arange(90)), np.tile(np.arange(30), 3))
        expected = np.insert(stacked, 1, np.arange(30.0), axis=2).reshape(90, 3)
        np.testing.assert_array_equal(open_reader(section).read(0, 90), expected)


def test_a_dimension_called_site_may_label_features(tmp_path, square):
    dataset = by_dimension(square, ("time", "site"))[["rain"]]
    dataset.to_netcdf(tmp_path / "x.nc")
    wide = survey(SeriesSection(path=str(tmp_path / "x.nc"), time="time", features=["c", "a"]))
    assert (wide.features, wide.sites, wide.steps) == (("c", "a"), (), 30)
    listed = write(together(square).assign(site=1.0), tmp_path, "csv", features=["rain", "site"], time=None)
    assert survey(listed).sites == ()


def test_slices_of_parquet_cost_their_row_groups(tmp_path, monkeypatch):
    table = together(panel())
    section = write(table, tmp_path, "parquet")  # groups of seven rows
    found = survey(section)
    assert is_sliceable(section, found)
    read: list[int] = []
    group = pyarrow.parquet.ParquetFile.read_row_group
    reading = lambda file, i, **asked: read.append(i) or group(file, i, **asked)  # noqa: E731
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read_row_group", reading)
    reader = open_reader(section)
    for start, stop, groups in ((14, 20, [2]), (15, 23, [3]), (22, 36, [4, 5]), (68, 69, [9])):
        np.testing.assert_array_equal(reader.read(start, stop), values(table)[start:stop])
        assert list(dict.fromkeys(read)) == groups  # the last one is held
        read.clear()
    monkeypatch.setattr(tables, "GROUP_BYTES", 7 * 2 * 8 - 1)
    assert not is_sliceable(section, found)


def counted_parts(bucket, monkeypatch) -> list[int]:
    """Bytes of each part that is read of an object from now on."""
    fetched: list[int] = []
    part = type(bucket)._part

    def counted(place, name, start, stop, tag):
        fetched.append(stop - start)
        return part(place, name, start, stop, tag)

    monkeypatch.setattr(type(bucket), "_part", counted)
    return fetched


def test_parquet_on_an_object_store_is_read_in_parts(tmp_path, s3, monkeypatch):
    table = together(panel({"a": 30_000, "b": 20_000}))
    table.to_parquet(tmp_path / "x.parquet", row_group_size=5_000)
    bucket = place_at(s3.home)
    bucket.write("x.parquet", (tmp_path / "x.parquet").read_bytes())
    section = SeriesSection(path=f"{s3.home}/x.parquet", time="time", features=["rain", "heat"])
    reader = open_reader(section)
    fetched = counted_parts(bucket, monkeypatch)
    np.testing.assert_array_equal(reader.read(31_000, 31_010), values(table)[31_000:31_010])
    assert 0 < sum(fetched) < 1.3 * (1 << 20) + (tmp_path / "x.parquet").stat().st_size / 4
    assert is_sliceable(section, survey(section))


@pytest.mark.parametrize("dims", [("site", "time"), ("time", "site")])
def test_netcdf_on_an_object_store_is_read_in_parts(tmp_path, s3, dims, monkeypatch):
    tables = {str(i): frame(100_000, seed=i) for i in range(6)}
    dataset = by_dimension(tables, dims)
    chunks = {name: {"chunksizes": [{"site": 1, "time": 10_000}[dim] for dim in dims]} for name in ("rain", "heat")}
    dataset.to_netcdf(tmp_path / "x.nc", encoding=chunks)
    bucket = place_at(s3.home)
    bucket.write("x.nc", (tmp_path / "x.nc").read_bytes())
    section = SeriesSection(path=f"{s3.home}/x.nc", time="time")
    assert is_sliceable(section, survey(section))
    fetched = counted_parts(bucket, monkeypatch)
    read = open_reader(section).read(250_000, 250_010)
    np.testing.assert_array_equal(read, values(tables["2"])[50_000:50_010])
    assert 0 < sum(fetched) < (tmp_path / "x.nc").stat().st_size / 2


site_steps = st.lists(st.integers(1, 25), min_size=1, max_size=6)


@given(
    site_steps, st.integers(1, 9), st.integers(1, 11), st.lists(st.booleans(), min_size=150, max_size=150), st.data()
)
def test_geometry_over_sites_against_brute_force(sites, length, stride, gaps, data):
    steps = sum(sites)
    begins = tuple(np.cumsum([0, *sites[:-1]]).tolist())
    windows = Windows(steps, length, stride, begins)
    first_steps = [
        begin + offset
        for begin, own in zip(begins, sites, strict=True)
        for offset in range(0, own - length + 1, stride)
    ]
    missing = np.array(gaps[:steps])
    runs = tuple(map(tuple, np.flatnonzero(np.diff(missing.astype(int), prepend=0, append=0)).reshape(-1, 2).tolist()))
    touched = np.array([missing[start : start + length].any() for start in first_steps], bool)
    assert windows.count == len(first_steps)
    assert windows.skipped_count(runs) == touched.sum()
    if not first_steps:
        return
    first = data.draw(st.integers(0, len(first_steps) - 1))
    last = data.draw(st.integers(first + 1, len(first_steps)))
    wanted = first_steps[first:last]
    np.testing.assert_array_equal(windows.skipped(runs, first, last), touched[first:last])
    np.testing.assert_array_equal(windows.last_steps(first, last), np.array(wanted) + length - 1)
    span = windows.span(first, last)
    assert span == (wanted[0], wanted[-1] + length)
    numbered = np.arange(steps)[:, None]
    expected = np.array([range(start, start + length) for start in wanted])
    np.testing.assert_array_equal(windows.cut_span(numbered[slice(*span)], first, last)[..., 0], expected)


@pytest.mark.parametrize("form", ["parquet", "zarr", "nc"])
def test_windows_are_read_across_sites_and_never_cross_them(tmp_path, form):
    tables = panel()
    section = write(together(tables), tmp_path, form)
    found = survey(section)
    windows = found.windows(LENGTH, 2)
    expected = np.concatenate([cut(values(table), LENGTH, 2) for table in tables.values() if len(table) >= LENGTH])
    assert windows.by_site.tolist() == [18, 0, 10]
    series = open_series(section, "float64")
    for start, stop in ((0, 28), (3, 4), (17, 18), (16, 20), (18, 28)):
        cut_out, whole = series.windows(windows, start, stop)
        np.testing.assert_array_equal(cut_out, expected[start:stop])
        np.testing.assert_array_equal(whole, np.isfinite(expected[start:stop]).all(axis=(1, 2)))


@pytest.mark.parametrize("length", [1, LENGTH])
def test_first_windows_are_of_one_site_each(tmp_path, length, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_STEPS", 4)
    tables = panel()
    known = np.concatenate([cut(values(table), length) for table in tables.values() if len(table) >= length])
    found = first_windows(write(mixed(together(tables)), tmp_path, "csv"), Windows(0, length), "float64", 3)
    assert len(found)
    assert all((window == known).all(axis=(1, 2)).any() for window in found)


def test_monthly_sites_of_any_length_share_a_calendar(tmp_path):
    parts = [("a", "2000-01-01", 40), ("b", "2003-01-01", 2), ("c", "2001-07-01", 3), ("d", "1999-12-01", 1)]
    tables = {
        site: frame(steps).assign(time=pd.date_range(start, periods=steps, freq="MS")) for site, start, steps in parts
    }
    table = together(tables)
    found = survey(write(table, tmp_path, "csv"))
    assert found.axis.calendar == "1MS"
    np.testing.assert_array_equal(found.times(np.arange(46)), table["time"])


def no_site(table):
    table["site"] = table["site"].where(table.index != 3)
    return table


def daily(table):
    table.loc[table["site"] == "Isar, oben", "time"] = pd.date_range("2020", periods=25).to_numpy()
    return table


def irregular(table):
    table.loc[50, "time"] += pd.Timedelta(minutes=1)
    return table


@pytest.mark.parametrize(
    ("change", "section", "key", "said"),
    [
        (no_site, {}, "series.site", "row 4"),
        (lambda table: table.assign(site=1.5), {"site": "site"}, "series.site", "whole numbers"),
        (lambda table: table, {"site": "basin"}, "series.site", "no such column"),
        (lambda table: table, {"site": "time"}, "series.site", "the time column"),
        (daily, {}, "series.time", "site 'Isar, oben' with times 1 day, 0:00:00 apart"),
        (irregular, {}, "series.time", "row 7 of site 'Isar, oben'"),
        (lambda table: table.rename(columns={"site": "gauge"}), {}, "series.time", "as series.site"),
    ],
)
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_panels_that_cannot_be_told_are_refused(tmp_path, form, change, section, key, said, monkeypatch):
    monkeypatch.setattr(times, "ENOUGH", 3)
    if form == "csv" and said == "whole numbers":
        pytest.skip("a CSV has no types: 1.5 is the name of a site")
    table = change(together(panel()).astype({"site": object}))
    with pytest.raises(Refused) as refusal:
        survey(write(table, tmp_path, form, **section))
    assert refusal.value.key == key
    assert said in str(refusal.value)


@pytest.mark.parametrize("names", [["a", "b", "a"], ["a", "", "c"], [1.0, 2.0, 3.0]])
def test_a_dimension_of_sites_names_them_apart(tmp_path, square, names):
    dataset = by_dimension(square, ("site", "time")).assign_coords(site=names)
    dataset.to_netcdf(tmp_path / "x.nc")
    with pytest.raises(Refused) as refusal:
        survey(SeriesSection(path=str(tmp_path / "x.nc"), time="time"))
    assert refusal.value.key == "series.site"
