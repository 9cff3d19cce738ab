"""Questions asked by people who do not mean well, or who have data that nobody thought of."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from sensitivity import query
from sensitivity.errors import Refused


def dataset(values: np.ndarray, start: str = "2000-01-01", std: float = 1.0, **columns: np.ndarray) -> xr.Dataset:
    """One output, one lag: `values` `(time, feature)`, an hour apart."""
    times, features = values.shape
    coords = {
        "time": pd.date_range(start, periods=times, freq="h"),
        "output_step": [0],
        "output": ["y"],
        "lag": [0],
        "feature": [f"x_{i}" for i in range(features)],
        "input_std": ("feature", np.full(features, std)),
    }
    dims = ("time", "output_step", "output", "lag", "feature")
    whole = xr.Dataset({"jacobian": (dims, values[:, None, None, None])}, coords=coords)
    return whole.chunk(time=max(1, times // 3)).assign_coords({name: ("time", one) for name, one in columns.items()})


def remembering(seed: int, times: int = 6000, memory: float = 0.99) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal(times)
    for i in range(1, times):
        noise[i] += memory * noise[i - 1]
    return noise[:, None]


def half_width(found: xr.Dataset, name: str) -> float:
    return float((found[f"{name}_high"] - found[f"{name}_low"]).squeeze()) / 2


def test_runs_of_other_series_are_compared():
    a, b = dataset(remembering(0), std=1.0), dataset(remembering(1), std=2.0)
    found = query.compare(a, b, "importance").compute()
    assert (float(found["input_std_a"].squeeze()), float(found["input_std_b"].squeeze())) == (1, 2)
    for statistic in ("mean", "quantiles", "active-subspace", "effective-memory"):
        query.compare(a, b, statistic, ci=0.9).compute()


@pytest.mark.parametrize("start", ["2003-01-01", "2000-04-10"], ids=["apart", "overlapping"])
def test_runs_of_other_periods_are_as_uncertain_as_each_by_itself(start):
    a, b = dataset(remembering(0)), dataset(remembering(1), start)
    alone = [half_width(query.mean(one, ci=0.9).compute(), "mean") for one in (a, b)]
    together = half_width(query.compare(a, b, "mean", ci=0.9).compute(), "mean_difference")
    assert 0.7 < together / np.hypot(*alone) < 1.6


def test_a_difference_of_groups_that_hold_few_blocks_is_not_told():
    times = 6000
    which = np.where(np.arange(times) < 200, "short", "long").astype(object)
    source = dataset(remembering(0, times), part=which)
    assert np.isnan(query.mean(source, by="part", ci=0.9).compute()["mean_low"].sel(part="short")).all()
    found = query.difference(source, "mean", ("short", "long"), by="part", ci=0.9).compute()
    assert np.isfinite(found["mean_difference"]).all()
    assert np.isnan(found["mean_difference_low"]).all()


def test_values_that_are_all_the_same_do_not_vary():
    found = query.std(dataset(np.full((5000, 2), 1 / 3, "float32"))).compute()
    assert (found["std"] == 0).all()


def test_extremes_have_differences_and_trends():
    values = np.random.default_rng(0).standard_normal((4000, 1))
    source = dataset(values, part=np.arange(4000) % 2)
    found = query.difference(source, "max", ("0", "1"), by="part", ci=0.9).compute()
    assert float(found["max_difference"].squeeze()) == values[::2].max() - values[1::2].max()
    assert "max_difference_low" not in found
    assert "max_slope" in query.trend(source, "max", every=8)


def test_a_dataset_cut_anew_is_asked_for_one_feature():
    source = dataset(np.random.default_rng(0).standard_normal((30, 2))).chunk(feature=1)
    found = query.importance(source.sel(feature="x_1")).compute()
    assert found.sizes["feature"] == 1


def test_infinities_of_both_signs_raise_no_warning():
    values = np.random.default_rng(0).standard_normal((30, 2))
    values[3] = np.inf, -np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert int(query.active_subspace(dataset(values)).compute()["count"].squeeze()) == 29


def test_windows_without_a_value_are_in_no_group():
    column = np.array([0.0, 1.0, np.nan] * 10)
    found = query.mean(dataset(np.ones((30, 1)), regime=column), by="regime").compute()
    assert found["regime"].values.tolist() == [0, 1]
    assert int(found["count"].sum()) == 20


def test_bins_have_names_of_their_own_and_may_have_one_edge():
    pressure = 1013.2 + np.linspace(0, 0.09, 300)
    source = dataset(np.ones((300, 1)), pressure=pressure)
    labels = query.mean(source, by="pressure:4", ci=0.9).compute()["pressure"].values.tolist()
    assert len(set(labels)) == 4
    assert query.mean(source, by="pressure:1013.25")["pressure"].values.tolist() == ["≤ 1013", "> 1013"]


def test_quantile_bins_of_two_runs_are_not_mixed():
    a, b = (dataset(np.ones((300, 1)), column=np.arange(300.0) * i) for i in (1, 2))
    with pytest.raises(Refused, match="give the edges"):
        query.compare(a, b, "mean", by="column:3")
    assert query.compare(a, a, "mean", by="column:3").sizes["column"] == 3


@pytest.mark.parametrize("name", ["leaf", "which", "count", "mean", "bin", "resample", "held", "period"])
def test_a_column_is_not_taken_for_something_else(name):
    source = dataset(np.ones((300, 1)), **{name: np.arange(300) % 2})
    with pytest.raises(Refused, match="rename the column"):
        query.mean(source, by=name)


def test_flags_are_numbers_also_where_some_are_missing():
    source = dataset(np.ones((30, 1)))
    table = pd.DataFrame({"time": source["time"].values[:20], "flag": np.arange(20) % 2 == 0})
    found = query.mean(query.with_columns(source, table), where="flag == 1").compute()
    assert int(found["count"].squeeze()) == 10


@pytest.mark.parametrize("where", ["_quoted_5_ > 1", "word > 5", "-word == 1", "word + 1 > 2", "isnan(word)"])
def test_expressions_are_refused_before_anything_is_read(where):
    with pytest.raises(Refused):
        query.mean(dataset(np.ones((30, 1)), word=np.array(["a", "b"] * 15, object)), where=where)


def test_texts_are_compared_and_may_hold_backticks():
    source = dataset(np.ones((30, 1)), word=np.array(["`a`", "b", "c"] * 10, object))
    for where, count in (("word == '`a`'", 10), ("word >= 'b'", 20), ("`word` == 'c'", 10)):
        assert int(query.mean(source, where=where).compute()["count"].squeeze()) == count


def test_impossible_seeds_and_differences_without_groups_are_refused():
    source = dataset(np.ones((30, 1)))
    with pytest.raises(Refused, match="seed"):
        query.mean(source, ci=0.9, seed=-1)
    with pytest.raises(Refused, match="two of them"):
        query.difference(source, "mean", ("a", "b"), by=None)
