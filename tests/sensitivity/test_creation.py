"""The run directory is made whole or not at all, and nothing of another's is touched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jobs.prepare import prepare
from sensitivity import creation, template
from sensitivity.addresses import place_at
from sensitivity.errors import Refused
from sensitivity.folders import Folder
from sensitivity.integrity import require_series
from sensitivity.job import Job
from sensitivity.lease import LeaseLost, newest_token
from sensitivity.store import Run
from sensitivity.worker import Worker
from tests.conftest import frame
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


def test_a_creation_that_is_overtaken_in_the_middle_changes_nothing_of_the_other_drivers_run(write_job, monkeypatch):
    """It wakes up late, say, while it copies the series: the other has made the run and committed shards."""
    prepared = prepare(Job.load(write_job()), HERE)
    home, others = place_at(prepared.job.run.path), {}
    for stage in ("_keep_model", "ingest", "write_template"):
        owner = template if stage == "write_template" else creation
        late = getattr(owner, stage)

        def overtaken(*parts, late=late, stage=stage):
            home.write(f"lease/{newest_token(home) + 1:08d}.json", b"{}")
            home.discard(name for name in home.names() if name != "lease")
            for name in ("model.keras", "series.zarr/c/0", "results.zarr/c.0", "tuning.json", "job.json"):
                home.write(name, f"another's, before {stage}".encode())
            others.update({name: home.read(name) for name in home.files()})
            return late(*parts)

        with monkeypatch.context() as patch:
            patch.setattr(owner, stage, overtaken)
            with pytest.raises(LeaseLost), creation.owning(home) as lease:
                prepared.open_or_create(lease)
        assert {name: home.read(name) for name in home.files()} == others
        home.discard(home.names())
        others.clear()


def test_a_creation_waits_for_a_failing_store_no_longer_than_it_owns_the_place(write_job, s3, tmp_path, monkeypatch):
    """What is tried again may come too late."""
    prepared = prepare(Job.load(write_job(run={"path": f"{s3.home}/run"})), HERE)
    home, left = place_at(f"{s3.home}/run"), ["500"] * 4

    def fault(method: str, path: str) -> str | None:
        if method == "PUT" and path.endswith("model.keras") and left:
            if len(left) == 1:
                another.write("lease/00000002.json", b"{}")
                another.write("model.keras.of.another", b"x")
            return left.pop()
        return None

    another = place_at(f"{s3.home}/run")
    with s3.failing(fault), pytest.raises(LeaseLost), creation.owning(home) as lease:
        prepared.open_or_create(lease)
    assert left == []
    assert home.read("model.keras") is None


def test_what_others_put_there_meanwhile_is_left(write_job, tmp_path):
    prepared = prepare(Job.load(write_job()), HERE)
    home = place_at(prepared.job.run.path)
    with creation.owning(home) as lease:
        home.write("thesis.tex", b"precious")
        with pytest.raises(Refused, match=r"other files in it \(thesis.tex\)"):
            prepared.open_or_create(lease)
    assert home.files() == ["thesis.tex"]


def test_a_folder_called_lease_does_not_make_a_directory_ours(tmp_path):
    home = place_at(tmp_path)
    home.write("lease/contract.pdf", b"precious")
    with pytest.raises(Refused, match=r"lease/contract.pdf"), creation.owning(home):
        pass
    assert home.files() == ["lease/contract.pdf"]


def test_a_series_that_changes_between_survey_and_copy_is_refused(write_job, tmp_path):
    table = frame(60)
    prepared = prepare(Job.load(write_job(series=table)), HERE)
    for changed in (table.assign(rain=table["heat"]), frame(61), frame(59)):
        changed.to_csv(tmp_path / "series.csv", index=False)
        with pytest.raises(Refused, match="has changed since it was surveyed"):
            prepared.open_or_create()
        assert not any((tmp_path / "run").iterdir())
    table.to_csv(tmp_path / "series.csv", index=False)
    assert prepared.open_or_create().layout.windows == 55


def test_an_empty_job_json_is_no_run(write_job):
    """As a crash leaves it on a file system without links."""
    prepared = prepare(Job.load(write_job()), HERE)
    home = place_at(prepared.job.run.path)
    with creation.owning(home) as lease:
        prepared.open_or_create(lease)
    home.write("job.json", b"")
    with creation.owning(home) as lease:
        assert prepared.open_or_create(lease).layout == prepared.plan.layout


@pytest.mark.parametrize("first", ["1500-01-01", "9000-01-01", "fractions"])
def test_times_that_are_kept_as_a_rule_are_those_of_the_series(write_job, first):
    """Sums of 0.1 are not multiples of it, and of old dates xarray makes objects of its own."""
    days = np.datetime64(first, "us") + np.arange(60).astype("timedelta64[D]") if first != "fractions" else None
    run = started(write_job(series=frame(60).assign(time=np.cumsum(np.full(60, 0.1)) if days is None else days)))
    require_series(run)
    record = Worker(run.place).compute(run.layout.shard(0))
    assert record.computed == 55
    file = run.place.path / "series.zarr" / "series" / "c" / "0" / "0"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(Refused, match="verify --repair"):
        require_series(run)


def test_a_clean_up_that_is_interrupted_leaves_no_run_that_cannot_be_one(write_job, monkeypatch):
    prepared = prepare(Job.load(write_job()), HERE)
    home = place_at(prepared.job.run.path)
    discard, calls = Folder._discard, []

    def interrupted(place, name):
        calls.append(name)
        if len(calls) > 12:  # the first nine make room
            raise KeyboardInterrupt
        discard(place, name)

    with monkeypatch.context() as patch:
        patch.setattr(creation, "load_run_model", lambda run: 1 / 0)
        patch.setattr(Folder, "_discard", interrupted)
        with pytest.raises(KeyboardInterrupt), creation.owning(home) as lease:
            prepared.open_or_create(lease)
    assert len(calls) > 12
    assert home.size("model.keras")
    with creation.owning(home) as lease:
        assert prepared.open_or_create(lease).layout == prepared.plan.layout


def test_files_of_others_that_look_unfinished_are_others(tmp_path):
    home = place_at(tmp_path)
    for name in (".mine.tmp", ".nfsnotes", ".cache.tmp/deep"):
        home.write(name, b"precious")
        with pytest.raises(Refused, match=name.partition("/")[0]), creation.owning(home):
            pass
        assert home.files() == [name]
        home.discard(home.names())


def test_a_creation_that_ends_while_its_store_is_away_does_not_wait_for_it(write_job, s3, monkeypatch):
    prepared = prepare(Job.load(write_job(run={"path": f"{s3.home}/run"})), HERE)
    down = []

    def interrupted(*_):
        down.append(s3.asked)
        raise KeyboardInterrupt

    monkeypatch.setattr(creation, "_keep_model", interrupted)
    with s3.failing(lambda method, path: "500" if down else None), pytest.raises(KeyboardInterrupt):
        prepared.open_or_create()
    assert s3.asked - down[0] <= 8  # of which the client itself tries each again


def test_a_run_path_that_is_a_link_to_nothing_is_refused(write_job, tmp_path):
    (tmp_path / "run").symlink_to("nowhere")
    with pytest.raises(Refused, match="a link to nothing"):
        Job.load(write_job())
