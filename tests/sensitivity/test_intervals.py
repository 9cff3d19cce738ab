"""Intervals, differences, comparisons and trends of datasets in memory."""

from __future__ import annotations

import dask
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from scipy import stats

from sensitivity import query
from sensitivity.errors import Refused
from tests.sensitivity.asking import dataset, random_jacobian

UNCERTAIN = {
    "importance": ["mean_abs", "importance", "share"],
    "lag-profile": ["mean", "mean_abs", "rms"],
    "std": ["std"],
    "share-positive": ["share_positive", "sign_agreement"],
    "quantiles": ["quantile"],
    "effective-memory": ["effective_memory"],
    "gradient-input": ["mean", "mean_abs"],
    "elasticity": ["mean", "mean_abs"],
    "dgsm": ["nu", "bound"],
    "active-subspace": ["eigenvalue", "share", "gap", "activity"],
}


def autoregressive(windows: int, phi: float, series: int, seed: int) -> np.ndarray:
    """Series of variance 1 whose neighbours are correlated by `phi`: `(window, series)`."""
    random = np.random.default_rng(seed)
    values = np.empty((windows, series))
    values[0] = random.standard_normal(series)
    for step in range(1, windows):
        values[step] = phi * values[step - 1] + np.sqrt(1 - phi**2) * random.standard_normal(series)
    return values


def of_cells(values: np.ndarray, **how) -> xr.Dataset:
    """One cell a series."""
    return dataset(values[:, None, None, None, :], **how)


def shapes(answer: xr.Dataset) -> dict[str, tuple[int, ...]]:
    return {str(name): field.shape for name, field in answer.data_vars.items()}


@pytest.mark.parametrize(("windows", "phi"), [(400, 0.0), (1000, 0.6), (3000, 0.8)])
def test_nine_of_ten_intervals_hold_the_truth(windows, phi):
    """200 series in one dataset; tests/sensitivity/test_bootstrap.py takes each by itself."""
    values = autoregressive(windows, phi, 200, seed=1)
    found = query.lag_profile(of_cells(values), ci=0.9).compute()
    for name, exact in {"mean": 0.0, "mean_abs": np.sqrt(2 / np.pi), "rms": 1.0}.items():
        held = (found[f"{name}_low"] <= exact) & (exact <= found[f"{name}_high"])
        assert 0.85 <= held.mean().item() <= 0.95, name


def test_all_statistics_but_extremes_have_intervals():
    source = dataset(random_jacobian(300), (100, 200))
    asked = query.ask(source, [*UNCERTAIN, "min", "max"], by="weekday", ci=0.8)
    shapes = {
        name: {str(one): field.shape for one, field in answer.data_vars.items()} for name, answer in asked.items()
    }
    for name, answer in zip(asked, dask.compute(*asked.values()), strict=True):
        assert {str(one): field.shape for one, field in answer.data_vars.items()} == shapes[name]
        ends = {str(one).rpartition("_")[0] for one in answer.data_vars if str(one).endswith(("_low", "_high"))}
        assert ends == set(UNCERTAIN.get(name, []))
        for one in ends:
            known = answer[f"{one}_low"].notnull()
            assert known.any(), (name, one)
            assert (answer[f"{one}_low"] <= answer[f"{one}_high"]).where(known, True).all(), (name, one)


def test_intervals_do_not_depend_on_blocks_and_are_those_of_their_seed():
    values = random_jacobian(200)
    first, again, other = (
        query.importance(dataset(values, chunks), ci=0.9, seed=seed).compute()
        for chunks, seed in (((200,), 3), ((70, 130), 3), ((200,), 4))
    )
    xr.testing.assert_allclose(first, again, rtol=1e-9)
    assert (first["importance_low"] != other["importance_low"]).any()
    assert first["resamples"] == 1000
    assert first.attrs["ci"] == 0.9


def test_a_group_in_few_leaves_has_no_interval():
    source = dataset(random_jacobian(300, seed=3))
    source = source.assign_coords(event=("time", np.where(np.arange(300) == 100, "yes", "no")))
    found = query.mean(source, by="event", ci=0.9).compute()
    assert found["mean_low"].sel(event="yes").isnull().all()
    assert found["mean_low"].sel(event="no").notnull().any()


