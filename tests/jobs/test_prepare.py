from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jobs.driver import How, resume, run_job
from jobs.prepare import prepare
from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.placement import Node
from sensitivity.store import Run, load_run_model
from tests.conftest import frame
from tests.jobs.conftest import contents

GB = 10**9


def workers(file, nodes):
    return prepare(Job.load(file), nodes).plan.workers


def test_workers_left_to_us_are_as_many_as_have_room(write_job):
    file = write_job(run={"shard_windows": 10})
    assert workers(file, [Node(64, 0, 100 * GB)]).count == 6  # as many as shards
    few = workers(file, [Node(64, 0, 5 * GB)])
    assert few.count == 2
    assert few.memory == 5 * GB // 2
    with pytest.raises(Refused, match=r"run\.memory_per_worker"):
        workers(file, [Node(64, 0, GB // 2)])


def test_workers_asked_for_are_given_or_refused(write_job):
    file = write_job(run={"shard_windows": 10, "workers": 4})
    assert workers(file, [Node(4, 0, 8 * GB)]).count == 4
    with pytest.raises(Refused, match=r"run\.memory_per_worker"):
        workers(file, [Node(4, 0, 3 * GB)])


def test_a_run_resumes_where_there_is_less_memory_a_core(write_job, tmp_path, monkeypatch):
    from jobs import driver

    run = prepare(Job.load(write_job(run={"shard_windows": 10})), [Node(2, 0, 8 * GB)]).open_or_create()
    monkeypatch.setattr(driver, "local", lambda: [Node(64, 0, 5 * GB)])
    assert driver.resume(run.place.path, driver.How(serial=True)).complete
    monkeypatch.setattr(driver, "local", lambda: [Node(64, 0, GB // 2)])
    with pytest.raises(Refused, match=r"run\.memory_per_worker"):
        driver.resume(run.place.path, driver.How(serial=True))


def test_an_existing_run_is_not_audited_again(write_job):
    job = Job.load(write_job())
    first = prepare(job, [Node(2, 0, 8 * GB)])
    assert first.audit is not None
    assert first.audit.vjp_error < 1e-5
    run = first.open_or_create()
    again = prepare(job, [Node(2, 0, 8 * GB)])
    assert again.audit is None
    assert again.open_or_create().content == run.content


def test_a_kernel_that_the_audit_found_wanting_shows_in_the_plan(write_job, monkeypatch):
    from sensitivity import tuning

    def no_xla(self, windows):
        self._drop_xla(RuntimeError("no compiler here"))

    call = tuning.Tuned._call
    monkeypatch.setattr(tuning, "in_order", lambda able, facts: sorted(able, key=lambda setting: not setting.xla))
    monkeypatch.setattr(
        tuning.Tuned, "_call", lambda self, windows: no_xla(self, windows) if self.setting.xla else call(self, windows)
    )
    plan = prepare(Job.load(write_job()), [Node(2, 0, 8 * GB)]).plan
    assert not plan.setting.xla
    assert plan.setting.lost == ("XLA: no compiler here",)


def test_a_series_that_will_not_stay_where_it_is_is_copied_on_demand(write_job, tmp_path):
    np.save(tmp_path / "s.npy", frame(60)[["rain", "heat"]].to_numpy())
    knobs = {"kernel": "gradient", "windows_per_call": 5}
    job = Job.load(write_job(series={"path": "s.npy", "time": None}, run={"shard_windows": 10}, sensitivity=knobs))
    assert not Run.open(run_job(job, How(serial=True)).run.place).content["ingested"]
    before = contents(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    run_job(job, How(serial=True, copy_series=True))
    (tmp_path / "s.npy").unlink()
    (tmp_path / "run" / "commits" / "00000002.json").unlink()
    assert resume(tmp_path / "run", How(serial=True)).complete
    assert contents(tmp_path / "run") == before


UNSAVED = """
import keras, numpy

class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(1)])
    def call(self, windows):
        return self.inner(windows)

def build():
    model = Model()
    model(numpy.zeros((1, 6, 2), "float32"))
    return model
"""


def test_the_code_that_a_job_comes_with_is_used_and_not_what_its_run_began_with(write_job, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "moved_net.py").write_text(UNSAVED)
    job = Job.load(write_job({"path": "moved_net:build"}, windows={"length": 6}))
    run = prepare(job, [Node(2, 0, 8 * GB)]).open_or_create()
    assert run.content["model_file"] == "model.weights.h5"
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "moved_net.py").write_text(UNSAVED)
    for code, folder in ((None, tmp_path), (str(tmp_path / "new"), tmp_path / "new")):
        sys.path[:] = [path for path in sys.path if Path(path) not in (tmp_path, tmp_path / "new")]
        del sys.modules["moved_net"]
        load_run_model(replace(run, code=code))
        assert sys.modules["moved_net"].__file__ == str(folder / "moved_net.py")
    del sys.modules["moved_net"]
