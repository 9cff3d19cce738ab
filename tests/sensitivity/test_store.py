"""The run directory: what it holds, who may use it, what it refuses, what it survives."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from keras import layers

from jobs.prepare import prepare
from sensitivity import store
from sensitivity.commits import (
    Failure,
    Results,
    chunk_keys,
    commit,
    forget,
    read_commit,
    read_commits,
    read_failures,
    record_failure,
)
from sensitivity.engine import Tuned
from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.lease import _OWNER, Lease, LeaseLost, Owner
from sensitivity.patience import StoreFailed
from sensitivity.placement import Node
from sensitivity.standing import stand
from sensitivity.store import Run
from sensitivity.worker import Worker
from tests.conftest import cut, frame, missing, sequential, tape_jacobian, worst

HERE = [Node(2, 0, 8 * 10**9)]


def started(job_file: Path) -> Run:
    return prepare(Job.load(job_file), HERE).open_or_create()


@pytest.fixture
def run(write_job) -> Run:
    """55 windows in shards of 8, a gap in the series; nothing computed yet."""
    table = frame(60)
    table.loc[30, "rain"] = np.nan
    return started(write_job(series=table, windows={"stride": 1}, run={"shard_windows": 8}))


def test_the_directory_holds_what_the_design_says(run):
    assert {entry.name for entry in run.place.path.iterdir()} == {
        *("job.json", "results.zarr", "commits", "failures", "tuning.json", "model.keras", "series.zarr")
    }
    assert {"job", "fingerprints", "versions"} <= set(run.content)
    assert set(run.content["fingerprints"]) == {"job", "model", "series"}


def test_the_template_opens_with_no_help_and_no_warning(run):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = xr.open_zarr(str(run.results))
        dataset.load()
    assert dataset["jacobian"].dims == ("time", "output_step", "output", "lag", "feature")
    assert dataset["prediction"].dims == ("time", "output_step", "output")
    assert dataset["jacobian"].shape == (55, 1, 1, 6, 2)
    assert dataset["jacobian"].isnull().all()
    assert set(dataset.data_vars) == {"jacobian", "prediction"}
    np.testing.assert_array_equal(dataset["time"], frame(60)["time"][5:])
    np.testing.assert_array_equal(dataset["lag"], [5, 4, 3, 2, 1, 0])
    assert dataset["feature"].values.tolist() == ["rain", "heat"]
    assert dataset["output"].values.tolist() == ["output"]
    np.testing.assert_array_equal(np.flatnonzero(dataset["skipped"]), np.arange(25, 31))
    assert dataset["jacobian"].encoding["chunks"] == (8, 1, 1, 6, 2)


@pytest.mark.parametrize("stride", [1, 7])
@pytest.mark.parametrize(
    "times", [np.arange(1900, 1960), 0.25 * np.arange(60), pd.date_range("1900-01-01", periods=60, freq="MS")], ids=str
)
def test_times_of_every_kind_are_labelled(write_job, stride, times):
    run = started(write_job(series=frame(60).assign(time=times), windows={"stride": stride}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = xr.open_zarr(run.results)["time"].values
    np.testing.assert_array_equal(found, times[5::stride])


def test_windows_far_apart_are_the_tapes(write_job):
    run = started(write_job(series=frame(500), windows={"stride": 40}))
    Worker(run.place).compute(run.layout.shard(0))
    windows = cut(frame(500)[["rain", "heat"]].to_numpy("float32"), 6, 40)
    found = xr.open_zarr(run.results)["jacobian"].values[:, 0]
    assert worst(found, tape_jacobian(store.load_run_model(run), windows)) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_lambda_built_by_a_function_runs_in_either_dtype(write_job, tmp_path, dtype):
    (tmp_path / f"lambdas_{dtype}.py").write_text(
        "import keras\nfrom keras import layers\n"
        "def build():\n"
        "    factor = 2.0\n"
        "    source = keras.Input((6, 2))\n"
        "    twice = layers.Lambda(lambda x: factor * x)(source)\n"
        "    return keras.Model(source, layers.Dense(1, kernel_initializer='ones')(layers.Flatten()(twice)))\n"
    )
    file = edit(write_job(run={"dtype": dtype}), 'path = "model.keras"', f'path = "lambdas_{dtype}:build"')
    run = started(file)
    Worker(run.place).compute(run.layout.shard(0))
    jacobian = xr.open_zarr(run.results)["jacobian"]
    assert jacobian.dtype == dtype
    assert (jacobian == 2).all()


def test_code_that_comes_with_a_run_directory_is_not_imported(write_job, tmp_path):
    (tmp_path / "own.py").write_text(
        "from keras import layers\nfrom tests.conftest import sequential\n"
        "def build(): return sequential((6, 2), layers.Flatten(), layers.Dense(1))\n"
    )
    run = started(edit(write_job(), 'path = "model.keras"', 'path = "own:build"'))
    for directory in (str(run.place), f"{run.place}/commits", "."):
        job = {**run.content["job"], "directory": directory}
        with pytest.raises(Refused, match="came with the run directory"):
            store.load_run_model(replace(run, content={**run.content, "job": job}))
    assert store.load_run_model(run).count_params() == 13


def test_a_shard_is_done_only_with_its_commit_record(run):
    worker = Worker(run.place)
    shard = run.layout.shard(2)
    record = worker.compute(shard)
    assert read_commits(run) == {2: record}
    assert (record.start, record.stop, record.computed, record.skipped) == (16, 24, 8, 0)
    assert set(record.chunks) == set(chunk_keys(run, shard)) == {"jacobian/c.2.0.0.0.0", "prediction/c.2.0.0"}
    assert record.peak_memory > 10**8
    assert (run.place.path / "commits" / "00000002.json").exists()
    assert [shard.index for shard in missing(run)] == [0, 1, 3, 4, 5, 6]
    dataset = xr.open_zarr(run.results)
    assert dataset["jacobian"][16:24].notnull().all()
    assert dataset["jacobian"][:16].isnull().all()


def test_what_is_stored_is_the_tape(run):
    worker = Worker(run.place)
    for shard in run.layout.shards():
        worker.compute(shard)
    assert worker.kernel.traces == 1
    windows = cut(frame(60)[["rain", "heat"]].to_numpy("float32"), 6)
    whole = np.delete(np.arange(55), np.arange(25, 31))
    model = store.load_run_model(run)
    dataset = xr.open_zarr(run.results)
    assert worst(dataset["jacobian"].values[whole, 0], tape_jacobian(model, windows[whole])) < 1e-5
    np.testing.assert_allclose(dataset["prediction"].values[whole, 0], model(windows[whole]), rtol=1e-5, atol=1e-7)
    assert np.isnan(dataset["jacobian"].values[25:31]).all()
    assert sum(record.skipped for record in read_commits(run).values()) == 6


def test_a_committed_shard_is_not_computed_again(run, monkeypatch):
    worker = Worker(run.place)
    record = worker.compute(run.layout.shard(0))
    monkeypatch.setattr(worker, "_differentiate", lambda *_: pytest.fail("computed again"))
    assert worker.compute(run.layout.shard(0), attempt=2) == record


def test_the_derivative_is_by_the_series_own_units(write_job):
    table = frame(60)
    table["rain"] = 100 + 5 * table["rain"]
    scaling = {"mean": [100.0, 0.0], "std": [5.0, 0.5]}
    text = f"[series.scaling]\nmean = {scaling['mean']}\nstd = {scaling['std']}\n"
    run = started(write_job(series=table, text=text))
    Worker(run.place).compute(run.layout.shard(0))
    values = (table[["rain", "heat"]].to_numpy() - scaling["mean"]) / scaling["std"]
    expected = tape_jacobian(store.load_run_model(run), cut(values, 6).astype("float32")) / scaling["std"]
    found = xr.open_zarr(run.results)["jacobian"].values[:, 0]
    assert worst(found, expected) < 1e-5


def test_derivatives_that_are_not_finite_are_counted_apart_from_gaps(write_job):
    import tensorflow as tf

    root = layers.Lambda(tf.sqrt, output_shape=(1,))  # NaN below zero
    model = sequential((6, 2), layers.Flatten(), layers.Dense(1), root)
    table = frame(60)
    table.loc[30, "rain"] = np.nan
    run = started(write_job(series=table))
    worker = Worker(run.place)
    worker.kernel = Tuned(replace(worker.kernel.target, model=model), run.choice.setting)
    record = worker.compute(run.layout.shard(0))
    whole = np.delete(np.arange(55), np.arange(25, 31))
    windows = cut(table[["rain", "heat"]].to_numpy("float32"), 6)[whole]
    assert (record.computed, record.skipped) == (49, 6)
    assert record.not_finite == 12 * int(np.isnan(model(windows)).sum()) > 0


def test_chunks_that_two_writers_would_share_are_refused(run):
    results = Results(run)
    block = np.zeros((8, 1, 1, 6, 2), "float32")
    with pytest.raises(ValueError, match="whole chunks"):
        results.write_chunks(4, 12, block)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:40]),
        lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "job": "another"})),
        lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "stop": 3})),
        lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "chunks": {}})),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "setting": None})),
        lambda path: path.rename(path.with_name("00000005.json")),
        lambda path: (path.parents[1] / "results.zarr" / "jacobian" / "c.0.0.0.0.0").unlink(),
    ],
)
def test_a_commit_record_that_does_not_agree_counts_as_missing(run, damage):
    Worker(run.place).compute(run.layout.shard(0))
    damage(run.place.path / "commits" / "00000000.json")
    assert read_commits(run) == {}
    assert len(missing(run)) == run.layout.shard_count


def test_foreign_files_among_the_records_do_no_harm(run):
    for name in ("notes.txt", "x.json", "99999999.json", ".00000001.json.12.tmp", "3.json", "².json"):
        (run.place.path / "commits" / name).write_text("{}")
    (run.place.path / "commits" / "00000002.json").mkdir()
    os.mkfifo(run.place.path / "commits" / "00000004.json")
    assert read_commits(run) == {}
    odd = []
    assert stand(run, odd.append).tally.shards == 0
    assert [str(record).split(":")[0] for record in odd] == [f"shard {index} counts as missing" for index in (2, 4)]
    forget(run, 2)
    assert Worker(run.place).compute(run.layout.shard(2)).shard == 2


def test_failures_are_kept_until_the_shard_is_committed(run):
    failure = Failure(3, 24, 32, 3, "ValueError: no", "Traceback", "host")
    record_failure(run, failure)
    assert read_failures(run) == {3: failure}
    record = Worker(run.place).compute(run.layout.shard(3), attempt=4)
    assert record.attempt == 4
    assert read_failures(run) == {}
    commit(run, record)
    assert read_commit(run, run.layout.shard(3)) == record


def rounded_otherwise(run: Run, index: int) -> dict[str, str]:
    """The shard's chunks written by a worker whose arithmetic differs in the last digit; their checksums."""
    results, shard = Results(run), run.layout.shard(index)
    stored = xr.open_zarr(run.results)
    results.write_chunks(shard.start, shard.stop, stored["jacobian"].values[shard.start : shard.stop] * 1.0000001)
    results.write_beside(shard, {"prediction": stored["prediction"].values[shard.start : shard.stop] * 1.0000001})
    return results.make_durable(shard)


