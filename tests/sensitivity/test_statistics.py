from __future__ import annotations

import dask
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import linalg

from sensitivity import query
from sensitivity.errors import Refused
from sensitivity.query import histogram
from sensitivity.query.sums import sums_of
from tests.sensitivity.asking import cuts, dataset, over_windows, random_jacobian

SUMMARY = {
    "mean": np.mean,
    "mean_abs": lambda cell: np.abs(cell).mean(),
    "rms": lambda cell: np.sqrt(np.square(cell).mean()),
    "std": np.std,
    "min": np.min,
    "max": np.max,
    "share_positive": lambda cell: (cell > 0).mean(),
    "sign_agreement": lambda cell: max((cell > 0).mean(), (cell < 0).mean()),
}
close = np.testing.assert_allclose


@settings(deadline=None, max_examples=30)
@given(cuts(23), st.sampled_from(["float32", "float64"]), st.sampled_from([None, 1]))
def test_every_split_gives_numpys_answers(chunks, dtype, steps):
    values = random_jacobian(dtype=dtype)
    found = query.summary(dataset(values, chunks, steps=steps)).compute()
    np.testing.assert_array_equal(found["count"], np.isfinite(values).sum(axis=0))
    for name, reduce in SUMMARY.items():
        close(found[name], over_windows(values, reduce), rtol=1e-9, atol=1e-12, err_msg=name)


@settings(deadline=None, max_examples=30)
@given(cuts(40), st.sampled_from(["float32", "float64"]), st.integers(-30, 30))
def test_quantiles_are_within_the_error_they_state(chunks, dtype, size):
    values = random_jacobian(40, dtype) * np.asarray(10.0, dtype) ** np.asarray(size, dtype)
    at = [0.0, 0.1, 0.5, 0.77, 1.0]
    found = query.quantiles(dataset(values, chunks), at=at).compute()
    for i, share in enumerate(at):
        exact = over_windows(values, lambda cell, share=share: np.quantile(cell, share, method="inverted_cdf"))
        assert (abs(found["quantile"][..., i] - exact) <= found["error"][..., i]).all()
        assert (
            found["error"][..., i] <= abs(exact) * 0.017 + np.abs(np.nan_to_num(values, posinf=0)).max() * 2e-7
        ).all()


@settings(deadline=None, max_examples=20)
@given(cuts(40))
def test_histograms_do_not_depend_on_the_split(chunks):
    values = random_jacobian(40) * np.geomspace(1e-12, 1e3, 40)[:, None, None, None, None].astype("float32")
    one = query.quantiles(dataset(values), at=np.linspace(0, 1, 41)).compute()
    other = query.quantiles(dataset(values, chunks), at=np.linspace(0, 1, 41)).compute()
    np.testing.assert_array_equal(one["quantile"], other["quantile"])


def test_what_is_far_below_the_largest_entry_counts_as_zero_and_no_more():
    values = np.full((9, 1, 1, 1, 1), 1.0, "float32")
    values[:4] = 1e-12
    found = query.quantiles(dataset(values, (3, 3, 3)), at=[0.2, 0.9]).compute()
    assert found["quantile"].values.ravel().tolist() == [0.0, pytest.approx(1.0, rel=histogram.ERROR)]
    assert found["error"].values.ravel()[0] >= 1e-12


def test_counts_of_billions_do_not_overflow():
    counts = np.zeros((1, 1, histogram.BINS), np.int32)
    counts[0, 0, 7] = 2**30
    part = {"histogram": counts, "tops": np.full((1, 1), 130, np.int32)}
    found = part
    for added in range(2, 6):
        found = histogram.merged(1, [np.array([0])] * 2, [found, part])
        assert found["histogram"][0, 0, 7] == added * 2**30
        assert found["histogram"].sum() == added * 2**30


