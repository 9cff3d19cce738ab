"""The run directory is made whole or not at all, and nothing of another's is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.prepare import prepare
from sensitivity import creation
from sensitivity.addresses import place_at
from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.lease import LeaseLost
from sensitivity.store import Run
from sensitivity.worker import Worker
from tests.sensitivity.test_store import HERE, started


def test_a_run_may_stand_in_an_empty_directory_and_leaves_it_when_creation_fails(write_job, tmp_path, monkeypatch):
    prepared = prepare(Job.load(write_job()), HERE)
    (tmp_path / "run").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(creation, "versions", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepared.open_or_create()
    assert list((tmp_path / "run").iterdir()) == []
    assert prepared.open_or_create().layout.windows == 55


def test_a_directory_of_something_else_is_left_alone(write_job, tmp_path):
    file = write_job()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.keras").write_text("precious")
    with pytest.raises(Refused, match="other files"):
        started(file)
    assert (tmp_path / "run" / "model.keras").read_text() == "precious"


def test_a_creation_that_fails_leaves_nothing_and_one_that_was_killed_is_done_again(write_job, monkeypatch):
    file = write_job()
    prepared = prepare(Job.load(file), HERE)
    with monkeypatch.context() as patch:
        patch.setattr(creation, "versions", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError), creation.owning(place_at(prepared.job.run.path)) as lease:
            prepared.open_or_create(lease)
    assert not Path(prepared.job.run.path).exists()
    run = prepared.open_or_create()
    (run.place.path / "job.json").unlink()
    (run.place.path / "lease").mkdir()  # as a SIGKILL at the last moment leaves it
    with pytest.raises(Refused, match="no readable job.json"):
        Run.open(prepared.job.run.path)
    assert prepared.open_or_create().layout == prepared.plan.layout


def test_a_run_that_lost_its_job_is_left_as_it_is(write_job):
    file = write_job(run={"shard_windows": 8})
    run = started(file)
    Worker(run.place).compute(run.layout.shard(0))
    (run.place.path / "job.json").unlink()
    before = sorted(run.place.files())
    with pytest.raises(Refused, match="committed shards whose job.json is gone"):
        started(file)
    with pytest.raises(Refused, match="committed shards"), creation.owning(run.place):
        pass
    assert sorted(run.place.files()) == before


def test_a_creation_that_was_overtaken_leaves_the_other_drivers_run(write_job, monkeypatch):
    prepared = prepare(Job.load(write_job()), HERE)
    fill = creation._fill

    def overtaken(*parts):
        content = fill(*parts)
        prepared_place.write("lease/00000002.json", b"{}")
        prepared_place.write("job.json", b"another's")
        return content

    monkeypatch.setattr(creation, "_fill", overtaken)
    prepared_place = place_at(prepared.job.run.path)
    with pytest.raises(LeaseLost), creation.owning(prepared_place) as lease:
        prepared.open_or_create(lease)
    assert prepared_place.read("job.json") == b"another's"
    assert prepared_place.read("results.zarr/zarr.json") is not None
