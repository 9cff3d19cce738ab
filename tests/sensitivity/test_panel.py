"""Series of many sites: every form tells the same panel, windows never cross sites, slices are those asked for."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from sensitivity import series as series_module
from sensitivity import times
from sensitivity.errors import Refused
from sensitivity.folders import Folder
from sensitivity.readers import blocks, datasets, open_reader
from sensitivity.sections import SeriesSection
from sensitivity.series import first_windows, ingest, ingested, is_sliceable
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
    copy = ingested(section, found, str(tmp_path / "copy.zarr"))
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
    monkeypatch.setattr(datasets, "AT_ONCE", 16 * rows)
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


def test_a_site_may_be_named_as_a_feature_and_a_feature_as_the_site(tmp_path):
    table = together({"rain": frame(20), "b": frame(20, seed=1)})
    for changes in ({}, {"site": "basin", "features": ["rain", "site"]}):
        own = table.rename(columns={"site": "basin", "heat": "site"}) if changes else table
        section = write(own, tmp_path, "csv", **changes)
        found = survey(section)
        assert [site.name for site in found.sites] == ["rain", "b"]
        ingest(section, found, Folder(tmp_path).zarr(f"copy-{len(changes)}.zarr"))
        copy = ingested(section, found, str(tmp_path / f"copy-{len(changes)}.zarr"))
        assert (survey(copy).sites, survey(copy).fingerprint) == (found.sites, found.fingerprint)


def test_a_column_called_site_may_be_nothing_of_the_kind(tmp_path):
    table = frame(20).assign(site=np.arange(20.0))
    section = write(table, tmp_path, "csv", features=None, site=False)
    found = survey(section)
    assert (found.sites, found.features) == ((), ("rain", "heat", "site"))
    ingest(section, found, Folder(tmp_path).zarr("copy.zarr"))
    assert survey(ingested(section, found, str(tmp_path / "copy.zarr"))) == found


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
        (lambda table: table.assign(site=[None, *range(1, len(table))]), {}, "series.site", "row 1"),
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
    table = change(together(panel()).astype({"site": object}))
    with pytest.raises(Refused) as refusal:
        survey(write(table, tmp_path, form, **section))
    assert refusal.value.key == key
    assert said in str(refusal.value)


def test_a_typed_format_names_sites_by_text_or_whole_numbers(tmp_path):
    """A CSV has no types: there 1.5 is a name like any other."""
    table = together(panel()).assign(site=1.5)
    with pytest.raises(Refused, match="whole numbers") as refusal:
        survey(write(table, tmp_path, "parquet", site="site"))
    assert refusal.value.key == "series.site"
    one = table.iloc[:40]
    assert [site.name for site in survey(write(one, tmp_path, "csv", site="site")).sites] == ["1.5"]


@pytest.mark.parametrize("names", [["a", "b", "a"], ["a", "", "c"], [1.5, 2.5, 3.5]])
def test_a_dimension_of_sites_names_them_apart(tmp_path, square, names):
    dataset = by_dimension(square, ("site", "time")).assign_coords(site=names)
    dataset.to_netcdf(tmp_path / "x.nc")
    with pytest.raises(Refused) as refusal:
        survey(SeriesSection(path=str(tmp_path / "x.nc"), time="time"))
    assert refusal.value.key == "series.site"


def test_a_panel_whose_steps_are_numbered_reads_its_copy(tmp_path):
    table = together(panel()).drop(columns="time")
    section = write(table, tmp_path, "csv", time=None)
    found = survey(section)
    ingest(section, found, Folder(tmp_path).zarr("copy.zarr"))
    copy = ingested(section, found, str(tmp_path / "copy.zarr"))
    again = survey(copy)
    assert (again.fingerprint, again.sites) == (found.fingerprint, found.sites)
    np.testing.assert_array_equal(open_reader(copy).read(0, 69), values(table))


def test_the_labels_of_a_copy_are_not_all_read_to_open_it(tmp_path):
    section = write(together(panel()), tmp_path, "csv")
    found = survey(section)
    ingest(section, found, Folder(tmp_path).zarr("copy.zarr"))
    (tmp_path / "copy.zarr" / "site" / "c" / "0").write_bytes(b"damage")  # to be read is to fail
    assert open_reader(ingested(section, found, str(tmp_path / "copy.zarr"))).read(0, 69).shape == (69, 2)


@pytest.mark.parametrize("time", ["time", None])
def test_a_dimension_called_site_that_no_feature_has_is_none_of_sites(tmp_path, time):
    labels = {"time": pd.date_range("2020", periods=9), "site": ["a", "b"]}
    data = {"rain": ("time", np.arange(9.0)), "area": ("site", [1.0, 2.0])}
    xr.Dataset(data, coords=labels).to_netcdf(tmp_path / "x.nc")
    found = survey(SeriesSection(path=str(tmp_path / "x.nc"), time=time))
    assert (found.features, found.sites, found.steps) == (("rain",), (), 9)


def test_labels_beside_those_of_features_do_not_make_them_sites(tmp_path):
    labels = {"station": ["x", "y", "z"], "site": ("station", ["s1", "s2", "s3"])}
    xr.Dataset({"rain": (("time", "station"), np.eye(3))}, coords=labels).to_netcdf(tmp_path / "x.nc")
    found = survey(SeriesSection(path=str(tmp_path / "x.nc"), features=["x", "z"]))
    assert (found.features, found.sites) == (("x", "z"), ())


def test_names_that_differ_in_spaces_are_one_site_with_its_rows_in_order(tmp_path):
    table = frame(30).assign(site=["a", "a ", " a"] * 10).drop(columns="time")
    found = survey(write(table, tmp_path, "parquet", time=None))
    assert [(site.name, site.steps) for site in found.sites] == [("a", 30)]
    assert found.grouped


@pytest.mark.parametrize("form", ["csv", "nc"])
def test_a_panel_without_steps_is_refused_as_such(tmp_path, square, form):
    if form == "csv":
        section = write(together(square).iloc[:0], tmp_path, form)
    else:
        by_dimension(square, ("site", "time")).isel(time=slice(0)).to_netcdf(tmp_path / "x.nc")
        section = SeriesSection(path=str(tmp_path / "x.nc"), time="time")
    with pytest.raises(Refused, match="no steps"):
        survey(section)


def test_numbers_that_some_rows_lack_still_name_sites(tmp_path, square):
    dataset = by_dimension(square, ("site", "time")).assign_coords(site=[1, 2, 3])
    dataset.to_netcdf(tmp_path / "x.nc", encoding={"site": {"_FillValue": -1}})  # read as 1.0, 2.0, 3.0
    found = survey(SeriesSection(path=str(tmp_path / "x.nc"), time="time"))
    assert [site.name for site in found.sites] == ["1", "2", "3"]
    table = together(square)
    table["site"] = table["site"].map({"b": 1, "a": 2, "c": 3}).astype("Int64").where(table.index != 3)
    with pytest.raises(Refused, match="rows without a site, first row 4"):
        survey(write(table, tmp_path, "parquet"))
