"""Slices of a series: what they cost, and which windows they hold."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from sensitivity import series as series_module
from sensitivity import times
from sensitivity.addresses import place_at
from sensitivity.folders import Folder
from sensitivity.readers import blocks, datasets, open_reader, tables
from sensitivity.sections import SeriesSection
from sensitivity.series import ingest, ingested, is_sliceable, open_series
from sensitivity.survey import survey
from sensitivity.windows import Windows
from tests.conftest import cut, frame
from tests.sensitivity.test_panel import LENGTH, by_dimension, mixed, panel, together, values, write


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
    copied = open_reader(ingested(section, found, str(tmp_path / "copy.zarr"))).read(0, 120)
    np.testing.assert_array_equal(copied, open_reader(section).read(0, 120))
    by_site = SeriesSection(path=str(tmp_path / "y.nc"), time="time")
    dataset.transpose("site", "time").to_netcdf(by_site.path)
    assert is_sliceable(by_site, survey(by_site))
    assert survey(by_site).fingerprint == found.fingerprint


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
    table = together(panel({"a": 60_000, "b": 40_000}))
    table.to_parquet(tmp_path / "x.parquet", row_group_size=5_000)
    bucket = place_at(s3.home)
    bucket.write("x.parquet", (tmp_path / "x.parquet").read_bytes())
    section = SeriesSection(path=f"{s3.home}/x.parquet", time="time", features=["rain", "heat"])
    reader = open_reader(section)
    fetched = counted_parts(bucket, monkeypatch)
    np.testing.assert_array_equal(reader.read(61_000, 61_010), values(table)[61_000:61_010])
    assert 0 < sum(fetched) < (tmp_path / "x.parquet").stat().st_size / 4
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
    np.testing.assert_array_equal(windows.whole(runs, steps), np.flatnonzero(~touched))
    if not first_steps:
        return
    first = data.draw(st.integers(0, len(first_steps) - 1))
    last = data.draw(st.integers(first + 1, len(first_steps)))
    wanted = first_steps[first:last]
    np.testing.assert_array_equal(windows.skipped(runs, first, last), touched[first:last])
    np.testing.assert_array_equal(windows.last_steps(first, last), np.array(wanted) + length - 1)
    span = windows.span(first, last)
    assert span == (wanted[0], wanted[-1] + length)
    near = list(windows.near(first, last))
    assert [near[0][0], *(stop for _, stop in near)] == [first, *(start for start, _ in near[1:]), last]
    read = sum(stop - start for start, stop in (windows.span(*part) for part in near))
    needed = {step for start in wanted for step in range(start, start + length)}
    dropped = max(0, stride - length) * len(wanted)
    assert read <= len(needed) + dropped + (length + stride) * sum(1 for _ in windows.pieces(first, last))
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
    assert windows.per_site.tolist() == [18, 0, 10]
    series = open_series(section, "float64")
    for start, stop in ((0, 28), (3, 4), (17, 18), (16, 20), (18, 28)):
        cut_out, whole = series.windows(windows, start, stop)
        np.testing.assert_array_equal(cut_out, expected[start:stop])
        np.testing.assert_array_equal(whole, np.isfinite(expected[start:stop]).all(axis=(1, 2)))


def test_sites_too_short_for_a_window_are_not_read(tmp_path, monkeypatch):
    tables = {"first": frame(9), **{f"short {i}": frame(LENGTH - 1) for i in range(50)}, "last": frame(9, seed=1)}
    section = write(together(tables), tmp_path, "parquet")
    series, windows = open_series(section, "float64"), survey(section).windows(LENGTH, 1)
    read = series._reader.read
    asked = []
    monkeypatch.setattr(series._reader, "read", lambda start, stop: asked.append((start, stop)) or read(start, stop))
    found, _ = series.windows(windows, 0, 8)
    assert asked == [(0, 9), (259, 268)]
    known = [cut(values(tables[name]), LENGTH) for name in ("first", "last")]
    np.testing.assert_array_equal(found, np.concatenate(known))


def test_a_chunk_of_many_sites_is_read_once_in_a_pass(tmp_path, monkeypatch):
    tables = {str(i): frame(40, seed=i) for i in range(12)}
    dataset = by_dimension(tables, ("time", "site"))
    chunks = {name: {"chunks": (20, 6)} for name in ("rain", "heat")}
    dataset.to_zarr(tmp_path / "x.zarr", encoding=chunks, consolidated=False)
    section = SeriesSection(path=str(tmp_path / "x.zarr"), time="time")
    monkeypatch.setattr(datasets, "AT_ONCE", 1)
    read = []
    get = zarr.storage.LocalStore.get

    async def counted(store, key, *args, **kwargs):
        read.append(key)
        return await get(store, key, *args, **kwargs)

    monkeypatch.setattr(zarr.storage.LocalStore, "get", counted)
    survey(section)
    fetched = [key for key in read if key.startswith(("rain/c/", "heat/c/"))]
    assert len(fetched) == len(set(fetched)) == 8


def test_a_survey_of_parquet_holds_a_block_of_it_and_not_all(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_STEPS", 20)
    table = together(panel())
    section = write(table, tmp_path, "parquet")  # groups of seven rows
    asked: list[list[int]] = []
    batches = pyarrow.parquet.ParquetFile.iter_batches
    reading = lambda file, size, groups, **more: asked.append([*groups]) or batches(file, size, groups, **more)  # noqa: E731
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", reading)
    found = np.concatenate([block.values for block in open_reader(section).blocks()])
    np.testing.assert_array_equal(found, values(table))
    assert asked == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_thousands_of_short_sites_are_read_and_copied_together(tmp_path, monkeypatch):
    sites = {str(i): frame(10, seed=i) for i in range(300)}
    by_dimension(sites, ("site", "time")).to_netcdf(tmp_path / "x.nc")
    section = SeriesSection(path=str(tmp_path / "x.nc"), time="time", features=["rain", "heat"])
    parts: list[tuple[int, ...]] = []
    part = datasets.Panel._part
    monkeypatch.setattr(datasets.Panel, "_part", lambda self, *which: parts.append(which) or part(self, *which))
    found = survey(section)
    np.testing.assert_array_equal(open_reader(section).read(5, 2995), values(together(sites))[5:2995])
    assert parts == [(0, 10, 0, 300), (5, 10, 0, 1), (0, 10, 1, 299), (0, 5, 299, 300)]
    written: list[int] = []
    write_part = series_module._Pieces._write
    monkeypatch.setattr(
        series_module._Pieces, "_write", lambda self, *what: written.append(what[0]) or write_part(self, *what)
    )
    ingest(section, found, Folder(tmp_path).zarr("copy.zarr"))
    assert written == [0]


def test_times_in_words_are_read_together_for_all_sites_of_a_block(tmp_path, monkeypatch):
    table = mixed(together({str(i): frame(10, seed=i) for i in range(50)}))
    read: list[int] = []
    monkeypatch.setattr(tables, "dates", lambda times, act=tables.dates: read.append(len(times)) or act(times))
    monkeypatch.setattr(times, "dates", lambda times: pytest.fail("site by site"))
    assert len(survey(write(table, tmp_path, "csv")).sites) == 50
    assert read == [500]
