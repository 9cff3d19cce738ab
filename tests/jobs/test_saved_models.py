"""Jobs whose model is a SavedModel's directory, or of half precision."""

from __future__ import annotations

import shutil

import keras
import numpy as np
import pytest
import xarray as xr
from keras import layers

from jobs.describe import described
from jobs.driver import How, resume, run_job
from jobs.prepare import prepare
from sensitivity.addresses import copy_files, place_at
from sensitivity.commits import forget, read_commits
from sensitivity.errors import Refused
from sensitivity.integrity import inspect, repair
from sensitivity.job import Job
from sensitivity.loading import cast
from sensitivity.store import Run
from tests.conftest import cut, frame, sequential, tape_jacobian, worst

SERIES = frame(60)
SERIAL = How(serial=True)


def lstm():
    return sequential((6, 2), layers.LSTM(4, return_sequences=True), layers.Dense(1))


@pytest.fixture
def saved(tmp_path):
    """A job's model as it is given, and the same as a Keras model."""
    model = lstm()
    model.export(tmp_path / "saved", verbose=False)
    return model


def expected(model) -> np.ndarray:
    windows = cut(SERIES[["rain", "heat"]].to_numpy("float64"), 6)
    return tape_jacobian(cast(model, "float64"), windows)


def jacobian_of(run) -> np.ndarray:
    return xr.open_zarr(Run.open(run).results)["jacobian"].values


def job_of(write_job, path="saved", **sections) -> Job:
    return Job.load(write_job({"path": str(path)}, SERIES, **{"run": {"shard_windows": 20}, **sections}))


def test_a_run_stands_on_its_own_copy(saved, write_job, tmp_path):
    assert run_job(job_of(write_job), SERIAL).complete
    assert worst(jacobian_of(tmp_path / "run"), expected(saved)) < 1e-5
    assert not (tmp_path / "run" / "model.keras").exists()
    shutil.rmtree(tmp_path / "saved")
    forget(Run.open(tmp_path / "run"), 1)
    again = resume(tmp_path / "run", SERIAL)
    assert again.complete
    assert again.computed == 20
    assert worst(jacobian_of(tmp_path / "run"), expected(saved)) < 1e-5
    lost = [text for record in read_commits(Run.open(tmp_path / "run")).values() for text in record.setting["lost"]]
    assert any("no layers to walk through" in text for text in lost)


def test_a_damaged_copy_is_found_and_restored(saved, write_job, tmp_path):
    assert run_job(job_of(write_job), SERIAL).complete
    run, name = Run.open(tmp_path / "run"), "model/variables/variables.index"
    (run.place.path / name).unlink()
    damages = [damage for part in inspect(run) for damage in part.damages]
    assert [damage.file for damage in damages] == [name]
    assert repair(run, damages) == []
    assert not [damage for part in inspect(run) for damage in part.damages]


def test_model_and_run_in_an_object_store(saved, write_job, tmp_path, s3):
    copy_files(place_at(tmp_path / "saved"), place_at(f"{s3.home}/saved"))
    job = job_of(write_job, f"{s3.home}/saved/", run={"path": f"{s3.home}/run"})
    assert run_job(job, SERIAL).complete
    assert worst(jacobian_of(f"{s3.home}/run"), expected(saved)) < 1e-5


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda folder: shutil.rmtree(folder), "no such file"),
        (lambda folder: (folder / "saved_model.pb").unlink(), "no saved_model.pb in it"),
        (lambda folder: (folder / "saved_model.pb").write_bytes(b"garbage"), "Error"),
        (lambda folder: (folder / "variables" / "variables.data-00000-of-00001").write_bytes(b""), "Error"),
    ],
    ids=["missing", "no graph", "garbage", "no weights"],
)
def test_a_directory_that_is_no_saved_model_is_refused(spoil, what, saved, write_job, tmp_path):
    spoil(tmp_path / "saved")
    with pytest.raises(Refused, match=what) as refusal:
        prepare(job_of(write_job))
    assert refusal.value.key == "model.path"
    assert not (tmp_path / "run").exists()


def test_another_dtype_than_its_own_is_refused(saved, write_job):
    with pytest.raises(Refused, match="SavedModel of float32") as refusal:
        prepare(job_of(write_job, run={"dtype": "float64"}))
    assert refusal.value.key == "run.dtype"


def test_plan_and_commits_say_that_half_precision_is_computed_in_full(write_job, tmp_path):
    policy = keras.DTypePolicy("mixed_float16")
    model = sequential((6, 2), layers.LSTM(4, dtype=policy), layers.Dense(1, dtype="float32"))
    job = Job.load(write_job(model, SERIES))
    said = "computed in float32: the model's policy is mixed_float16"
    assert said in described(prepare(job))
    assert run_job(job, SERIAL).complete
    records = read_commits(Run.open(tmp_path / "run")).values()
    assert all(said in record.setting["lost"] for record in records)
    twin = lstm_of("float64", model)
    windows = cut(SERIES[["rain", "heat"]].to_numpy("float64"), 6)
    assert worst(jacobian_of(tmp_path / "run")[:, 0], tape_jacobian(twin, windows)) < 1e-5


def lstm_of(dtype, like):
    twin = sequential((6, 2), layers.LSTM(4, dtype=dtype), layers.Dense(1, dtype=dtype))
    twin.set_weights(like.get_weights())
    return twin
