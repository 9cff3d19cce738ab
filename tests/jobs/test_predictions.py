"""What a run stores as predictions is what `model.predict` gives."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import xarray as xr
from keras import layers

from jobs.driver import How, run_job
from sensitivity.audit import Audit
from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.store import Run
from tests.conftest import cut, frame

SERIES = frame(40)
WINDOWS = cut(SERIES[["rain", "heat"]].to_numpy("float32"), 6)


class Doubling(layers.Layer):
    """Trains by default, and gives twice as much then."""

    def call(self, inputs, training=True):
        return 2.0 * inputs if training else inputs


class InItsOwnUnits(keras.Model):
    """Predicts in other units than it is trained in."""

    def predict_step(self, data):
        return 10.0 * super().predict_step(data)


def functional(stages, kind=keras.Model):
    keras.utils.set_random_seed(1)
    source = keras.Input((6, 2))
    return kind(source, stages(source))


def training_by_default():
    return functional(lambda x: layers.Dense(2)(layers.LSTM(3, return_sequences=True)(Doubling()(x))))


def built_in_training():
    def stages(x):
        normal = layers.BatchNormalization()(x, training=True)
        return layers.LSTM(3, dropout=0.5)(layers.Dropout(0.5)(normal, training=True), training=True)

    return functional(stages)


def transformer():
    def stages(x):
        for _ in range(2):
            x = x + layers.Dropout(0.1)(layers.MultiHeadAttention(2, 2, dropout=0.1)(x, x))
            x = x + layers.Dense(2)(layers.Dropout(0.1)(layers.Dense(3, activation="relu")(x)))
        return layers.Dense(1)(layers.GlobalAveragePooling1D()(x))

    return functional(stages)


def in_its_own_units():
    return functional(layers.LSTM(2), InItsOwnUnits)


def job_of(write_job, model) -> Job:
    path = {"path": f"tests.jobs.test_predictions:{model.__name__}"}
    return Job.load(write_job(path, SERIES, sensitivity={"windows_per_call": 8}, run={"shard_windows": 20}))


@pytest.mark.parametrize("model", [training_by_default, built_in_training])
def test_predictions_in_the_store_are_those_of_predict(model, write_job, tmp_path):
    assert run_job(job_of(write_job, model), How(serial=True)).complete
    found = xr.open_zarr(tmp_path / "run" / "results.zarr")["prediction"].values
    expected = model().predict(WINDOWS, verbose=0)
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)
    assert Audit(**Run.open(tmp_path / "run").content["audit"]).predict_error < 1e-5


def test_a_file_whose_layers_make_layers_of_their_own_runs(write_job, tmp_path):
    model = transformer()
    file = write_job(model, SERIES, sensitivity={"windows_per_call": 8}, run={"shard_windows": 20})
    transformer(), layers.Dropout(0.1)
    assert run_job(Job.load(file), How(serial=True)).complete
    found = xr.open_zarr(tmp_path / "run" / "results.zarr")["prediction"].values
    np.testing.assert_allclose(found[:, 0], model.predict(WINDOWS, verbose=0), rtol=1e-5, atol=1e-6)


def test_a_job_of_a_model_whose_predict_does_more_is_refused_before_anything_is_written(write_job, tmp_path):
    with pytest.raises(Refused, match=r"differs from its predict by [0-9.e+-]+ of the largest"):
        run_job(job_of(write_job, in_its_own_units), How(serial=True))
    assert not (tmp_path / "run").exists()
