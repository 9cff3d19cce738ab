"""Runs of causal recurrent models: scanned, whole or of some outputs, or with lags up to a limit."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xarray as xr
from click.testing import CliRunner
from keras import layers

import sensitivity
from jobs.cli import main
from jobs.driver import How, run_job
from sensitivity.commits import read_commits
from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.store import Run
from tests.conftest import cut, frame, sequential, tape_jacobian, worst

STEPS = 40


@pytest.fixture
def causal():
    return sequential((6, 2), layers.GRU(3, return_sequences=True), layers.Dense(2))


def expected(model) -> np.ndarray:
    return tape_jacobian(model, cut(frame(STEPS).drop(columns="time").to_numpy("float32"), 6))


def test_a_run_keeps_lags_up_to_its_limit_from_each_output(write_job, causal):
    file = write_job(causal, frame(STEPS), sensitivity={"max_lag": 2})
    summary = run_job(Job.load(file), How(serial=True))
    assert summary.complete
    stored = xr.open_zarr(summary.run.results)
    whole = expected(causal)
    assert stored["jacobian"].shape == (STEPS - 5, 6, 2, 3, 2)
    assert stored["lag"].values.tolist() == [2, 1, 0]
    assert stored["lag"].attrs["long_name"] == "steps back from the output's own step"
    for step, lag in np.ndindex(6, 3):
        found = stored["jacobian"].isel(output_step=step).sel(lag=lag).values
        if lag > step:
            assert not found.any()
        else:
            assert worst(found, whole[:, step, :, step - lag]) < 1e-5
    assert {record.setting["kernel"] for record in read_commits(summary.run).values()} == {"scan"}
    audit = summary.run.content["audit"]
    assert max(audit["vjp_error"], audit["difference_error"]) < 1e-3
    answer = CliRunner().invoke(main, ["query", str(summary.run.place.path), "lag-profile", "--format", "json"])
    rows = json.loads(answer.output)
    assert {row["lag"] for row in rows} == {0, 1, 2}
    assert sensitivity.open_run(summary.run.place.path)["committed"].all()


def test_a_run_continues_with_its_own_limit_only(write_job, causal):
    run_job(Job.load(write_job(causal, frame(STEPS), sensitivity={"max_lag": 2})), How(serial=True))
    with pytest.raises(Refused, match="sensitivity.max_lag: the run has 2, the job 3"):
        run_job(Job.load(write_job(causal, frame(STEPS), sensitivity={"max_lag": 3})), How(serial=True))
    with pytest.raises(Refused, match="0 or more"):
        Job.load(write_job(causal, frame(STEPS), sensitivity={"max_lag": -1}))


def test_a_run_keeps_the_outputs_that_are_wanted_by_their_steps(write_job, causal):
    wanted = {"output_steps": [1, -1], "outputs": ["output_1"]}
    summary = run_job(Job.load(write_job(causal, frame(STEPS), sensitivity=wanted)), How(serial=True))
    stored = sensitivity.open_run(summary.run.place.path)
    assert stored["jacobian"].dims == ("time", "output_step", "output", "lag", "feature")
    assert (stored["output_step"].values.tolist(), stored["output"].values.tolist()) == ([1, 5], ["output_1"])
    assert worst(stored["jacobian"].values, expected(causal)[:, [1, 5]][:, :, 1:]) < 1e-5
    assert stored["prediction"].shape == (STEPS - 5, 2, 1)
    answer = CliRunner().invoke(main, ["query", str(summary.run.place.path), "importance", "--format", "json"])
    assert {(row["output_step"], row["output"]) for row in json.loads(answer.output)} == {
        (1, "output_1"),
        (5, "output_1"),
    }
    with pytest.raises(Refused, match=r"sensitivity.output_steps: the run has \[1, 5\], the job None"):
        run_job(Job.load(write_job(causal, frame(STEPS), sensitivity={"outputs": [1]})), How(serial=True))
    again = {**wanted, "outputs": [1]}  # the same by its number
    assert run_job(Job.load(write_job(causal, frame(STEPS), sensitivity=again)), How(serial=True)).complete


def test_a_causal_model_is_scanned_whole_without_a_limit(write_job, causal):
    summary = run_job(Job.load(write_job(causal, frame(STEPS), sensitivity={"kernel": "scan"})), How(serial=True))
    assert worst(xr.open_zarr(summary.run.results)["jacobian"].values, expected(causal)) < 1e-5
    assert Run.open(summary.run.place.path).facts.scan.outputs == 2


def test_a_model_that_cannot_be_scanned_is_refused_by_its_layer(write_job):
    model = sequential((6, 2), layers.Bidirectional(layers.GRU(3)), layers.Dense(1))
    with pytest.raises(Refused, match="bidirectional.*goes backwards too"):
        run_job(Job.load(write_job(model, frame(STEPS), sensitivity={"kernel": "scan"})), How(serial=True))


def test_in_a_notebook_lags_are_limited_too(causal):
    windows = cut(frame(20).drop(columns="time").to_numpy("float32"), 6)
    whole, report = sensitivity.jacobian(causal, windows, "2GB", report=True)
    assert report.setting.kernel == "scan"
    assert worst(whole, tape_jacobian(causal, windows)) < 1e-5
    found = sensitivity.jacobian(causal, windows, "2GB", max_lag=1)
    assert found.shape == (15, 6, 2, 2, 2)
    np.testing.assert_allclose(found[:, 4, :, 0], whole[:, 4, :, 3], rtol=1e-4, atol=1e-6)


def test_lags_beyond_the_window_are_refused(write_job, causal):
    with pytest.raises(Refused, match=r"(?s)sensitivity.max_lag.*99, and windows of \d+ steps"):
        run_job(Job.load(write_job(causal, frame(STEPS), sensitivity={"max_lag": 99})), How(serial=True))
