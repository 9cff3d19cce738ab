from __future__ import annotations

import warnings

import dask
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.prepare import prepare
from sensitivity import open_run, query
from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.placement import Node
from sensitivity.worker import Worker
from tests.conftest import frame


def dataset(values: np.ndarray, chunks: tuple[int, ...]) -> xr.Dataset:
    """A run's dataset in memory: `values` `(time, output_step, output, lag, feature)`, cut into `chunks` along time."""
    times, steps, outputs, lags, features = values.shape
    dims = ("time", "output_step", "output", "lag", "feature")
    labels = {
        "output_step": np.arange(steps),
        "output": [f"out_{i}" for i in range(outputs)],
        "lag": np.arange(lags)[::-1],
        "feature": [f"x_{i}" for i in range(features)],
        "input_std": ("feature", 1.0 + np.arange(features)),
        "committed": ("time", np.ones(times, bool)),
        "skipped": ("time", np.zeros(times, bool)),
    }
    return xr.Dataset({"jacobian": (dims, values)}, coords=labels).chunk({"time": chunks})


def random_jacobian(times: int = 23) -> np.ndarray:
    random = np.random.default_rng(0)
    values = random.standard_normal((times, 2, 1, 4, 3)).astype("float32") * [1.0, 10.0, 0.1]
    values[random.random(times) < 0.2] = np.nan
    return values.astype("float32")


def cuts(total: int):
    return st.lists(st.integers(1, total - 1), unique=True, max_size=6).map(
        lambda borders: tuple(np.diff([0, *sorted(borders), total]).tolist())
    )


@settings(deadline=None)
@given(cuts(23))
def test_any_split_gives_numpys_answer(chunks):
    values = random_jacobian()
    exact = values.astype("float64")
    found = query.lag_profile(dataset(values, chunks)).compute()
    np.testing.assert_array_equal(found["count"], np.isfinite(exact).sum(axis=0))
    np.testing.assert_allclose(found["mean"], np.nanmean(exact, axis=0), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found["mean_abs"], np.nanmean(np.abs(exact), axis=0), rtol=1e-12)
    np.testing.assert_allclose(found["rms"], np.sqrt(np.nanmean(exact**2, axis=0)), rtol=1e-12)


def test_importance_is_mean_abs_times_the_features_std():
    values = random_jacobian()
    found = query.importance(dataset(values, (10, 13))).compute()
    mean_abs = np.nanmean(np.abs(values.astype("float64")), axis=(0, 3))
    np.testing.assert_allclose(found["mean_abs"], mean_abs, rtol=1e-12)
    np.testing.assert_allclose(found["importance"], mean_abs * [1.0, 2.0, 3.0], rtol=1e-12)
    np.testing.assert_allclose(found["share"].sum("feature"), 1.0)
    assert (found["count"] == np.isfinite(values[:, 0, 0, 0, 0]).sum()).all()


def test_statistics_are_lazy_and_read_every_block_once():
    reads = []

    def counted(block):
        reads.append(block.shape)
        return block

    source = dataset(random_jacobian(), (10, 13))
    source["jacobian"] = source["jacobian"].copy(
        data=source["jacobian"].data.map_blocks(counted, dtype="float32", meta=np.empty((0,) * 5, "float32"))
    )
    lazy = query.lag_profile(source)
    assert dask.is_dask_collection(lazy)
    assert reads == []
    lazy.compute()
    assert sorted(shape[0] for shape in reads) == [10, 13]


def test_rows_have_labels_first_and_plain_values():
    values = random_jacobian()
    values[:, 0, 0, 0, 0] = np.nan
    rows = query.rows(query.lag_profile(dataset(values, (23,))).compute())
    assert len(rows) == 2 * 1 * 4 * 3
    assert list(rows[0]) == ["output_step", "output", "lag", "feature", "count", "mean", "mean_abs", "rms"]
    assert rows[0] == {"output_step": 0, "output": "out_0", "lag": 3, "feature": "x_0", "count": 0} | dict.fromkeys(
        ("mean", "mean_abs", "rms")
    )
    assert all(type(value) in (int, float, str, type(None)) for row in rows for value in row.values())


@pytest.fixture
def half_done(write_job):
    """A run of which the first four of seven shards are committed, and one more was written but not committed."""
    table = frame(60)
    table.loc[10, "rain"] = np.nan
    file = write_job(series=table, run={"shard_windows": 8})
    run = prepare(Job.load(file), [Node(2, 0, 8 * 10**9)]).open_or_create()
    worker = Worker(run.place)
    for index in range(5):
        worker.compute(run.layout.shard(index))
    (run.place.path / "commits" / "00000004.json").unlink()
    return run


def test_an_uncommitted_window_is_never_served_as_data(half_done):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened = open_run(half_done.place.path)
    assert dask.is_dask_collection(opened["jacobian"].data)
    np.testing.assert_array_equal(opened["committed"], np.arange(55) < 32)
    assert opened["jacobian"].dtype == "float32"
    served = opened["jacobian"].notnull().all(["output_step", "output", "lag", "feature"]).values
    np.testing.assert_array_equal(served, opened["committed"].values & ~opened["skipped"].values)
    assert xr.open_zarr(half_done.results)["jacobian"][32:40].notnull().all()
    assert (query.lag_profile(opened).compute()["count"] == 32 - 6).all()


def test_there_must_be_a_run(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(Refused, match="run directory"):
            open_run(path)
