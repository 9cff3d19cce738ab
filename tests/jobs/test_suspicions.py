"""A model trained on scaled inputs and run on raw ones: `plan`, `run` and the report say what is suspicious."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from keras import layers

from tests.conftest import frame, sequential
from tests.jobs.conftest import call

RAW = "columns 'rain', 'heat': far from the values of scaled inputs"
SATURATED = "model: most derivatives are near zero"
CODE = "column 'rain': a value that may stand for a missing one (-999 in 3 of 60 values"


def said(text: str) -> str:
    return text.replace("&#x27;", "'").replace("&#39;", "'")


@pytest.fixture
def trained_on_scaled():
    return sequential((6, 2), layers.Dense(3, "tanh"), layers.Flatten(), layers.Dense(2, "tanh"), layers.Dense(1))


def raw():
    table = frame(60)
    table["rain"], table["heat"] = 500 + 90 * table["rain"], 900 + 40 * table["heat"]
    table.loc[[20, 30, 40], "rain"] = -999.0
    return table


def test_raw_values_codes_and_saturation_are_told_everywhere(write_job, trained_on_scaled):
    job = write_job(trained_on_scaled, raw())
    told = (RAW, SATURATED, CODE)
    planned = call("plan", job)
    assert planned.exit_code == 0
    assert all(f"suspicious       {one}" in planned.stdout for one in told), planned.stdout
    done = call("run", job, "--serial")
    assert done.exit_code == 0
    assert all(f"suspicious: {one}" in done.stderr for one in told)
    run = next(job.parent.rglob("job.json")).parent
    kept = json.loads((run / "job.json").read_text())["suspicions"]
    assert [one["where"] for one in kept] == ["column 'rain'", "columns 'rain', 'heat'", "model"]
    again = call("run", job, "--serial")
    assert all(f"suspicious: {one}" in again.stderr for one in told)
    assert all(f"suspicious       {one}" in call("plan", job).stdout for one in told)
    page = run.parent / "page.html"
    assert call("report", run, "-o", page).exit_code == 0
    assert all(f"Suspicious: {one}" in said(page.read_text()) for one in told)


def test_a_model_that_is_run_as_it_was_trained_is_quiet(write_job, trained_on_scaled):
    job = write_job(trained_on_scaled, frame(60))
    done = call("run", job, "--serial")
    assert "suspicious" not in call("plan", job).stdout + done.stderr
    run = next(job.parent.rglob("job.json")).parent
    page = run.parent / "page.html"
    assert call("report", run, "-o", page).exit_code == 0
    assert "Suspicious: model" not in page.read_text()
    assert "Suspicious: column" not in page.read_text()


def test_elasticity_says_how_many_outputs_are_near_zero(write_job):
    model = sequential((6, 2), layers.Flatten(), layers.Dense(1, "relu"))
    job = write_job(model, frame(80))
    assert call("run", job, "--serial").exit_code == 0
    run = next(job.parent.rglob("job.json")).parent
    found = call("query", run, "elasticity", "--format", "json")
    rows = json.loads(found.stdout)
    table = frame(80).drop(columns="time").to_numpy("float32")
    outputs = model.predict(np.stack([table[i : i + 6] for i in range(75)]), verbose=0)[:, 0].astype(float)
    share = (np.abs(outputs) < 0.01 * outputs.std()).mean()
    assert share > 0.1
    assert rows[0]["near_zero"] == pytest.approx(share)
    assert "suspicious: elasticity: outputs are near zero" in found.stderr
    assert f"in {100 * share:.2g} % of windows the output is below 1 %" in found.stderr
    plain = call("query", run, "mean")
    assert "suspicious" not in plain.stderr
    page = Path(run).parent / "page.html"
    assert call("report", run, "-o", page).exit_code == 0
    assert "Suspicious: elasticity: outputs are near zero" in page.read_text()
