"""Runs of models with an output at every step, whose profile is known: a filter, a recurrence, one both ways."""

from __future__ import annotations

import json
import re

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from keras import Model, layers

import sensitivity
from jobs.driver import How, run_job
from sensitivity import query
from sensitivity.job import Job
from tests.conftest import frame, job_writer, sequential
from tests.jobs.conftest import call

LENGTH = 8
KNOBS = {"kernel": "batch_jacobian", "windows_per_call": 16}  # chosen without trials
WINDOWS = {"a": 30 - LENGTH + 1 - LENGTH, "b": 20 - LENGTH + 1}  # of site a, those that no gap touches
TAPS = np.array([[0.5, 1.0], [-0.25, 0.5], [0.125, 0.25], [0.0, -0.5]], "float32")  # by lag and feature
PULL, GAIN = 0.5, np.array([[1.0], [0.25]], "float32")


def recurrent() -> layers.Layer:
    return layers.SimpleRNN(1, activation="linear", use_bias=False, return_sequences=True)


def weighted(model: Model, *weights: np.ndarray) -> Model:
    model.set_weights(weights)
    return model


def profile(kind: str) -> dict[int, np.ndarray]:
    """The derivative by feature at each lag from the output's own step."""
    if kind == "filter":
        return {lag: TAPS[lag] if lag < len(TAPS) else np.zeros(2) for lag in range(LENGTH)}
    if kind == "recurrence":
        return {lag: PULL**lag * GAIN[:, 0] for lag in range(4)}  # up to max_lag
    return {lag: PULL ** abs(lag) * GAIN[:, 0] * (2 if lag == 0 else 1) for lag in range(1 - LENGTH, LENGTH)}


MODELS = {
    "filter": lambda: weighted(
        sequential((LENGTH, 2), layers.Conv1D(1, len(TAPS), padding="causal", use_bias=False)), TAPS[::-1][..., None]
    ),
    "recurrence": lambda: weighted(sequential((LENGTH, 2), recurrent()), GAIN, np.array([[PULL]])),
    "both ways": lambda: weighted(
        sequential((LENGTH, 2), layers.Bidirectional(recurrent(), merge_mode="sum")),
        *(GAIN, np.array([[PULL]])) * 2,
    ),
}
ASKED = {"filter": {"output_steps": [0, 2, 7]}, "recurrence": {"max_lag": 3}, "both ways": {}}


@pytest.fixture(scope="module", params=list(MODELS))
def run(request, tmp_path_factory):
    """The kind of model, and a run of it over two sites, one of which has a gap."""
    folder, kind = tmp_path_factory.mktemp("aligned"), request.param
    table = pd.concat([frame(30, seed=1).assign(site="a"), frame(20, seed=2).assign(site="b")], ignore_index=True)
    table.loc[12, "heat"] = np.nan
    series = {"path": "series.csv", "features": ["rain", "heat"]}
    asked = {**KNOBS, **ASKED[kind], **({"kernel": "scan"} if kind == "recurrence" else {})}
    file = job_writer(folder)(MODELS[kind](), series=series, sensitivity=asked, run={"shard_windows": 10})
    table.to_csv(folder / "series.csv", index=False)
    summary = run_job(Job.load(file), How(serial=True))
    assert summary.complete
    return kind, summary.run.place.path


def steps_of(kind: str) -> list[int]:
    return ASKED[kind].get("output_steps", list(range(LENGTH)))


def exists(step: int, lag: int) -> bool:
    return 0 <= step - lag < LENGTH


def test_a_run_says_where_outputs_stand(run):
    kind, path = run
    stored = sensitivity.open_run(path)
    assert stored["step_lag"].values.tolist() == [LENGTH - 1 - step for step in steps_of(kind)]
    assert stored["step_lag"].attrs["sees"] == ("all" if kind == "both ways" else "earlier")
    assert stored["step_lag"].attrs["lags_from"] == ("output" if kind == "recurrence" else "window")
    assert "step_lag" in xr.open_zarr(f"{path}/results.zarr").coords


def test_its_profile_is_the_model_s_at_every_output_step_and_site(run):
    kind, path = run
    known = profile(kind)
    found = query.lag_profile(sensitivity.open_run(path), by="site").compute()
    assert found["lag"].values.tolist() == sorted(known, reverse=True)
    for (site, count), step, lag in ((s, t, one) for s in WINDOWS.items() for t in steps_of(kind) for one in known):
        cell = found.sel(site=site, output_step=step, lag=lag).squeeze("output")
        if exists(step, lag):
            assert cell["count"].values.tolist() == [count] * 2
            np.testing.assert_allclose(cell["mean"], known[lag], atol=1e-6)
        else:
            assert not cell["count"].any()
            assert cell["mean"].isnull().all()


