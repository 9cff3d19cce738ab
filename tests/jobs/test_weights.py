"""Derivatives by weights as a job: the store's numbers and labels, and that it is asked, shown and resumed."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import xarray as xr
from keras import layers

import sensitivity
from jobs.driver import How, resume, run_job
from sensitivity import query
from sensitivity.job import Job
from sensitivity.loading import cast
from tests.conftest import cut, frame, sequential, worst
from tests.jobs.conftest import call

LENGTH, STEPS = 4, 27  # 24 windows
MEAN, STD = [0.5, -1.0], [2.0, 0.5]
PLAIN = {"kernel": "gradient", "windows_per_call": 8}
NAMES = ["net/kernel", "net/recurrent_kernel", "net/bias", "head/kernel", "head/bias"]
SIZES = [6, 9, 3, 3, 1]


def net() -> keras.Model:
    return sequential((LENGTH, 2), layers.SimpleRNN(3, name="net"), layers.Dense(1, name="head"))


@pytest.fixture
def make(write_job):
    def made(product: str, wrt: str, **more) -> Path:
        return write_job(
            net(),
            frame(STEPS),
            text=f"[series.scaling]\nmean = {MEAN}\nstd = {STD}\n",
            sensitivity={"product": product, "wrt": wrt, **more},
            run={"path": f"runs/{product}", "shard_windows": 8},
        )

    return made


def exact() -> np.ndarray:
    """`(window, parameter)` in float64, window by window: no derivative by weights is over the features' std."""
    model, rows = cast(net(), "float64"), []
    for window in (cut(frame(STEPS)[["rain", "heat"]].to_numpy(), LENGTH) - MEAN) / STD:
        with tf.GradientTape() as tape:
            output = model(tf.constant(window[None]))[0, 0]
        found = tape.gradient(output, model.trainable_variables)
        rows.append(np.concatenate([np.ravel(part) for part in found]))
    return np.stack(rows)


def stored(path: Path) -> tuple[Path, xr.Dataset]:
    summary = run_job(Job.load(path), How(serial=True))
    assert summary.complete
    run = Path(str(summary.run.place))
    return run, xr.open_zarr(run / "results.zarr").load()


def test_a_jacobian_by_weights_is_stored_asked_shown_and_reported(make, tmp_path):
    job = make("jacobian", "weights", **PLAIN)
    told = call("plan", job)
    assert told.exit_code == 0, told.output
    assert "88 B a window, 2.11 kB in all, for 22 parameters" in told.output
    assert 'product = "gradient_norm"' in told.output
    run, found = stored(job)
    assert found["jacobian"].dims == ("time", "output_step", "output", "parameter")
    labels = found["parameter"].values.tolist()
    assert labels[:3] == ["net/kernel[0,0]", "net/kernel[0,1]", "net/kernel[0,2]"]
    assert labels[-1] == "head/bias[0]"
    assert "input_std" not in found
    expected = exact()
    assert worst(found["jacobian"].values[:, 0, 0], expected) < 1e-5
    asked = query.importance(sensitivity.open_run(str(run))).compute()
    assert asked["importance"].dims == ("output_step", "output", "parameter")
    assert worst(asked["importance"].values[0, 0], np.abs(expected).mean(0)) < 1e-5
    top = query.top(sensitivity.open_run(str(run)), 3, scaled=False)
    assert (np.diff(top["score"]) <= 0).all()
    for command in (
        ["query", run, "importance", "--format", "csv"],
        ["top", run],
        ["plot", run, "importance", "-o", tmp_path / "importance.png"],
        ["report", run, "-o", tmp_path / "report.html"],
    ):
        answer = call(*command)
        assert answer.exit_code == 0, answer.output
    before = sorted((run / "commits").iterdir())
    before[0].unlink()
    assert resume(run, How(serial=True)).complete
    assert sorted((run / "commits").iterdir()) == before


def test_norms_by_weight_are_labelled_with_their_names(make, tmp_path):
    run, found = stored(make("gradient_norm", "weights", **PLAIN))
    assert found["gradient_norm"].dims == ("time", "output_step", "output", "weight")
    assert found["weight"].values.tolist() == NAMES
    parts = np.split(exact(), np.cumsum(SIZES)[:-1], 1)
    assert worst(found["gradient_norm"].values[:, 0, 0], np.stack([np.linalg.norm(p, axis=1) for p in parts], 1)) < 1e-5
    asked = query.importance(sensitivity.open_run(str(run))).compute()
    assert asked["importance"].dims == ("output_step", "output", "weight")
    assert call("report", run, "-o", tmp_path / "report.html").exit_code == 0


def test_a_hessian_by_one_kernel_has_its_rows_and_columns(make):
    knobs = {"kernel": "batch_jacobian", "windows_per_call": 8, "experimental_use_pfor": False}
    _, found = stored(make("hessian", "weights:head", **knobs))
    assert found["hessian"].dims == ("time", "output_step", "output", "parameter", "parameter_2")
    assert found["parameter_2"].values.tolist() == [*(f"head/kernel[{i},0]" for i in range(3)), "head/bias[0]"]
    assert not found["hessian"].values.any()  # the output is linear in the last layer's weights