def test_of_two_workers_that_computed_a_shard_the_record_tells_of_what_is_stored(run):
    first = Worker(run.place).compute(run.layout.shard(3))
    before = {key: (run.place.path / "results.zarr" / key).read_bytes() for key in first.chunks}
    second = replace(first, chunks=rounded_otherwise(run, 3), host="another")
    assert second.chunks != first.chunks
    assert commit(run, second) == second  # its chunks came last
    for key, chunk in before.items():
        (run.place.path / "results.zarr" / key).write_bytes(chunk)
    assert commit(run, first) == first
    assert commit(run, second) == first  # though its record comes last
    rounded_otherwise(run, 3)
    key = next(iter(before))
    (run.place.path / "results.zarr" / key).write_bytes(before[key])
    with pytest.raises(StoreFailed, match="two workers wrote shard 3"):
        commit(run, second)
    assert read_commits(run) == {}


def edit(file: Path, old: str, new: str) -> Path:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    return file


def test_the_same_job_is_the_same_run(write_job):
    file = write_job(run={"workers": 1})
    run = started(file)
    again = started(edit(file, "workers = 1", 'workers = 2\nmemory_per_worker = "3GB"'))
    assert again.content == run.content


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (
            lambda folder: edit(folder / "job.toml", "[run]", "[windows]\nstride = 2\n[run]"),
            "windows.stride: the run has 1",
        ),
        (lambda folder: edit(folder / "job.toml", "[run]", '[run]\ndtype = "float64"'), "run.dtype"),
        (lambda folder: edit(folder / "job.toml", "[run]", "[run]\nshard_windows = 9"), "run.shard_windows"),
        (lambda folder: frame(60, seed=1).to_csv(folder / "series.csv", index=False), "series content"),
        (
            lambda folder: sequential((6, 2), layers.Flatten(), layers.Dense(1)).save(folder / "model.keras"),
            "model architecture",
        ),
        (
            lambda folder: sequential((6, 2), layers.Flatten(), layers.Dense(4), layers.Dense(1)).save(
                folder / "model.keras"
            ),
            "model architecture",
        ),
    ],
)
def test_another_job_is_refused_with_the_difference(write_job, change, part):
    run = started(write_job())
    change(run.place.path.parent)
    with pytest.raises(Refused, match="a run of something else") as refusal:
        started(run.place.path.parent / "job.toml")
    assert part in str(refusal.value)