def test_commands_count_lags_as_they_are_asked_to(run):
    kind, path = run
    rows = json.loads(call("query", path, "mean", "--lags", "0:1", "--features", "rain", "--format", "json").output)
    told = {(row["output_step"], row["lag"]): (row["count"], row["mean"]) for row in rows}
    for step in steps_of(kind):
        assert told[step, 0] == (sum(WINDOWS.values()), pytest.approx(profile(kind)[0][0]))
    assert told[0, 1] == ((0, None) if kind != "both ways" else told[0, 1])
    rows = json.loads(call("query", path, "mean", "--align", "window", "--format", "json").output)
    told = {(row["output_step"], row["feature"], row["lag"]): row["mean"] for row in rows}
    assert {lag for *_, lag in told} == set(range(LENGTH))
    step = steps_of(kind)[1]
    assert told[step, "rain", LENGTH - 1 - step] == pytest.approx(profile(kind)[0][0])
    assert told[step, "rain", LENGTH - step] == pytest.approx(profile(kind)[1][0])
    rows = json.loads(call("compare", path, path, "mean-abs", "--ci", "0.9", "--format", "json").stdout)
    assert {row["lag"] for row in rows} == set(profile(kind))
    assert {row["mean_abs_difference"] for row in rows} <= {0.0, None}


def test_windows_that_stand_out_show_inputs_by_the_same_lags(run):
    kind, path = run
    found = query.top(query.with_inputs(sensitivity.open_run(path)), 1, lags="0:1")
    last = found.isel(output_step=-1).sel(lag=1, feature="rain")
    table = {"a": frame(30, seed=1), "b": frame(20, seed=2)}[str(found["site"][0].item())]
    at = int(np.flatnonzero(table["time"] == found["time"].values[0])[0])
    assert float(last["input"][0]) == pytest.approx(table["rain"][at - 1], rel=1e-6)
    assert float(last["jacobian"].squeeze()) == pytest.approx(profile(kind)[1][0])
    answer = call("top", path, "--lags", "0:1", "--count", 1, "--align", "output", "--format", "json")
    assert answer.exit_code == 0, answer.output


def test_gradient_times_input_is_by_the_output_s_own_lags(run):
    kind, path = run
    found = query.gradient_input(sensitivity.open_run(path), by="site", lags=[1]).compute()
    series = frame(20, seed=2)["rain"].to_numpy("float32")
    step = steps_of(kind)[1]
    inputs = [series[window + step - 1] for window in range(WINDOWS["b"])]
    told = found.sel(site="b", output_step=step, lag=1, feature="rain").squeeze("output")
    assert float(told["mean"]) == pytest.approx(np.mean(inputs) * profile(kind)[1][0], rel=1e-5)


def test_a_report_speaks_of_lags_from_the_output_s_own_step(run, tmp_path):
    kind, path = run
    assert call("report", path, "-o", tmp_path / "report.html").exit_code == 0
    text = re.sub(r"<[^>]*>|\s+", " ", (tmp_path / "report.html").read_text())
    assert "A lag is counted back from the output's own step" in text.replace("&#39;", "'").replace("&#x27;", "'")
    sees = "later inputs, too" if kind == "both ways" else "inputs up to its own step only"
    assert f"an output depends on {sees}" in text
    assert ("a lag below 0 is of a later input" in text) == (kind == "both ways")
    # Of the recurrence 0.5³ = 12.5 % is left at lag 3; with the zeros of 3 of 8 output steps it was 7.8 %.
    faded = {"recurrence": "has not faded at the oldest lag (12"}
    assert faded.get(kind, "influence has faded to") in text
    assert call("report", path, "-o", tmp_path / "window.html", "--align", "window").exit_code == 0
    assert "output's own step" not in (tmp_path / "window.html").read_text().split("How to read this")[-1]


def test_pictures_are_drawn_both_ways(run, tmp_path):
    _, path = run
    for how in ((), ("--align", "window")):
        assert call("plot", path, "step-lag", "-o", tmp_path / "steps.png", *how).exit_code == 0


def test_an_encoder_and_decoder_as_long_as_the_window_has_steps_of_the_future(write_job):
    model = sequential((4, 2), layers.LSTM(2), layers.RepeatVector(4), layers.LSTM(2, return_sequences=True))
    summary = run_job(Job.load(write_job(model, frame(20), sensitivity=KNOBS)), How(serial=True))
    path = summary.run.place.path
    assert "step_lag" not in sensitivity.open_run(path)
    assert query.mean(sensitivity.open_run(path)).compute()["count"].min() == 17
    answer = call("query", path, "mean", "--align", "output")
    assert answer.exit_code == 2
    assert "not known to belong to steps of the window" in answer.output
