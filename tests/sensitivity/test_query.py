from __future__ import annotations

import warnings

import dask
import numpy as np
import pytest
import xarray as xr

from jobs.prepare import prepare
from sensitivity import open_run, query
from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.placement import Node
from sensitivity.worker import Worker
from tests.conftest import frame
from tests.sensitivity.asking import dataset, random_jacobian


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