def test_a_rare_group_that_comes_all_along_the_record_has_an_interval():
    """As hours of rain do, in a record with a slow swing: what many a difference of wet and dry is asked of."""
    random = np.random.default_rng(0)
    rare = random.random(4000) < 0.02
    values = np.repeat(autoregressive(100, 0.9, 1, seed=5), 40, axis=0)[:4000]
    values = values + 2.0 * rare[:, None] + 0.1 * random.standard_normal((4000, 1))
    source = of_cells(values, freq="h").assign_coords(event=("time", np.where(rare, "yes", "no")))
    found = query.difference(source, "mean", ("yes", "no"), by="event", ci=0.9).compute()
    assert found["block"] > 20
    assert found["mean_difference_low"] <= 2 <= found["mean_difference_high"]


def test_what_two_groups_share_is_no_doubt_about_their_difference():
    """Both groups follow the same slow swings, which cancel."""
    swings = np.repeat(autoregressive(100, 0.5, 1, seed=5), 24, axis=0)
    values = swings + 0.1 * np.random.default_rng(0).standard_normal(swings.shape)
    values[::2] += 0.3
    source = of_cells(values, freq="h").assign_coords(half=("time", np.tile(["a", "b"], 1200)))
    found = query.difference(source, "mean", ("a", "b"), by="half", ci=0.9).compute()
    width = (found["mean_difference_high"] - found["mean_difference_low"]).item()
    assert found["mean_difference_low"] <= 0.3 <= found["mean_difference_high"]
    apart = query.mean(source, by="half", ci=0.9).compute()
    assert width < 0.2 * (apart["mean_high"] - apart["mean_low"]).min().item()
    np.testing.assert_allclose(found["mean_a"] - found["mean_b"], found["mean_difference"])
    np.testing.assert_allclose(found["mean_a"], apart["mean"].sel(half="a"))
    assert found["count_a"].item() == 1200


def test_groups_that_are_not_there_cannot_differ():
    source = dataset(random_jacobian(60))
    for between in (("DJF", "JJA"), ("DJF", "DJF")):
        with pytest.raises(Refused, match="two of DJF"):
            query.difference(source, "mean", between, by="season")


def test_two_runs_are_compared_by_the_same_times():
    values = random_jacobian(400, seed=1)
    a, b = dataset(values, (150, 250)), dataset(values * np.float32(1.5), (400,))
    found = query.compare(a, b, "importance", ci=0.9).compute()
    exact = query.importance(a).compute()["importance"]
    np.testing.assert_allclose(found["importance_difference"], -0.5 * exact, rtol=1e-6)
    low, high = found["importance_difference_low"], found["importance_difference_high"]
    assert ((low < found["importance_difference"]) & (found["importance_difference"] < high)).all()
    assert (high < 0).all()
    np.testing.assert_allclose(found["share_difference"], 0, atol=1e-9)
    assert (found.attrs["windows_a"], found.attrs["windows_b"]) == (400, 400)


@pytest.mark.parametrize("name", ["summary", "quantiles", "dgsm", "active-subspace", "gradient-input"])
def test_a_run_does_not_differ_from_itself(name):
    source = dataset(random_jacobian(90), (40, 50))
    found = query.compare(source, source, name, by="month", ci=0.9).compute()
    differences = [one for one in found.data_vars if str(one).endswith("_difference")]
    assert differences
    for one in differences:
        np.testing.assert_array_equal(found[one].fillna(0), 0)


def test_two_periods_with_other_months_are_compared_where_both_are():
    source = dataset(random_jacobian(120))
    a, b = source.isel(time=slice(0, 60)), source.isel(time=slice(40, 120))
    found = query.compare(a, b, "mean", by="month").compute()
    assert found["month"].values.tolist() == [1, 2, 3, 4]
    assert (found["count_a"].sel(month=4) == 0).all()
    assert (found["count_b"].sel(month=1) == 0).all()
    assert found["mean_difference"].sel(month=[1, 4]).isnull().all()
    exact = query.mean(b, by="month").compute()["mean"]
    np.testing.assert_allclose(found["mean_b"].sel(month=4), exact.sel(month=4))


