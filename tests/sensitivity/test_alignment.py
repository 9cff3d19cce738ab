"""Lags from each output's own step: every answer against the same entries laid out by hand, and against NumPy."""

from __future__ import annotations

import dask
import numpy as np
import pytest
import xarray as xr

from sensitivity import plots, query
from sensitivity.errors import Refused
from sensitivity.plots import bands
from sensitivity.query.alignment import MEANINGS
from sensitivity.query.ask import put
from tests.sensitivity.asking import dataset, random_jacobian
from tests.sensitivity.producing import produced

STEPS = 5
OWN = np.arange(STEPS)[::-1]
# By lag and feature: exact in float32.
FILTER = np.array([[1.0, 0.5], [0.75, 0.25], [-0.5, 0.125], [0.25, 0.0625], [0.125, 0.0]])


def at_steps(found: xr.Dataset, sees: str = "earlier", lags_from: str = "window", steps: int = STEPS) -> xr.Dataset:
    """As a store of a model whose outputs stand at all steps of the window says so."""
    note = {"steps": steps, "sees": sees, "lags_from": lags_from}
    return found.assign_coords(step_lag=("output_step", np.arange(steps)[::-1], note))


def filtered(times: int = 12) -> np.ndarray:
    """The derivatives of a causal filter `(time, output_step, output, lag, feature)`, zero for later inputs."""
    values = np.zeros((times, STEPS, 1, STEPS, 2), "float32")
    for step in range(STEPS):
        values[:, step, 0, : step + 1] = FILTER[step::-1]
    return values


def anything(kind: str, times: int = 40) -> tuple[xr.Dataset, np.ndarray, list[int]]:
    """A store, the same entries laid out by hand with NaN where none exists, and the lags of these."""
    random = np.random.default_rng(3)
    whole = random.standard_normal((times, STEPS, 2, STEPS, 2)) * [1.0, 5.0]
    whole[random.random(times) < 0.2] = np.nan  # skipped windows, of which all is missing
    whole = whole.astype("float32")
    present = ~np.isnan(whole[:, :1, :1, :1, :1])
    if kind != "acausal":
        for step in range(STEPS):
            whole[:, step, :, step + 1 :] = np.where(present[:, 0], 0, np.nan)
    lags = list(range(STEPS - 1, -STEPS if kind == "acausal" else -1, -1))
    by_hand = np.full((times, STEPS, 2, len(lags), 2), np.nan, "float32")
    for step, (i, lag) in [(step, pair) for step in range(STEPS) for pair in enumerate(lags)]:
        if 0 <= step - lag < STEPS and (lag >= 0 or kind == "acausal"):
            by_hand[:, step, :, i] = whole[:, step, :, step - lag]
    if kind != "limited":
        return at_steps(dataset(whole, (11, 9, 20)), "all" if kind == "acausal" else "earlier"), by_hand, lags
    kept = by_hand[:, :, :, -3:]  # as with max_lag = 2: zeros from before the window
    stored = dataset(np.where(present & np.isnan(kept), 0, kept), (11, 9, 20))
    shown = np.stack([stored["input"].values] * STEPS, 1)  # any inputs by output step
    stored["input"] = (("time", "output_step", "lag", "feature"), shown)
    return at_steps(stored.chunk({"time": (11, 9, 20)}), lags_from="output"), kept, lags[-3:]


def by_hand(stored: xr.Dataset, values: np.ndarray, lags: list[int]) -> xr.Dataset:
    """A store of those entries, and their inputs, that says nothing of output steps."""
    found = dataset(values, (11, 9, 20)).assign_coords(lag=lags)
    x, mine = stored["input"].values, np.zeros((len(values), STEPS, len(lags), 2), "float32")
    for step, (i, lag) in [(step, pair) for step in range(STEPS) for pair in enumerate(lags)]:
        if x.ndim == 4:
            mine[:, step, i] = x[:, step, i]
        elif 0 <= step - lag < STEPS:
            mine[:, step, i] = x[:, step - lag]
    found["input"] = (("time", "output_step", "lag", "feature"), mine)
    found["prediction"] = (("time", "output_step", "output"), stored["prediction"].values)
    return found.chunk({"time": (11, 9, 20)})


