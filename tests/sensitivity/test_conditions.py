from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sensitivity import query
from sensitivity.errors import Refused
from sensitivity.query.conditions import Grouping, groupings, holding
from sensitivity.query.expressions import Expression
from tests.sensitivity.asking import cuts, dataset, over_windows, random_jacobian

HOURS = 24 * 60


@pytest.fixture(scope="module")
def hourly():
    """Sixty days by the hour, from the middle of November on."""
    return dataset(random_jacobian(HOURS), (500, 500, HOURS - 1000), start="2001-11-15", freq="h")


def means(source, mask) -> np.ndarray:
    return over_windows(source["jacobian"].values[np.asarray(mask)], np.mean)


@pytest.mark.parametrize(
    ("name", "labels", "of"),
    [
        ("season", ["DJF", "SON"], lambda t: np.where(t.month.isin([12, 1, 2]), "DJF", "SON")),
        ("month", [1, 11, 12], lambda t: t.month),
        ("hour", list(range(24)), lambda t: t.hour),
        ("weekday", ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"], lambda t: t.strftime("%a")),
        ("year", [2001, 2002], lambda t: t.year),
    ],
)
def test_groups_of_the_calendar(hourly, name, labels, of):
    found = query.mean(hourly, by=name).compute()
    assert found[name].values.tolist() == labels
    groups = np.asarray(of(pd.DatetimeIndex(hourly["time"].values)))
    for label in labels:
        np.testing.assert_allclose(
            found["mean"].sel({name: label}), means(hourly, groups == label), rtol=1e-9, atol=1e-12
        )


@settings(deadline=None, max_examples=20)
@given(cuts(60), st.integers(0, 5))
def test_groups_and_conditions_for_any_split(chunks, seed):
    source = dataset(random_jacobian(60, seed=seed), chunks)
    random = np.random.default_rng(seed)
    source = source.assign_coords(regime=("time", random.choice(["wet", "dry"], 60)), level=("time", random.random(60)))
    found = query.mean(source, by=["regime", "level:0.3,0.6"], where="level > 0.1 and month == 1").compute()
    regime, level = source["regime"].values, source["level"].values
    january = pd.DatetimeIndex(source["time"].values).month == 1
    bins = {"≤ 0.3": level <= 0.3, "0.3 to 0.6": (level > 0.3) & (level <= 0.6), "> 0.6": level > 0.6}
    for name, inside in bins.items():
        for which in ("wet", "dry"):
            mask = inside & (regime == which) & (level > 0.1) & january
            one = found.sel(regime=which, level=name)
            counts = np.isfinite(source["jacobian"].values[mask]).sum(axis=0)
            np.testing.assert_array_equal(one["count"], counts)
            expected = means(source, mask) if mask.any() else np.full(counts.shape, np.nan)
            np.testing.assert_allclose(one["mean"], expected, rtol=1e-9, atol=1e-12)


def test_quantile_bins_hold_equal_shares(hourly):
    one = hourly.isel(output_step=[0])
    found = query.mean(one, by="prediction:4").compute()
    known = np.isfinite(one["jacobian"].values[:, 0, 0, 0, 0])
    edges = np.quantile(one["prediction"].values.astype(float), [0.25, 0.5, 0.75], method="inverted_cdf")
    expected = np.bincount(np.searchsorted(edges, one["prediction"].values.ravel()[known]))
    np.testing.assert_array_equal(found["count"][:, 0, 0, 0, 0], expected)
    assert found["prediction"].values[0].startswith("≤ ")


def test_a_frequent_value_fills_one_bin_only(hourly):
    rain = np.zeros(HOURS)
    rain[::4] = np.arange(HOURS // 4) + 1.0
    (found,) = groupings(hourly.assign_coords(rain=("time", rain)), "rain:4")
    assert found.labels.tolist() == ["≤ 0", "> 0"]
    with pytest.raises(Refused, match="one value"):
        groupings(hourly.assign_coords(rain=("time", np.zeros(HOURS))), "rain:4")


def test_bins_of_many_values_come_from_a_histogram(hourly, monkeypatch):
    from sensitivity.query import conditions

    source = hourly.assign_coords(level=("time", np.random.default_rng(0).gamma(2, size=HOURS)))
    (exact,) = groupings(source, "level:4")
    monkeypatch.setattr(conditions, "EXACT", 10)
    (found,) = groupings(source, "level:4")
    shares = np.bincount(found.codes.compute()) / HOURS
    np.testing.assert_allclose(shares, 0.25, atol=0.02)
    assert len(exact.labels) == len(found.labels)


def test_missing_values_are_in_no_bin(hourly):
    level = np.where(np.arange(HOURS) % 2, np.nan, np.arange(HOURS))
    found = query.mean(hourly.assign_coords(level=("time", level)), by="level:0,700").compute()
    known = np.isfinite(hourly["jacobian"].values[:, 0, 0, 0, 0])
    assert found["count"][:, 0, 0, 0, 0].sum() == (known & np.isfinite(level)).sum()


def test_a_ready_grouping_is_taken(hourly):
    codes = groupings(hourly, "hour")[0].codes % 2
    found = query.mean(hourly, by=Grouping("parity", np.array(["even", "odd"]), codes)).compute()
    even = pd.DatetimeIndex(hourly["time"].values).hour % 2 == 0
    np.testing.assert_allclose(found["mean"].sel(parity="even"), means(hourly, even), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("by", "said"),
    [
        ("snow", "season, month, hour"),
        ("prediction", "prediction:4"),
        ("hour:1", "two bins or more"),
        ("hour:3,1", "rising edges"),
        ("season:3", "bins of numbers"),
        (["month", "month"], "each name once"),
        ("lag", "given    lag"),
    ],
)
def test_groups_that_cannot_be_are_refused(hourly, by, said):
    with pytest.raises(Refused, match=said):
        query.mean(hourly.isel(output_step=[0]), by=by)


def test_several_predictions_are_no_condition(hourly):
    with pytest.raises(Refused, match="of which a window has 2"):
        query.mean(hourly, by="prediction:2")


VALUES = {
    "a": np.array([1.0, 2.0, np.nan, -4.0]),
    "b": np.array([1, 5, 6, 7]),
    "name": np.array(["x", "y", "x", "z"], object),
    "odd name": np.array([0.0, 1.0, 2.0, 3.0]),
    "time": np.array(["2001-01-01", "2001-06-01", "2002-01-01", "2003-01-01"], "datetime64[ns]"),
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a > 1", [0, 1, 0, 0]),
        ("not a > 1", [1, 0, 1, 1]),
        ("a > 1 or b == 7", [0, 1, 0, 1]),
        ("0 < b <= 5 and abs(a) < 3", [1, 1, 0, 0]),
        ("b in (5, 6)", [0, 1, 1, 0]),
        ("name not in ['x', 'y']", [0, 0, 0, 1]),
        ("name == 'x' and isnan(a)", [0, 0, 1, 0]),
        ("`odd name` * 2 - 1 >= b - 4", [1, 1, 1, 1]),
        ("`odd name` % 2 == 1", [0, 1, 0, 1]),
        ("time >= '2001-06-01'", [0, 1, 1, 1]),
        ("'2001-02-01' < time < '2002-06-01'", [0, 1, 1, 0]),
        ("-a > 3", [0, 0, 0, 1]),
    ],
)
def test_expressions(text, expected):
    assert Expression(text)(VALUES).astype(int).tolist() == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a >",
        "a.real > 1",
        "__import__('os').system('x')",
        "open('x')",
        "[x for x in b]",
        "lambda: 1",
        "a := 1",
        "a if b else a",
        "a[0] > 1",
        "f'{a}' == 'x'",
        "a ** 1000000 > 1",
        "abs(a, b) > 1",
        "b is 5",
        "a > None",
        "(" * 300 + "a" + ")" * 300,
    ],
)
def test_expressions_are_a_small_part_of_python(text):
    with pytest.raises(Refused, match="where is refused"):
        Expression(text)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("hour + 1", "true or false"),
        ("1 > 0", "name one of"),
        ("rain > 1", "given    rain"),
        ("season > 3", "texts with 'texts'"),
        ("time > 'yesterday'", "YYYY-MM-DD"),
    ],
)
def test_conditions_that_make_no_sense_are_refused(hourly, where, said):
    with pytest.raises(Refused, match=said):
        holding(hourly, where)


