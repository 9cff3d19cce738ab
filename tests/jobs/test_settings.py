"""How a run comes to its kernel's setting: timed once, kept, given, made smaller when memory runs out."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
import xarray as xr
from keras import layers

from jobs import ray_runner
from jobs.driver import How, resume, run_job
from jobs.ledger import Ledger
from jobs.prepare import prepare
from jobs.ray_session import nodes
from jobs.roster import Demand
from sensitivity import device, room, tuning, worker
from sensitivity.commits import read_commits
from sensitivity.engine import Tuned
from sensitivity.job import Job
from sensitivity.loading import load_file
from sensitivity.placement import Node
from sensitivity.plan import Workers
from sensitivity.store import Run
from sensitivity.worker import Worker
from tests.conftest import FEATURES, cut, frame, sequential, tape_jacobian, worst

GB = 10**9
CLUSTER = [Node(2, 0, 8 * GB)]  # of which nothing is known: its workers time kernels themselves


def difference(run: Run, steps: int) -> float:
    """Of what is stored from the tape's Jacobians."""
    windows = cut(frame(steps).drop(columns="time").to_numpy("float32"), 6)
    stored = xr.open_zarr(run.results)["jacobian"].values[:, 0]
    return worst(stored, tape_jacobian(load_file(run.place.path / "model.keras"), windows))


def no_tuning(*_: object, **__: object) -> None:
    raise AssertionError("the setting was there")


def test_a_run_that_runs_out_of_memory_three_times_finishes_with_the_tapes_numbers(write_job, monkeypatch):
    compute = Tuned._all_rows

    def limited(self, given):
        if len(given[0]) > 3:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")
        return compute(self, given)

    knobs = {"kernel": "batch_jacobian", "windows_per_call": 24, "experimental_use_pfor": False}
    prepared = prepare(Job.load(write_job(run={"shard_windows": 30}, sensitivity=knobs)), CLUSTER)
    run = prepared.open_or_create()
    monkeypatch.setattr(Tuned, "_all_rows", limited)
    summary = run_job(Job.load(run.place.path.parent / "job.toml"), How(serial=True))
    assert summary.complete
    assert difference(run, 60) < 1e-5
    records = list(read_commits(run).values())
    assert {record.setting["windows_per_call"] for record in records} == {3}
    halved = [lost for lost in records[0].setting["lost"] if lost.endswith("out of memory")]
    assert halved == [f"{size} windows a call: out of memory" for size in (24, 12, 6)]


def test_a_smaller_call_is_what_later_workers_begin_with(write_job, monkeypatch):
    run = prepare(Job.load(write_job(run={"shard_windows": 30}))).open_or_create()
    assert run.choice.by == "timed"
    first = Worker(run.place, run.choice)
    before = first.kernel.setting.windows_per_call
    first.kernel._shrink("out of memory")
    first.compute(run.layout.shard(0))
    monkeypatch.setattr(worker, "tune", no_tuning)
    assert Worker(run.place, run.choice).kernel.setting.windows_per_call == before // 2


def test_workers_for_those_that_died_begin_with_smaller_calls(write_job):
    knobs = {"kernel": "batch_jacobian", "windows_per_call": 8, "experimental_use_pfor": False}
    model = sequential((6, len(FEATURES)), layers.Flatten(), layers.Dense(4))
    run = prepare(Job.load(write_job(model, run={"shard_windows": 30}, sensitivity=knobs)), CLUSTER).open_or_create()
    settings = [Worker(run.place, run.choice, None, halvings).kernel.setting for halvings in (0, 1, 3, 5, 9)]
    calls = [(setting.windows_per_call, setting.outputs_per_call) for setting in settings]
    assert calls == [(8, None), (4, None), (1, None), (1, 1), (1, 1)]
    assert settings[3].lost[-1] == "8 windows a call: workers died"


def test_the_first_worker_of_a_kind_finds_the_setting_for_all(write_job, monkeypatch):
    run = prepare(Job.load(write_job()), CLUSTER).open_or_create()
    assert json.loads((run.place.path / "tuning.json").read_text()) == {"settings": []}
    first = Worker(run.place, run.choice)
    assert first.choice.by == "timed"
    record = first.compute(run.layout.shard(0))
    assert "windows/s" in record.why
    assert record.peak_memory > 0
    assert record.projected_memory > first.choice.call_bytes
    with monkeypatch.context() as patched:
        patched.setattr(worker, "tune", no_tuning)
        assert Worker(run.place, run.choice).choice == first.choice
    monkeypatch.setattr(room, "kind", lambda cpus: "another processor")
    assert Worker(run.place, run.choice).choice.kind == "another processor"
    assert len(json.loads((run.place.path / "tuning.json").read_text())["settings"]) == 2


def test_this_machines_workers_start_with_what_the_plan_timed(write_job, monkeypatch):
    file = write_job()
    prepared = prepare(Job.load(file))
    assert prepared.plan.choice.by == "timed"
    assert prepared.plan.seconds > 0
    run = prepared.open_or_create()
    monkeypatch.setattr(worker, "tune", no_tuning)
    assert Worker(run.place).choice == prepared.plan.choice
    assert prepare(Job.load(file)).plan.choice == prepared.plan.choice
    assert resume(run.place.path, How(serial=True)).complete


def test_other_knobs_are_heeded_when_a_run_goes_on(write_job, monkeypatch):
    run = prepare(Job.load(write_job())).open_or_create()
    file = run.place.path.parent / "job.toml"
    file.write_text(file.read_text() + '[sensitivity]\nkernel = "forward"\n')
    assert run_job(Job.load(file), How(serial=True)).complete
    assert {record.setting["kernel"] for record in read_commits(run).values()} == {"forward"}
    assert difference(run, 60) < 1e-5


def test_what_is_given_is_never_timed(write_job, monkeypatch):
    monkeypatch.setattr(tuning._Search, "run", no_tuning)
    knobs = {"kernel": "gradient", "windows_per_call": 7}
    summary = run_job(Job.load(write_job(sensitivity=knobs)), How(serial=True))
    assert summary.complete
    records = read_commits(summary.run).values()
    assert {(record.setting["windows_per_call"], record.why) for record in records} == {(7, "as given")}


def test_a_choice_that_no_longer_fits_is_made_anew(write_job):
    run = prepare(Job.load(write_job())).open_or_create()
    kept = run.remembered(run.job.sensitivity, device.kind(1))
    run.remember(run.job.sensitivity, replace(kept, call_bytes=100 * GB))
    anew = Worker(run.place, None, Workers(1, 1, 0, 3 * GB))
    assert anew.choice.call_bytes < 3 * GB
    assert np.isfinite(anew.compute(run.layout.shard(0)).seconds)


@pytest.mark.parametrize("count", [1, 2])
def test_on_ray_the_first_worker_times_and_the_others_follow(write_job, ray_session, count):
    run = prepare(Job.load(write_job(run={"shard_windows": 10})), CLUSTER).open_or_create()
    demand = Demand(Workers(count, 1, 0, 3 * GB), nodes)
    outcomes = list(ray_runner.run_on_ray(run, Ledger(run.layout.shards()), run.choice, demand))
    assert len(outcomes) == run.layout.shard_count
    assert len({str(record.setting) for record in outcomes}) == 1
    assert len(json.loads((run.place.path / "tuning.json").read_text())["settings"]) == 1
    assert difference(run, 60) < 1e-5
