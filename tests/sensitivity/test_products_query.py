"""Questions to stores of every product: against plain NumPy, in the product's own dims."""

from __future__ import annotations

import csv
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr

from jobs.export import _ranked
from jobs.tables import render
from sensitivity import query
from sensitivity.errors import Refused
from sensitivity.query.opening import dataset_of
from sensitivity.query.roles import as_jacobian, gathered, restored, roles_of
from tests.sensitivity.producing import DIMS, TIMES, labels, produced, scale

ALL = sorted(DIMS)
OTHERS = [one for one in ALL if one != ("jacobian", "input")]
LAST = {"lag", "source_step"}  # what importance is summed over


@pytest.fixture(params=ALL, ids="-".join)
def made(request) -> tuple[str, str, xr.Dataset, np.ndarray]:
    """Product, source, dataset, values in float64."""
    product, by = request.param
    dataset = produced(product, by)
    return product, by, dataset, dataset[product].values.astype(float)


def test_moments_are_numpys_in_the_products_own_dims_and_labels(made):
    product, by, dataset, values = made
    found = query.summary(dataset).compute()
    assert found["mean"].dims == DIMS[product, by]
    for dim in DIMS[product, by]:
        assert found[dim].values.tolist() == labels(dim)
    expected = {
        "mean": np.nanmean(values, 0),
        "mean_abs": np.nanmean(np.abs(values), 0),
        "rms": np.sqrt(np.nanmean(values**2, 0)),
        "std": np.nanstd(values, 0),
        "min": np.nanmin(values, 0),
        "max": np.nanmax(values, 0),
    }
    for name, one in expected.items():
        np.testing.assert_allclose(found[name], one, rtol=1e-9, atol=1e-12)
    kept = values[~np.isnan(values.reshape(len(values), -1)[:, 0])]
    np.testing.assert_allclose(found["share_positive"], (kept > 0).mean(0))
    assert (found["count"] == len(kept)).all()


def test_importance_is_scaled_by_what_the_product_is_per_unit_of(made):
    product, by, dataset, _ = made
    found = query.importance(dataset).compute()
    sizes = abs(dataset[product].astype(float)).compute()
    over = ["time", *(dim for dim in sizes.dims if dim in LAST)]
    expected = sizes.mean(over) * scale(dataset, product)
    if product == "hessian":
        expected = by_pair(expected)
    assert found["importance"].dims == tuple(dim for dim in DIMS[product, by] if dim in expected.dims)
    xr.testing.assert_allclose(
        found["importance"].drop_vars(list(found["importance"].coords)),
        expected.transpose(*found["importance"].dims).drop_vars(list(expected.coords)),
    )
    assert ("input_std" in found) == (not isinstance(scale(dataset, product), float))
    features = [dim for dim in found["share"].dims if dim not in ("output_step", "output", "vector")]
    features = [dim for dim in features if dim != "direction" or product == "jvp"]
    np.testing.assert_allclose(found["share"].sum(features), 1)


def by_pair(sizes: xr.DataArray) -> xr.DataArray:
    """Both orders of a pair in the place of the first, one pair after the other; second lags averaged."""
    second_lags = [dim for dim in sizes.dims if dim in {f"{one}_2" for one in LAST}]
    sizes = sizes.mean(second_lags)
    one, other = sizes.dims[-2:]
    found = sizes.copy(data=np.full(sizes.shape, np.nan))
    for i in range(sizes.sizes[one]):
        for j in range(i, sizes.sizes[other]):
            orders = [sizes[{one: i, other: j}], sizes[{one: j, other: i}]][: 1 if i == j else 2]
            found[{one: i, other: j}] = sum(orders)
    return found


def test_a_hessians_importance_is_a_matrix_with_each_pair_once():
    dataset = produced("hessian")
    found = query.importance(dataset, ci=0.9).compute()
    listed = query.rows(found.isel(output_step=[0], output=[0]))
    pairs = [(row["feature"], row["feature_2"]) for row in listed]
    names = dataset["feature"].values.tolist()
    assert pairs == [(a, b) for i, a in enumerate(names) for b in names[i:]]
    assert sum(row["share"] for row in listed) == pytest.approx(1)
    assert all(row["importance_low"] < row["importance"] < row["importance_high"] for row in listed)
    values = np.abs(dataset["hessian"].values[:, 0, 0].astype(float))  # (time, lag, feature, lag_2, feature_2)
    both = np.nanmean([values[:, :, 0, :, 1], values[:, :, 1, :, 0].swapaxes(1, 2)])
    assert listed[1]["mean_abs"] == pytest.approx(both)
    assert listed[1]["importance"] == pytest.approx(2 * both * listed[1]["input_std"])
    assert listed[1]["count"] == np.isfinite(values[:, 0, 0, 0, 0]).sum()


