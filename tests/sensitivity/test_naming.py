"""Every variable of every answer names itself and its units."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from sensitivity import plots, query
from sensitivity.query.intervals import FACTS
from tests.sensitivity.asking import dataset, random_jacobian
from tests.sensitivity.producing import DIMS, produced

STORED = "derivative of the output with respect to the input, as the store calls it"
MADE = ("at", "held", "component", *FACTS)  # labels that statistics add


@pytest.fixture(scope="module")
def opened() -> xr.Dataset:
    """A small run whose own arrays have names, which no answer may inherit."""
    found = dataset(np.nan_to_num(random_jacobian(40), posinf=1.0), freq="40D")
    for name in ("jacobian", "prediction", "input", "input_std"):
        found[name].attrs = {"long_name": STORED, "units": "stored units"}
    found["prediction"].attrs["units"] = "mm"
    return found


def require_named(found: xr.Dataset, *others: str) -> None:
    """Names and units of their own, no two variables with the same words, and no field left unfilled."""
    seen: dict[str, str] = {}
    for name in [*found.data_vars, *(name for name in (*MADE, *others) if name in found.coords)]:
        attrs = found[name].attrs
        assert {"long_name", "units"} <= {*attrs}, name
        assert attrs["long_name"] not in ("", STORED), name
        assert attrs["units"] not in ("", "stored units"), name
        assert not {*"{}"} & {*attrs["long_name"], *attrs["units"]}, attrs
        assert attrs["long_name"] not in seen, (name, seen.get(attrs["long_name"]))
        seen[attrs["long_name"]] = str(name)


@pytest.mark.parametrize("name", query.FACTORIES)
def test_every_variable_of_every_statistic_names_itself(opened, name):
    lazy = query.ask(opened, [name], by="season", ci=0.8)[name]
    require_named(lazy)
    found = lazy.compute()
    require_named(found)
    assert {key: one.attrs for key, one in found.items()} == {key: one.attrs for key, one in lazy.items()}
    for key in [key for key in found.data_vars if str(key).endswith("_low")]:
        said = found[key].attrs["long_name"]
        assert said.startswith("lower end of the 80 % interval of: "), said
        assert "block bootstrap" in said
        assert found[key].attrs["units"] == found[str(key).removesuffix("_low")].attrs["units"]


@pytest.mark.parametrize("name", query.FACTORIES)
def test_differences_comparisons_and_trends_name_themselves(opened, name):
    base = {"of": name, "lags": "0:1", "outputs": "out_0", "output_steps": 0}
    less = query.difference(opened, name, ("JJA", "DJF"), by="season", ci=0.8 if name == "mean" else None)
    require_named(less)
    compared = query.compare(opened.assign_attrs(run="runs/a"), opened.assign_attrs(run="runs/b"), **base)
    require_named(compared)
    trend = query.trend(opened, **base, every=5)
    require_named(trend)
    for key in [str(key) for key in less.data_vars if str(key).endswith("_difference")]:
        assert less[key].attrs["long_name"].endswith("of JJA − that of DJF"), key
        assert compared[key].attrs["long_name"].endswith("of a − that of b"), key
        variable = key.removesuffix("_difference")
        slope = trend[f"{variable}_slope"].attrs
        assert slope["units"].endswith("per year"), slope
        assert "95 % interval" in trend[f"{variable}_slope_low"].attrs["long_name"]
        assert trend[f"{variable}_p"].attrs["units"] == "1"
    assert "each difference is a − b, where a is JJA and b is DJF" in less.attrs["note"]


@pytest.mark.parametrize(("product", "by"), sorted(DIMS))
def test_products_are_named_as_what_they_are(product, by):
    found = produced(product, by)
    for statistic in query.ask(found, ["importance", "summary", "quantiles"]).values():
        require_named(statistic)
    dims = [f"at_{dim}" for dim in DIMS[product, by]]
    moments = query.top(found, 2)
    require_named(moments[["score", "peak"]], *dims, "rank")
    assert moments[product].attrs["units"].startswith("units of the output")
    stored = {"long_name": "as the store calls it", "units": "m"}
    found[product].attrs = stored
    assert query.top(found, 2)[product].attrs == stored


def test_units_are_those_of_the_outputs_where_these_have_any(opened):
    assert query.mean(opened)["mean"].attrs["units"] == "mm per unit of the input"
    assert query.importance(opened)["importance"].attrs["units"] == "mm"
    assert query.elasticity(opened)["mean"].attrs["units"] == "1"
    assert query.trend(opened, "mean", every=4)["mean_slope"].attrs["units"] == "mm per unit of the input per year"
    stepwise = opened.assign_coords(time=np.arange(opened.sizes["time"]))
    assert query.trend(stepwise, "mean")["mean_slope"].attrs["units"].endswith("per step")
    assert query.top(opened, 1, scaled=True)["score"].attrs["units"] == "mm"


def test_a_share_says_what_it_is_of(opened):
    whole, one = query.importance(opened), query.importance(opened, features="x_1")
    assert whole["share"].attrs["long_name"] == "share of the importance of x_0, x_1 and x_2 together"
    assert "note" not in whole.attrs
    assert one["share"].attrs["long_name"] == "share of the importance of x_1 alone, the only feature asked for"
    assert one.attrs["note"] == "share: of the importance of x_1 alone, the only feature asked for"
    assert "x_0 and x_2 together" in query.importance(opened, features=["x_0", "x_2"]).attrs["note"]


def test_dgsm_says_which_distribution_is_assumed(opened):
    found = query.dgsm(opened, distribution={"x_1": "uniform:0:1"})
    assert "x_1=uniform:0:1, normal for the others" in found["bound"].attrs["long_name"].replace(
        "normal for the others, x_1=uniform:0:1", "x_1=uniform:0:1, normal for the others"
    )


def test_what_pictures_are_drawn_from_names_itself(opened):
    other = opened.assign(jacobian=2 * opened["jacobian"])
    kinds = ["lag-band", "distribution", "importance", "comparison"]
    for found in plots.wanted(opened, kinds, against=other, names=["a", "b"]).values():
        require_named(found)