KINDS = pytest.mark.parametrize("kind", ["causal", "limited", "acausal"])
PER_CELL = [name for name in query.FACTORIES if name not in ("active-subspace", "effective-memory")]


def test_a_filter_has_its_own_profile_at_every_output_step():
    found = query.lag_profile(at_steps(dataset(filtered()))).compute()
    assert found["lag"].values.tolist() == [4, 3, 2, 1, 0]
    assert found["lag"].attrs["long_name"] == MEANINGS["output"]
    for step, lag in np.ndindex(STEPS, STEPS):
        cell = found.isel(output_step=step, output=0).sel(lag=lag)
        if lag > step:
            assert not cell["count"].any()
            assert all(cell[name].isnull().all() for name in ("mean", "mean_abs", "rms"))
        else:
            np.testing.assert_array_equal(cell["mean"], FILTER[lag])
            np.testing.assert_array_equal(cell["count"], 12)


def test_by_position_in_the_window_answers_are_of_what_is_stored():
    stored = dataset(filtered())
    for name in ("lag-profile", "importance", "effective-memory"):
        found = query.ask(at_steps(stored), [name], align="window")[name].compute()
        xr.testing.assert_identical(found, query.ask(stored, [name])[name].compute())


def test_memory_and_importance_are_of_entries_that_exist():
    found = query.ask(at_steps(dataset(filtered())), ["effective-memory", "importance"])
    memory = found["effective-memory"].compute()["effective_memory"]
    assert memory.isel(output_step=0).values.tolist() == [[[1.0] * 3] * 2]
    assert float(memory.isel(output_step=4, output=0, feature=0).sel(held=0.9)) == 4
    importance = found["importance"].compute()["mean_abs"].isel(output=0)
    for step in range(STEPS):
        np.testing.assert_allclose(importance[step], np.abs(FILTER[: step + 1]).mean(axis=0), rtol=1e-6)


def test_zeros_from_before_the_window_are_left_out():
    """Issue 26: at lag 6 of 24 steps, 0.0879 with 6 zeros among 24 output steps, where it is 0.1172."""
    values = np.zeros((3, 24, 1, 7, 1), "float32")
    for step in range(24):
        values[:, step, 0, max(0, 6 - step) :] = 0.1172
    stored = at_steps(dataset(values), lags_from="output", steps=24)
    whole = plots.influence(query.mean_abs(stored).compute())
    assert float(whole.sel(lag=6).item()) == pytest.approx(0.1172)
    zeros = query.mean_abs(stored.drop_vars("step_lag")).compute()["mean_abs"]
    assert float(zeros.sel(lag=6).mean()) == pytest.approx(0.0879)
    assert int(query.mean_abs(stored).compute()["count"].sel(lag=6).sum()) == 18 * 3


@KINDS
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"by": "month"},
        {"lags": "0:2", "features": ["x_1"], "outputs": "out_1"},
        {"output_steps": [1, 3], "where": "month == 1"},
        {"ci": 0.9, "by": ["month"]},
    ],
    ids=lambda how: ",".join(how) or "plain",
)
def test_statistics_are_those_of_the_entries_laid_out_by_hand(kind, how):
    stored, values, lags = anything(kind)
    names = PER_CELL if "ci" not in how else ["mean", "importance", "share-positive"]
    same = by_hand(stored, values, lags)
    found, expected = dask.compute(*(query.ask(one, names, **how) for one in (stored, same)))
    for name in names:
        told, wanted = found[name], expected[name]
        if "lag" in told.dims:  # of some output steps, without lags that none of them has
            empty = wanted.sel(lag=[lag for lag in wanted["lag"].values if lag not in told["lag"].values])
            assert not empty["count"].any()
            wanted = wanted.sel(lag=told["lag"].values)
        for variable in told.data_vars:
            mine, other = told[variable], wanted[variable]
            exists = wanted["count"] > 0 if {"lag", "output_step"} <= {*mine.dims} else True
            if mine.dtype.kind == "f":  # what is by hand has constants where no entry is
                other = other.where(exists).transpose(*mine.dims)
            np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-9, err_msg=f"{name} {variable}")