def test_pairs_stay_pairs_by_group_in_differences_comparisons_and_trends():
    dataset, other = produced("hessian"), produced("hessian", seed=1)
    whole, second = (query.importance(one).compute() for one in (dataset, other))
    compared = query.compare(dataset, other).compute()
    xr.testing.assert_allclose(compared["importance_difference"], whole["importance"] - second["importance"])
    assert len(query.rows(compared)) == 4 * 6
    grouped = query.importance(dataset, by="season").compute()
    assert grouped["importance"].dims == ("season", "output_step", "output", "feature", "feature_2")
    assert len(query.rows(grouped)) == 4 * 4 * 6
    assert len(query.rows(query.trend(dataset, "importance", every=4).compute())) == 4 * 6


def test_groups_conditions_and_intervals_are_told_of_every_product(made):
    product, by, dataset, values = made
    found = query.mean(dataset, by="season", where="year == 2001", ci=0.9).compute()
    year = dataset["time"].dt.year.values == 2001
    summer = year & np.isin(dataset["time"].dt.month.values, (6, 7, 8))
    np.testing.assert_allclose(found["mean"].sel(season="JJA"), np.nanmean(values[summer], 0), rtol=1e-9)
    assert found["mean_low"].dims == found["mean"].dims == ("season", *DIMS[product, by])
    quantiles = query.quantiles(dataset, at=[0.5]).compute()
    assert quantiles["quantile"].dims == (*DIMS[product, by], "at")
    exact = np.nanquantile(values, 0.5, axis=0, method="inverted_cdf")
    np.testing.assert_allclose(quantiles["quantile"][..., 0], exact, rtol=0.017)


def test_differences_comparisons_and_trends_keep_the_products_dims(made):
    product, by, dataset, values = made
    compared = query.compare(dataset, produced(product, by, seed=1), "mean").compute()
    other = produced(product, by, seed=1)[product].values.astype(float)
    np.testing.assert_allclose(compared["mean_difference"], np.nanmean(values, 0) - np.nanmean(other, 0), atol=1e-9)
    assert compared["mean_a"].dims == DIMS[product, by]
    assert compared.attrs.get("product", "jacobian") == product
    less = query.difference(dataset, "mean", ("JJA", "DJF"), by="season").compute()
    month = dataset["time"].dt.month.values
    halves = [np.nanmean(values[np.isin(month, chosen)], 0) for chosen in ((6, 7, 8), (12, 1, 2))]
    np.testing.assert_allclose(less["mean_difference"], halves[0] - halves[1], atol=1e-9)
    assert query.trend(dataset, "mean").compute()["mean_slope"].dims == DIMS[product, by]


def test_rows_have_the_products_labels_first(made):
    product, by, dataset, _ = made
    found = query.ask(dataset, ["mean"], by="season")["mean"].compute()
    listed = query.rows(found)
    assert list(listed[0]) == ["season", *DIMS[product, by], "count", "mean"]
    assert len(listed) == len(found["season"]) * np.prod([len(labels(dim)) for dim in DIMS[product, by]])
    for row in (listed[0], listed[-1]):
        place = {dim: row[dim] for dim in ("season", *DIMS[product, by])}
        assert row["mean"] == float(found["mean"].sel(place))
    assert json.loads(render(listed, "json")) == listed
    assert next(csv.reader(io.StringIO(render(listed, "csv")))) == list(listed[0])


