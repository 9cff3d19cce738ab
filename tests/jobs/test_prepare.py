from __future__ import annotations

import pytest

from jobs.prepare import prepare
from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.placement import Node

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
    monkeypatch.setattr(
        tuning.Tuned, "_call", lambda self, windows: no_xla(self, windows) if self.setting.xla else call(self, windows)
    )
    plan = prepare(Job.load(write_job()), [Node(2, 0, 8 * GB)]).plan
    assert not plan.setting.xla
    assert plan.setting.lost == ("XLA: no compiler here",)