def test_importance_and_lag_profile():
    values = random_jacobian()
    values[0] = np.nan
    found = query.ask(dataset(values, (10, 13)), ["importance", "lag-profile"])
    importance, profile = dask.compute(found["importance"], found["lag-profile"])
    mean_abs = np.nanmean(np.abs(values.astype(float)), axis=(0, 3))
    close(importance["mean_abs"], mean_abs, rtol=1e-12)
    close(importance["importance"], mean_abs * [1.0, 2.0, 3.0], rtol=1e-12)
    close(importance["share"].sum("feature"), 1.0)
    close(importance["input_std"][0, 0], [1.0, 2.0, 3.0])
    assert (importance["count"] == np.isfinite(values[:, 0, 0, 0, 0]).sum()).all()
    close(profile["rms"], over_windows(values, SUMMARY["rms"]), rtol=1e-9)


def test_effective_memory_counts_the_newest_lags_that_hold_so_much():
    sizes = np.array([1.0, 2.0, 3.0, 4.0])  # lags 3, 2, 1, 0
    values = np.broadcast_to(sizes[:, None], (5, 1, 1, 4, 2)).astype("float32").copy()
    values[..., 1] = 0
    values[::2] *= -1
    found = query.effective_memory(dataset(values), held=[0.4, 0.5, 0.9, 1.0]).compute()["effective_memory"]
    assert found.sel(feature="x_0").values.ravel().tolist() == [1, 2, 3, 4]
    assert np.isnan(found.sel(feature="x_1")).all()


@settings(deadline=None, max_examples=20)
@given(cuts(30), st.sampled_from([None, 1]))
def test_gradient_times_input_and_elasticity(chunks, steps):
    source = dataset(random_jacobian(30), chunks, steps=steps)
    source["prediction"] = source["prediction"].where(source["time"] != source["time"][4], 0)
    found = query.ask(source, ["gradient-input", "elasticity"])
    products = (source["jacobian"].astype(float) * source["input"].astype(float)).transpose(*source["jacobian"].dims)
    with np.errstate(divide="ignore", invalid="ignore"):
        elastic = (products / source["prediction"].astype(float)).transpose(*source["jacobian"].dims)
    for name, reference in (("gradient-input", products.values), ("elasticity", elastic.values)):
        close(found[name]["mean"], over_windows(reference, np.mean), rtol=1e-9, atol=1e-12)
        close(found[name]["mean_abs"], over_windows(reference, SUMMARY["mean_abs"]), rtol=1e-9)
        np.testing.assert_array_equal(found[name]["count"], np.isfinite(reference).sum(axis=0))


def _slid(steps: np.ndarray) -> np.ndarray:
    """Windows of five steps, as views."""
    return np.lib.stride_tricks.sliding_window_view(steps, 5, axis=0).swapaxes(1, 2)


LAYOUTS = {
    "of its own": lambda steps: _slid(steps).copy()[:, None],
    "steps that windows share": lambda steps: _slid(steps)[:, None],
    "back in time": lambda steps: _slid(steps[::-1])[:, None],
    "every second window": lambda steps: _slid(steps)[::2, None],
    "some of the features": lambda steps: _slid(np.repeat(steps, 2, axis=1)[:, ::2])[:, None],
    "by output step": lambda steps: np.stack([_slid(steps[i : i + 26]) for i in range(3)], axis=1),
    "by output step, as views": lambda steps: np.lib.stride_tricks.sliding_window_view(
        _slid(steps), 3, axis=0
    ).transpose(0, 3, 1, 2),
}


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_may_lie_in_memory_in_any_way(layout, outputs):
    random = np.random.default_rng(0)
    inputs = LAYOUTS[layout](random.standard_normal((28, 2)).astype("float32"))
    windows = len(inputs)
    jacobian = random.standard_normal((windows, 3, outputs, 5, 2)).astype("float32")
    prediction = random.standard_normal((windows, 3, outputs)).astype("float32")
    codes = random.integers(-1, 2, windows)
    found = sums_of(jacobian, codes, ("input_total", "elastic_abs"), prediction, inputs)
    products = jacobian.astype(float) * inputs[:, :, None]
    elastic = np.abs(products / prediction[..., None, None].astype(float))
    for group in (0, 1):
        close(found.sums["input_total"][group], products[codes == group].sum(axis=0), rtol=1e-9, atol=1e-12)
        close(found.sums["elastic_abs"][group], elastic[codes == group].sum(axis=0))