@KINDS
def test_moments_are_numpys(kind):
    stored, values, lags = anything(kind)
    found = query.summary(stored, lags=lags).compute()
    assert found["lag"].values.tolist() == lags
    with np.errstate(invalid="ignore"), pytest.warns(RuntimeWarning):
        expected = {
            "mean": np.nanmean(values.astype(float), axis=0),
            "mean_abs": np.nanmean(np.abs(values.astype(float)), axis=0),
            "min": np.nanmin(values, axis=0),
        }
    for name, numbers in expected.items():
        np.testing.assert_allclose(found[name].values, numbers, rtol=1e-6)
    np.testing.assert_array_equal(found["count"].values, np.isfinite(values).sum(axis=0))


def test_memory_counts_lags_from_the_outputs_own_step_both_ways():
    stored, values, labels = anything("acausal")
    labels = np.array(labels)
    found = query.effective_memory(stored, held=[0.5]).compute()["effective_memory"]
    for step, output, feature in np.ndindex(STEPS, 2, 2):
        own = values[:, step, output, :, feature]
        there = ~np.isnan(own).all(axis=0)
        near = np.argsort(np.abs(labels[there]), kind="stable")
        sizes = np.nanmean(np.abs(own[:, there]), axis=0)[near]
        expected = np.searchsorted(np.cumsum(sizes) / sizes.sum(), 0.5) + 1
        assert int(found[step, output, feature, 0]) == expected


def test_active_subspaces_are_those_of_the_entries_that_exist():
    stored, values, _ = anything("causal")
    found = query.active_subspace(stored).compute().isel(output_step=2, output=1)
    gradients = values[~np.isnan(values[:, 4, 0, 0, 0]), 2, 1, -3:].astype(float) * [1.0, 2.0]
    flat = gradients.reshape(len(gradients), -1)
    eigenvalues = np.linalg.eigvalsh(flat.T @ flat / len(flat))[::-1]
    np.testing.assert_allclose(found["eigenvalue"][:6], eigenvalues, rtol=1e-5)
    assert found["activity"].isel(lag=slice(0, 2)).isnull().all()
    assert found["activity"].isel(lag=slice(2, 5)).notnull().all()


@KINDS
@pytest.mark.parametrize("lags", [None, "1:2", [0]])
@pytest.mark.parametrize("score", ["max", "sum"])
def test_top_windows_are_those_of_the_entries_laid_out_by_hand(kind, lags, score):
    stored, values, labels = anything(kind)
    found = query.top(stored, 4, by=score, lags=lags, separation=2, scaled=True)
    chosen = {None: labels, "1:2": [2, 1]}.get(lags, [0]) if not isinstance(lags, list) else lags
    part = values[:, :, :, [labels.index(lag) for lag in chosen]] * np.array([1.0, 2.0])
    sizes = np.abs(part).reshape(len(part), -1)
    scores = getattr(np, f"nan{score}")(np.where(np.isnan(sizes).all(axis=1)[:, None], 0, sizes), axis=1)
    first = int(scores.argmax())
    np.testing.assert_allclose(float(found["score"][0]), scores[first], rtol=1e-6)
    assert found["time"].values[0] == stored["time"].values[first]
    assert found["lag"].values.tolist() == chosen
    np.testing.assert_array_equal(found["jacobian"][0], (part / [1.0, 2.0])[first].astype("float32"))
    step, lag = int(found["at_output_step"][0]), int(found["at_lag"][0])
    assert 0 <= step - lag < STEPS
    assert found["input"].dims == ("rank", "output_step", "lag", "feature")
    shown = found["input"].sel(output_step=step, lag=lag)[0].values
    inputs = stored["input"].values[first]
    expected = inputs[step, labels.index(lag)] if kind == "limited" else inputs[step - lag]
    np.testing.assert_array_equal(shown, expected)