@pytest.mark.parametrize("by_score", ["max", "sum"])
def test_the_windows_that_stand_out_are_numpys(made, by_score):
    product, by, dataset, values = made
    found = query.top(dataset, 3, by=by_score, separation=1)
    sizes = np.abs(values).reshape(len(values), -1)
    scores = getattr(sizes, by_score)(axis=1)
    best = np.argsort(-np.nan_to_num(scores, nan=-1), kind="stable")[:3]
    np.testing.assert_array_equal(found["time"], dataset["time"].values[best])
    np.testing.assert_allclose(found["score"], scores[best], rtol=1e-6)
    np.testing.assert_array_equal(found[product], dataset[product].values[best])
    at = {dim: found[f"at_{dim}"].values[0] for dim in DIMS[product, by]}
    assert float(found["peak"][0]) == float(found[product][0].sel(at))
    assert abs(float(found["peak"][0])) == pytest.approx(np.abs(values[best[0]]).max())
    row = _ranked(found, nested=True)[0]
    assert row[product]["dims"] == list(DIMS[product, by])
    assert [name for name in row if name.startswith("at_")] == [f"at_{dim}" for dim in reversed(DIMS[product, by])]


def test_top_is_scaled_by_both_inputs_of_a_second_derivative():
    dataset = produced("hessian")
    found = query.top(dataset, 1, scaled=True)
    sizes = abs(dataset["hessian"].astype(float)).compute() * scale(dataset, "hessian")
    assert float(found["score"][0]) == pytest.approx(float(sizes.max()))


def test_what_else_a_store_has_along_time_stands_beside_the_windows_found():
    found = query.top(produced("integrated_gradients"), 2)
    assert found["completeness_error"].dims == ("rank", "output_step", "output")
    assert found["steps"].values.tolist() == [32, 32]


@pytest.mark.parametrize(("product", "by"), OTHERS)
def test_the_door_swings_both_ways(product, by):
    answer = query.lag_profile(produced(product, by)).compute()
    again = restored(gathered(answer))
    xr.testing.assert_identical(again.drop_attrs(), answer.drop_attrs())
    assert again.attrs == answer.attrs


def test_a_block_stays_a_block():
    dataset = produced("hessian").chunk({"output_step": 1})
    data = as_jacobian(dataset)["jacobian"].data
    assert data.chunks == ((14, 14, 12), (1, 1), (2,), (4,), (36,))
    values = dataset["hessian"].values.reshape(data.shape)
    np.testing.assert_array_equal(data, values)


def test_selections_go_by_the_part_that_a_dim_plays():
    layer = query.mean(produced("jacobian", "layer"), lags="1:2", features="lstm_1").compute()
    assert layer["source_step"].values.tolist() == [1, 2]
    assert layer["unit"].values.tolist() == ["lstm_1"]
    assert query.mean(produced("vjp"), outputs="first").compute()["vector"].values.tolist() == ["first"]
    hessian = produced("hessian")
    found = query.importance(hessian, features="wind").compute()
    assert (found.sizes["feature"], found.sizes["feature_2"]) == (1, 3)
    whole = query.importance(hessian).compute()
    np.testing.assert_allclose(
        found["importance"].sel(feature_2="wind"), whole["importance"].sel(feature_2="wind")[..., 2:]
    )
    sizes = abs(hessian["hessian"].astype(float)).mean(["time", "lag", "lag_2"]).sel(feature="wind", feature_2="heat")
    np.testing.assert_allclose(found["importance"].sel(feature_2="heat")[..., 0], 2 * sizes * 0.5 * 2.0, rtol=1e-6)
    one = query.mean(hessian.isel(output=1, feature_2=2)).compute()
    assert one.sizes["output"] == one.sizes["feature_2"] == 1
    np.testing.assert_allclose(
        one["mean"], query.mean(hessian).compute()["mean"].sel(output=["level"], feature_2=["wind"]), rtol=1e-12
    )


def test_predictions_group_windows_of_products_with_other_targets():
    dataset = produced("vjp").isel(output=0, output_step=0)
    low = dataset["prediction"].values <= 3
    found = query.mean(dataset, by={"prediction": [3.0]}).compute()
    values = dataset["vjp"].values.astype(float)
    np.testing.assert_allclose(found["mean"][0], np.nanmean(values[low], 0), rtol=1e-9)


