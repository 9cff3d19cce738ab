"""The index of sites: a site is a slice, and the dimension stays."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from sensitivity.site_index import SiteIndex

SITES = ["c", "c", "c", "a", "b", "b"]


@pytest.fixture
def dataset():
    data = xr.Dataset({"x": ("time", np.arange(6))}, coords={"time": [0, 1, 2, 0, 0, 1]})
    return data.assign_coords(site=("time", np.array(SITES, object), {"long_name": "site"})).set_xindex(
        "site", SiteIndex
    )


@pytest.mark.parametrize(
    ("site", "expected"), [("c", [0, 1, 2]), ("a", [3]), ("b", [4, 5]), (["b", "c"], [4, 5, 0, 1, 2]), ([], [])]
)
def test_selecting_keeps_the_dimension_and_the_index(dataset, site, expected):
    found = dataset.sel(site=site)
    assert found["x"].dims == ("time",)
    assert found["x"].values.tolist() == expected
    assert found["site"].values.tolist() == [SITES[i] for i in expected]
    assert found["site"].attrs == {"long_name": "site"}
    if isinstance(site, str):
        assert found.sel(site=site).identical(found)
        assert found.sel(time=0)["x"].size == 1


def test_what_is_not_there_is_a_key_error(dataset):
    with pytest.raises(KeyError, match="no window is of a site 'd'"):
        dataset.sel(site="d")


def test_parts_of_a_panel(dataset):
    part = dataset.isel(time=slice(2, 5))
    assert part.xindexes["site"].names == ["c", "a", "b"]
    assert part.sel(site="b")["x"].values.tolist() == [4]
    assert "site" not in dataset.isel(time=[0, 3]).xindexes
    assert "site" not in dataset.isel(time=slice(None, None, 2)).xindexes
    assert dataset.isel(time=slice(0, 0)).sizes["time"] == 0
    assert dataset.isel(time=3)["site"] == "a"


def test_arithmetic_groups_and_concatenation(dataset):
    assert (dataset + dataset)["x"].values.tolist() == [0, 2, 4, 6, 8, 10]
    with pytest.raises(NotImplementedError, match="alignment"):
        dataset.isel(time=slice(0, 3)) + dataset.isel(time=slice(3, 6)).assign_coords(time=[0, 1, 2])
    means = dataset.groupby("site").mean()
    assert means["x"].sel(site="b") == 4.5
    whole = xr.concat([dataset.sel(site="c"), dataset.isel(time=slice(3, 6))], "time")
    assert whole.sel(site="b")["x"].values.tolist() == [4, 5]
    assert dataset.rename(time="step", site="basin").sel(basin="a")["x"].values.tolist() == [3]