def test_runs_are_compared_by_the_same_lags():
    stored, _, _ = anything("causal")
    limited, _, _ = anything("limited")
    found = query.compare(stored, limited, "mean", lags="0:2").compute()
    assert found["lag"].values.tolist() == [2, 1, 0]
    exists = [[lag <= step for lag in (2, 1, 0)] for step in range(STEPS)]
    differs = found["mean_difference"].transpose("output_step", "lag", "output", "feature")
    np.testing.assert_allclose(differs.values[np.array(exists)], 0, atol=1e-7)
    assert differs.values[~np.array(exists)].size
    assert np.isnan(differs.values[~np.array(exists)]).all()
    with pytest.raises(Refused, match="lag: steps back from the output's own step against None"):
        query.compare(stored, stored.drop_vars("step_lag"), "mean")
    assert query.compare(stored, stored, "mean", align="window", ci=0.9).compute()["mean_difference"].notnull().all()


def test_a_position_in_the_window_is_that_of_what_was_kept():
    limited, values, _ = anything("limited")
    found = query.mean(limited, align="window").compute()
    assert found["lag"].values.tolist() == [4, 3, 2, 1, 0]
    assert found["lag"].attrs["long_name"] == MEANINGS["window"]
    for step, lag in np.ndindex(STEPS, STEPS):
        own = step - (STEPS - 1 - lag)  # back from the output's own step
        cell = found["mean"].isel(output_step=step).sel(lag=lag)
        if 0 <= own <= 2:
            np.testing.assert_allclose(cell, np.nanmean(values[:, step, :, 2 - own].astype(float), axis=0), rtol=1e-6)
        else:
            assert cell.isnull().all()


def test_both_lags_of_second_derivatives_count_from_the_output():
    plain = produced("hessian").isel(output_step=[0, 1])
    values = plain["hessian"].transpose("time", "output_step", "output", "lag", "feature", "lag_2", "feature_2").values
    note = {"steps": 4, "sees": "earlier", "lags_from": "window"}
    for place, own in ((0, 2), (1, 0)):  # outputs of the second step and of the last: later inputs have no part in it
        values[:, place, :, 4 - own :], values[:, place, :, :, :, 4 - own :] = 0, 0
    values[::7] = np.nan
    dims = ("time", "output_step", "output", "lag", "feature", "lag_2", "feature_2")
    stored = plain.assign(hessian=(dims, values)).assign_coords(step_lag=("output_step", [2, 0], note))
    found = query.mean(stored.chunk({"time": 14})).compute()
    assert found["mean"].dims == dims[1:]
    assert found["lag"].values.tolist() == found["lag_2"].values.tolist() == [3, 2, 1, 0]
    for place, own in ((0, 2), (1, 0)):
        for lag, other in np.ndindex(4, 4):
            cell = found["mean"].isel(output_step=place).sel(lag=lag, lag_2=other).values
            if max(lag, other) + own > 3:
                assert np.isnan(cell).all()
            else:
                entries = values[:, place][:, :, 3 - lag - own][:, :, :, 3 - other - own].astype(float)
                np.testing.assert_allclose(cell, np.nanmean(entries, axis=0), rtol=1e-5)
    peak = query.top(stored, 1)
    assert max(int(peak["at_lag"][0]), int(peak["at_lag_2"][0])) <= (1 if int(peak["at_output_step"][0]) == 0 else 3)


def test_vectors_have_no_step_of_their_own():
    found = produced("vjp").assign_coords(step_lag=("output_step", [3, 0], {"steps": 4}))
    assert query.mean(found).compute()["lag"].values.tolist() == [3, 2, 1, 0]
    with pytest.raises(Refused, match="not known to belong to steps"):
        query.mean(found, align="output")