def test_a_run_that_is_taken_over_while_the_store_fails_is_written_no_more(run, monkeypatch):
    owner = Owner.me(1)
    run.place.write("lease/00000001.json", _OWNER.dump_json(owner))
    results = Results(run.held(Lease(run.place, owner)))
    block = np.zeros((8, 1, 1, 6, 2), "float32")
    results.write_chunks(0, 8, block)
    before = (run.place.path / "results.zarr" / "jacobian" / "c.0.0.0.0.0").read_bytes()
    tries = []

    def failing(path, *_, **options):
        tries.append(path)
        run.place.write("lease/00000002.json", b"{}")
        raise OSError("for a while")

    monkeypatch.setattr("zarr.storage._local._put", failing)
    with pytest.raises(LeaseLost):
        results.write_chunks(0, 8, block + 1)
    assert len(tries) == 1
    assert (run.place.path / "results.zarr" / "jacobian" / "c.0.0.0.0.0").read_bytes() == before


def test_a_function_that_cannot_be_saved_gives_every_worker_the_same_weights(tmp_path):
    (tmp_path / "odd_models.py").write_text(
        "import keras\nfrom keras import layers\n"
        "class Odd(keras.Model):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.head = layers.Dense(1)\n"
        "    def call(self, x):\n"
        "        return self.head(x[:, -1])\n"
        "    def get_config(self):\n"
        "        raise NotImplementedError\n"
        "def build():\n"
        "    return Odd()\n"
    )
    frame(30).to_csv(tmp_path / "series.csv", index=False)
    (tmp_path / "job.toml").write_text(
        'model.path = "odd_models:build"\nseries = {path = "series.csv", time = "time"}\n'
        'windows.length = 3\nrun.path = "run"\n'
    )
    run = started(tmp_path / "job.toml")
    assert (run.place.path / "model.weights.h5").exists()
    weights = [Worker(run.place).kernel.target.model.get_weights() for _ in range(2)]
    np.testing.assert_array_equal(weights[0][0], weights[1][0])
    record = Worker(run.place).compute(run.layout.shard(0))
    assert record.computed == 28


def test_a_changed_copy_of_the_model_is_refused(run):
    sequential((6, 2), layers.Flatten(), layers.Dense(1, activation="tanh")).save(run.place.path / "model.keras")
    with pytest.raises(Refused, match="has changed since the run began"):
        Worker(run.place)
