"""Published kinds of models as jobs: a run's store holds what a tape in float64 and `predict` give."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import xarray as xr

from jobs.driver import How, run_job
from sensitivity.job import Job
from tests.architectures import FEATURES, LENGTH, built, output_of, twin
from tests.conftest import cut, frame, worst

COUNT = 20
NAMES = (
    *("transformer", "temporal_convolution", "n_beats", "attention_after_lstm", "lstnet", "deep_ar"),
    *("encoder_decoder", "wavenet", "xlstm", "mamba"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "transformer" else pytest.mark.exhaustive) for name in NAMES]
)
def test_a_runs_store_is_the_tapes(write_job, tmp_path, name):
    model, features = built(name), [f"x_{i}" for i in range(FEATURES)]
    table = frame(COUNT + LENGTH - 1, tuple(features))
    summary = run_job(Job.load(write_job(model, table, run={"shard_windows": 8})), How(serial=True))
    assert summary.complete
    dataset = xr.open_zarr(tmp_path / "run" / "results.zarr")
    windows = cut(table[features].to_numpy("float32"), LENGTH)
    prediction, jacobian = taped(name, model, windows)
    assert worst(dataset["jacobian"].values.reshape(jacobian.shape), jacobian) < 1e-5
    assert worst(dataset["prediction"].values.reshape(prediction.shape), prediction) < 1e-5
    told = model.predict(windows, verbose=0)
    told = np.concatenate(list(told.values()), -1) if isinstance(told, dict) else told
    assert worst(dataset["prediction"].values.reshape(told.shape), told) < 1e-5


def taped(name: str, model, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    source = tf.constant(windows, "float64")
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(source)
        found = output_of(twin(name, model), source)
        numbers = tf.unstack(tf.reshape(found, (len(windows), -1)), axis=1)
    rows = tf.stack([tape.gradient(number, source) for number in numbers], 1)
    return found.numpy(), tf.reshape(rows, (*found.shape, *source.shape[1:])).numpy()