def test_what_is_not_comparable_is_refused():
    source = dataset(random_jacobian(30))
    others = {
        "feature": source.assign_coords(feature=["x_0", "x_1", "snow"]),
        "lag": source.isel(lag=slice(1, None)),
        "time": source.assign_coords(time=np.arange(30)),
        "output": source.assign_coords(output=["flow"]),
    }
    for what, other in others.items():
        with pytest.raises(Refused, match=f"{what}:"):
            query.compare(source, other, "mean")
    query.compare(source, others["lag"], "mean", lags="0:2").compute()


@pytest.mark.parametrize("every", ["year", 12])
def test_a_trend_is_that_of_theil_and_sen(every):
    random = np.random.default_rng(4)
    days = 12 * 366
    values = random.standard_normal((days, 1, 1, 2, 2)) + np.arange(days)[:, None, None, None, None] / 365.25 * 0.05
    source = dataset(values, (1000, days - 1000))
    found = query.trend(source, "mean", every=every).compute()
    years = pd.DatetimeIndex(source["time"].values).year.to_numpy()
    groups = years if every == "year" else np.minimum(np.arange(days) * 12 // (days - 1), 11)
    means = np.stack([values[groups == one].mean(axis=0) for one in np.unique(groups)])
    unit = 1.0 if every == "year" else (days - 1) / 12 / 365.2425
    if every == "year":
        means = means[:12]  # the last year has a few days only
        assert (found["periods"] == 12).all()
    for place in np.ndindex(*means.shape[1:]):
        exact = stats.theilslopes(means[(slice(None), *place)], np.arange(len(means)) * unit).slope
        np.testing.assert_allclose(found["mean_slope"].values[place], exact, rtol=2e-3)
    assert (found["mean_p"] < 0.05).all()
    assert (found["mean_slope_low"] < found["mean_slope_high"]).all()


def test_months_are_compared_with_the_same_months():
    """A strong season and no trend; then one that rises."""
    days = 4 * 365 + 1
    season = 10 * np.cos(2 * np.pi * np.arange(days) / 365.25)
    noise = 0.1 * np.random.default_rng(0).standard_normal(days)
    rising = noise + season + np.arange(days) / 365.25
    found = query.trend(of_cells(np.stack([noise + season, rising], axis=1)), "mean").compute()
    assert found.attrs["every"] == "month"
    np.testing.assert_allclose(found["mean_slope"].values.ravel(), [0, 1], atol=0.05)
    assert found["mean_p"].values.ravel()[0] > 0.05 > found["mean_p"].values.ravel()[1]


def test_trends_of_numbered_steps_and_refusals():
    source = of_cells(np.arange(400.0)[:, None]).assign_coords(time=np.arange(400) * 2.0)
    found = query.trend(source, "mean").compute()
    np.testing.assert_allclose(found["mean_slope"].item(), 0.5, rtol=0.02)
    for every in ("year", "decade", 2):
        with pytest.raises(Refused, match="every"):
            query.trend(source, every=every)


def test_windows_that_share_steps_are_not_taken_apart():
    """A block has at least the steps of a window; a record of few windows' lengths tells no interval."""
    random = np.random.default_rng(0)
    lagged = random.standard_normal((300, 1, 1, 30, 1))
    found = query.mean(dataset(lagged), ci=0.9).compute()
    assert found["block"] >= 30
    assert found["mean_low"].notnull().all()
    assert query.mean(dataset(lagged[:100]), ci=0.9).compute()["mean_low"].isnull().all()
    by_stride = dataset(lagged[:100]).assign_attrs(length=30, stride=30)
    assert query.mean(by_stride, ci=0.9).compute()["mean_low"].notnull().all()


def test_a_statistic_is_asked_once():
    with pytest.raises(Refused, match="each statistic once"):
        query.ask(dataset(random_jacobian()), ["mean", "mean"])