def test_columns_of_the_users_own(hourly, tmp_path):
    states = ["low", "high"] * (HOURS // 2)
    table = pd.DataFrame({"time": hourly["time"].values, "flow": np.arange(HOURS), "state": states})
    table.sample(frac=0.5, random_state=0).to_csv(tmp_path / "flow.csv", index=False)
    table.set_index("time").to_parquet(tmp_path / "flow.parquet")
    half = query.with_columns(hourly, tmp_path / "flow.csv")
    assert np.isfinite(half["flow"]).sum() == HOURS // 2
    assert set(half["state"].values) == {"low", "high", ""}
    whole = query.with_columns(hourly, tmp_path / "flow.parquet")
    np.testing.assert_array_equal(whole["flow"], np.arange(HOURS))
    found = query.mean(whole, by="state", where="flow < 700").compute()
    low = (np.arange(HOURS) % 2 == 0) & (np.arange(HOURS) < 700)
    np.testing.assert_allclose(found["mean"].sel(state="low"), means(hourly, low), rtol=1e-9, atol=1e-12)


def test_columns_that_do_not_fit_are_refused(hourly, tmp_path):
    times = hourly["time"].values
    for table, said in (
        (pd.DataFrame({"time": [times[0]] * 2, "flow": [1, 2]}), "twice"),
        (pd.DataFrame({"time": times + np.timedelta64(30, "m"), "flow": 1.0}), "last step"),
        (pd.DataFrame({"time": ["yesterday"], "flow": [1]}), "dates as"),
        (pd.DataFrame({"time": times, "lag": 1.0}), "rename the column"),
        (tmp_path / "nowhere.csv", "check the path"),
    ):
        with pytest.raises(Refused, match=said):
            query.with_columns(hourly, table)