def test_what_makes_no_sense_is_refused():
    stored = dataset(random_jacobian())
    with pytest.raises(Refused, match="output, of a run whose outputs are not known to belong to steps"):
        query.mean(stored, align="output")
    with pytest.raises(Refused, match="'end'"):
        query.mean(stored, align="end")
    with pytest.raises(Refused, match="given +7"):
        query.mean(at_steps(dataset(filtered())), lags=[7])
    with pytest.raises(Refused, match="given +3"):
        query.mean(at_steps(dataset(filtered())), lags=[3], output_steps=[0, 2])
    later = filtered()
    later[:, 0, 0, 4] = 1.0
    for statistic in (query.mean_abs, query.mean, query.share_positive):  # whatever its own sums are
        with pytest.raises(Refused, match="derivatives by inputs after the output"):
            statistic(at_steps(dataset(later))).compute()


def test_no_more_lags_are_read_than_are_asked_for():
    stored = at_steps(dataset(filtered()))
    assert put(stored, ["mean-abs"], lags=[0], output_steps=[2]).dataset.sizes["lag"] == 1
    assert put(stored, ["mean-abs"], lags=[0]).dataset.sizes["lag"] == stored.sizes["output_step"]


def test_one_step_or_lag_that_was_chosen_keeps_its_place():
    stored = at_steps(dataset(filtered()))
    one = query.mean(stored.isel(output_step=2)).compute()
    assert one["lag"].values.tolist() == [2, 1, 0]
    np.testing.assert_array_equal(one["mean"].squeeze(), FILTER[2::-1])
    newest = query.mean(stored.sel(lag=0)).compute()  # of the window's last step: of the last output alone
    assert newest["lag"].values.tolist() == [0]
    assert newest["count"].squeeze(["output", "lag"]).values.tolist() == [[0, 0]] * 4 + [[12, 12]]


def test_pictures_are_of_entries_that_exist():
    stored, values, _ = anything("causal")
    kinds = ["lag-profile", "lag-band", "heatmap", "step-lag", "window", "distribution", "importance", "time-lag"]
    (found,) = dask.compute(plots.wanted(stored, kinds))
    profile = plots.influence(found["lag-profile"])
    assert profile["lag"].values.tolist() == [4, 3, 2, 1, 0]
    steps = np.arange(STEPS)
    for lag in range(STEPS):
        sizes = np.abs(values[:, steps >= lag, :, 4 - lag].astype(float)) * [1.0, 2.0]
        np.testing.assert_allclose(profile.sel(lag=lag), np.nanmean(sizes, axis=(0, 1, 2)), rtol=1e-6)
    spread = found["distribution"]["pooled_quantile"].sel(at=bands.LEVELS[3], feature="x_1")
    kept = np.sort(values[..., 1][~np.isnan(values[..., 1])])
    exact = np.quantile(kept, bands.LEVELS[3], method="inverted_cdf")
    assert float(spread) == pytest.approx(exact, rel=0.02)
    window = found["window"]
    first = np.nanmax(np.abs(values * np.array([1.0, 2.0])).reshape(len(values), -1), axis=1, initial=0).argmax()
    np.testing.assert_array_equal(window["jacobian"], values[first])
    for kind, one in found.items():
        plots.draw(one, kind)
    picture = plots.draw(found["step-lag"], "step-lag")
    assert "is outside the window" in " ".join(
        text.get_text() for text in picture.findobj(lambda one: hasattr(one, "get_text"))
    )


def test_pictures_are_drawn_by_position_where_that_is_asked_for():
    stored, _, _ = anything("causal")
    (found,) = dask.compute(plots.wanted(stored, ["lag-profile", "window", "time-lag"], align="window"))
    whole = query.mean_abs(stored.drop_vars("step_lag")).compute()
    np.testing.assert_array_equal(found["lag-profile"]["mean_abs"], whole["mean_abs"])
    assert found["window"]["lag"].values.tolist() == [4, 3, 2, 1, 0]