@pytest.mark.parametrize("statistic", ["gradient-input", "elasticity", "dgsm", "active-subspace"])
@pytest.mark.parametrize(("product", "by"), OTHERS)
def test_what_is_of_derivatives_alone_is_refused_of_others(product, by, statistic):
    if statistic == "active-subspace" and product == "jacobian":
        return
    with pytest.raises(Refused, match=f"{statistic} of derivatives of outputs") as refused:
        query.ask(produced(product, by), [statistic])
    assert f"{statistic} of {product} ({', '.join(DIMS[product, by])})" in str(refused.value)


@pytest.mark.parametrize("by", ["weights", "layer"])
def test_the_fisher_matrix_by_weights_has_its_eigenvalues(by):
    dataset = produced("jacobian", by)
    rows = dataset["jacobian"].values.astype(float).reshape(TIMES, 2, 2, -1)
    rows = rows[~np.isnan(rows[:, 0, 0, 0])]
    fisher = np.einsum("ntop,ntoq->topq", rows, rows) / len(rows)
    found = query.active_subspace(dataset, components=2).compute()
    np.testing.assert_allclose(found["eigenvalue"], np.linalg.eigvalsh(fisher)[..., :-3:-1], rtol=1e-5)
    assert found["eigenvector"].dims == ("output_step", "output", "component", *DIMS["jacobian", by][2:])


def test_memory_is_told_in_lags_alone():
    attributions = produced("integrated_gradients")
    found = query.effective_memory(attributions, held=[0.5]).compute()["effective_memory"]
    by_lag = np.nanmean(np.abs(attributions["integrated_gradients"].values.astype(float)), 0)[:, :, ::-1]
    share = by_lag.cumsum(2) / by_lag.sum(2, keepdims=True)
    np.testing.assert_array_equal(found[..., 0], (share < 0.5).sum(2) + 1)
    for other in (produced("jacobian", "layer"), produced("jvp"), produced("gradient_norm")):
        with pytest.raises(Refused, match="effective-memory of a product with lags"):
            query.effective_memory(other)


def test_bad_requests_say_what_the_product_has():
    with pytest.raises(Refused, match="vjp .vector, lag, feature. has no output_step"):
        query.mean(produced("vjp"), output_steps=0)
    with pytest.raises(Refused, match="is not per unit of a feature"):
        query.top(produced("integrated_gradients"), scaled=True)
    with pytest.raises(Refused, match="no input_std"):
        query.top(produced("jacobian", "layer"), scaled=True)
    with pytest.raises(Refused, match="product: vjp .* against hvp"):
        query.compare(produced("vjp"), produced("hvp"))
    with pytest.raises(Refused, match="inputs beside a product with a lag and a feature"):
        query.with_inputs(produced("hessian"))
    with pytest.raises(Refused, match="one without a hessian along time"):
        query.mean(produced("hessian").isel(time=0))
    with pytest.raises(Refused, match="product is refused"):
        roles_of(xr.Dataset(attrs={"product": "laplacian"}))


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_a_store_is_opened_with_all_that_it_has_along_time(tmp_path):
    whole = produced("hessian").drop_vars(["committed", "input_std_2"])
    whole["steps"] = ("time", np.arange(TIMES))
    whole.compute().to_zarr(tmp_path / "results.zarr", zarr_format=3, consolidated=True)
    layout = SimpleNamespace(shard_windows=10, windows=TIMES, shard_count=4, chunk_steps=1)
    run = SimpleNamespace(content={"product": "hessian"}, layout=layout, results=tmp_path / "results.zarr", place="run")
    run.survey, run.windows = SimpleNamespace(sites=()), SimpleNamespace(length=4, stride=1)
    opened = dataset_of(run, np.array([True, True, False, True]))
    assert opened.attrs == {"run": "run", "length": 4, "stride": 1, "product": "hessian"}
    assert opened["hessian"].chunks[:2] == ((10,) * 4, (1, 1))
    expected = np.where(np.isin(np.arange(TIMES) // 10, (0, 1, 3)), np.arange(TIMES), np.nan)
    np.testing.assert_array_equal(opened["steps"], expected)
    assert opened["hessian"][20:30].isnull().all()
    assert opened["prediction"][20:30].isnull().all()
    np.testing.assert_array_equal(opened["hessian"][:20], whole["hessian"][:20])
    assert opened.sel(feature_2="wind", lag_2=0)["hessian"].ndim == 5
    found = query.importance(opened).compute()
    assert (found["input_std"].sel(feature="heat", feature_2="wind") == 1.0).all()
