"""Jobs of models whose input is whole numbers: by what an embedding gives of them."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import xarray as xr
from keras import layers

import sensitivity
from jobs.driver import How, run_job
from sensitivity.errors import Refused
from sensitivity.job import Job
from tests.conftest import cut, frame, worst

CLASSES = np.random.default_rng(0).integers(0, 7, (40, 2))


def model_of(*shape: int) -> keras.Model:
    keras.utils.set_random_seed(1)
    source = keras.Input(shape, dtype="int32", name="kind")
    embedded = layers.Embedding(7, 3, name="meaning")(source)
    steps = layers.Reshape((6, -1))(embedded)
    return keras.Model(source, layers.Dense(2)(layers.LSTM(4)(steps)))


def job_of(write_job, model, columns=("rain", "heat"), values=CLASSES, **sections) -> Job:
    table = frame(40)[["time"]].assign(**dict(zip(columns, values.T, strict=True)))
    wanted = {"wrt": "meaning", "windows_per_call": 8, **sections.pop("sensitivity", {})}
    return Job.load(write_job(model, table, sensitivity=wanted, windows={"length": 6}, **sections))


@pytest.mark.parametrize(("shape", "columns"), [((6,), ["rain"]), ((6, 2), ["rain", "heat"])])
def test_derivatives_by_an_embedding_are_those_of_python(shape, columns, write_job, tmp_path):
    model, values = model_of(*shape), CLASSES[:, : len(columns)]
    assert run_job(job_of(write_job, model, columns, values), How(serial=True)).complete
    found = xr.open_zarr(tmp_path / "run" / "results.zarr")["jacobian"].values
    windows = cut(values, 6).reshape(-1, *shape)
    expected = sensitivity.jacobian(model, windows, wrt="meaning", windows_per_call=8)
    assert found.size == expected.size
    assert worst(found.reshape(expected.shape), expected) < 1e-6


def test_by_the_input_itself_there_is_none(write_job):
    with pytest.raises(Refused, match='wrt = "meaning"') as refusal:
        run_job(
            job_of(write_job, model_of(6), ["rain"], CLASSES[:, :1], sensitivity={"wrt": "input"}), How(serial=True)
        )
    assert "input 'kind' of whole numbers" in str(refusal.value)


@pytest.mark.parametrize(
    ("values", "sections", "what"),
    [
        (CLASSES[:, :1] + 0.5, {}, "not whole"),
        (CLASSES[:, :1], {"text": "\n[series.scaling]\nmean = [1.0]\nstd = [2.0]\n"}, "is scaled"),
    ],
)
def test_columns_that_would_be_rounded_are_refused_by_name(values, sections, what, write_job):
    with pytest.raises(Refused, match=what) as refusal:
        run_job(job_of(write_job, model_of(6), ["rain"], values, **sections), How(serial=True))
    assert "'rain'" in str(refusal.value)