@pytest.mark.parametrize(
    ("dtype", "scale"), [("float32", 1.0), ("float64", 1.0), ("float32", 1e-25), ("float32", 1e25)]
)
def test_active_subspace_is_that_of_scipy(dtype, scale):
    values = random_jacobian(60, dtype)
    values = (values * scale).astype(dtype)
    found = query.active_subspace(dataset(values, (17, 43)), components=12).compute()
    for step in range(2):
        cells = values[:, step, 0].reshape(len(values), -1).astype(float)
        cells = cells[np.isfinite(cells).all(axis=1)] * np.tile([1.0, 2.0, 3.0], 4)
        expected, vectors = linalg.eigh(cells.T @ cells / len(cells))
        one = found.isel(output_step=step, output=0)
        close(one["eigenvalue"], expected[::-1], rtol=2e-5, atol=1e-6 * expected[-1])
        assert one["count"] == len(cells)
        first = one["eigenvector"][0].values.ravel()
        close(abs(first @ vectors[:, -1]), 1, rtol=1e-5)
        assert first[np.abs(first).argmax()] > 0
        close(one["gap"][:-1], -np.diff(one["eigenvalue"]), atol=1e-12 * expected[-1])
        close(one["share"].sum(), 1, rtol=1e-5)
        close(one["activity"].sum(), one["eigenvalue"].sum(), rtol=1e-9)


def test_ten_statistics_are_one_pass():
    reads = []

    def counted(block):
        reads.append(block.shape)
        return block

    source = dataset(random_jacobian(), (10, 13))
    counting = source["jacobian"].data.map_blocks(counted, dtype="float32", meta=np.empty((0,) * 5, "float32"))
    source["jacobian"] = source["jacobian"].copy(data=counting)
    asked = query.ask(source, list(query.FACTORIES), by="month", where="hour == 0")
    assert all(dask.is_dask_collection(one) for one in asked.values())
    assert reads == []
    dask.compute(*asked.values())
    assert sorted(shape[0] for shape in reads) == [10, 13]


def test_selections_may_be_made_before_or_with_the_question():
    source = dataset(random_jacobian(60), (60,))
    whole = query.mean_abs(source).compute()["mean_abs"]
    with_it = query.mean_abs(source, lags="1:2", features=["x_2", "x_0"], output_steps=1).compute()["mean_abs"]
    close(with_it, whole.sel(lag=[2, 1], feature=["x_0", "x_2"], output_step=[1]))
    before = query.mean_abs(source.sel(feature="x_1", output="out_0").isel(time=slice(10, 40))).compute()["mean_abs"]
    assert before.dims == ("output_step", "output", "lag", "feature")
    close(before[..., 0], over_windows(source["jacobian"].values[10:40], SUMMARY["mean_abs"])[..., 1])
    close(query.importance(source.sel(feature="x_1")).compute()["input_std"], 2.0)


def test_no_window_is_nan_and_no_warning():
    for name, found in query.ask(dataset(random_jacobian()), list(query.FACTORIES), where="year == 1999").items():
        answer = found.compute()
        assert (answer["count"] == 0).all(), name
        assert all(
            answer[one].isnull().all() for one in answer.data_vars if one not in ("count", "input_std", "constant")
        )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"lags": "5:9"}, "lags is refused"),
        ({"lags": "a"}, "0:24"),
        ({"features": "snow"}, "x_0, x_1, x_2"),
        ({"features": []}, "name one feature"),
        ({"output_steps": [0, 7]}, "given    7"),
        ({"memory": 1000}, "memory is refused"),
        ({"ci": 0.2}, "0.9 for 90 %"),
    ],
)
def test_what_cannot_be_asked_is_refused(asked, said):
    with pytest.raises(Refused, match=said):
        query.mean(dataset(random_jacobian()), **asked)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("quantiles", {"at": [1.5]}),
        ("quantiles", {"at": []}),
        ("effective-memory", {"held": [0]}),
        ("active-subspace", {"components": 0}),
        ("dgsm", {"distribution": "cauchy"}),
        ("dgsm", {"distribution": {"x_0": "uniform:3:1:2"}}),
        ("mode", {}),
    ],
)
def test_options_that_make_no_sense_are_refused(name, options):
    with pytest.raises(Refused):
        query.statistic(name, **options)
