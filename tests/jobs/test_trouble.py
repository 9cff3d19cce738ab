"""What a run meets on the way: it is asked to stop, a second driver comes, the disk is full, the store fails."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jobs import driver
from jobs.driver import How, resume, run_job
from sensitivity.addresses import place_at
from sensitivity.commits import read_commits
from sensitivity.creation import owning
from sensitivity.folders import Folder
from sensitivity.integrity import inspect
from sensitivity.job import Job
from sensitivity.store import Run
from tests.conftest import frame, sequential
from tests.jobs.conftest import KNOBS, PATIENCE, RUNNERS, after, call, contents, rerouted, small_job, start, terminate


@RUNNERS
def test_sigterm_lets_shards_in_hand_finish(write_job, ray_session, undisturbed, tmp_path, how):
    how = replace(how, grace=PATIENCE)
    before = signal.getsignal(signal.SIGTERM)
    with after(2, terminate):
        summary = run_job(Job.load(small_job(write_job)), how)
    assert "shards in hand are finished" in summary.stopped
    assert 2 <= summary.done < 20
    assert summary.done == len(list((tmp_path / "run" / "commits").iterdir()))
    assert signal.getsignal(signal.SIGTERM) == before
    assert resume(tmp_path / "run", how).complete
    assert contents(tmp_path / "run") == undisturbed


def test_shards_that_are_not_finished_in_time_are_abandoned(write_job, undisturbed, tmp_path, monkeypatch):
    from sensitivity.worker import Worker

    compute = Worker.compute

    def slow_third(worker, shard, attempt):
        if shard.index == 2:
            terminate()
            time.sleep(PATIENCE)
        return compute(worker, shard, attempt)

    monkeypatch.setattr(Worker, "compute", slow_third)
    summary = run_job(Job.load(small_job(write_job)), How(serial=True, grace=0.05))
    assert summary.stopped == "the time to finish is over"
    assert summary.done == 2
    monkeypatch.undo()
    assert resume(tmp_path / "run", How(serial=True)).already == 2
    assert contents(tmp_path / "run") == undisturbed


def test_sigterm_before_there_is_a_run_leaves_nothing(write_job, tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "prepare", lambda *_, **__: (terminate(), time.sleep(5)))
    with pytest.raises(KeyboardInterrupt):
        run_job(Job.load(small_job(write_job)), How(serial=True))
    assert not (tmp_path / "run").exists()


def test_a_second_driver_is_refused_and_told_by_whom(write_job, tmp_path):
    file = small_job(write_job)
    with owning(place_at(tmp_path / "run")):
        for arguments in (("run", file, "--serial"), ("resume", tmp_path / "run")):
            found = call(*arguments)
            assert found.exit_code == 2
            assert (f"process {os.getpid()} on " in found.stderr) == (arguments[0] == "run")
    assert not (tmp_path / "run").exists()
    assert call("run", file, "--serial").exit_code == 0
    with owning(place_at(tmp_path / "run")):
        for arguments in (
            ("run", file, "--serial"),
            ("resume", tmp_path / "run"),
            ("verify", "--repair", tmp_path / "run"),
        ):
            found = call(*arguments)
            assert found.exit_code == 2
            assert f"process {os.getpid()} on " in found.stderr
        assert f"process {os.getpid()} on " in call("status", tmp_path / "run").stdout
        assert call("verify", tmp_path / "run").exit_code == 0


def test_of_two_drivers_that_start_together_one_runs(write_job, tmp_path, held):
    """The one that runs is held until the other has ended."""
    small_job(write_job)
    held.hold(3)
    drivers = [start("run", "job.toml", "--serial", cwd=tmp_path) for _ in range(2)]
    while all(driver.poll() is None for driver in drivers):
        time.sleep(0.01)
    held.release()
    ended = sorted((driver.communicate(timeout=PATIENCE), driver.returncode)[::-1] for driver in drivers)
    assert [status for status, _ in ended] == [0, 2]
    assert "one driver a run" in ended[1][1][1]
    assert len(read_commits(Run.open(tmp_path / "run"))) == 20


def test_a_driver_that_lost_its_run_commits_nothing_more(write_job, tmp_path, monkeypatch):
    from sensitivity import lease

    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.1)
    home = Folder(tmp_path / "run")

    def take_over() -> None:
        home.write("lease/00000002.json", b"{}")

    with after(3, take_over):
        found = call("run", small_job(write_job), "--serial")
    assert found.exit_code == 1
    assert "another driver's" in found.stderr
    assert f"sensitivity status {home}" in found.stderr
    assert "resume" not in found.stderr
    assert 3 <= len(read_commits(Run.open(home))) < 20


def test_a_run_that_is_changed_by_others_meanwhile_is_not_called_done(write_job, tmp_path):
    """Its job.json moved away, a record removed: what is left is left alone, and it is said."""
    for name in ("job.json", "commits/00000001.json"):
        file = rerouted(small_job(write_job), name.partition("/")[0])
        run = tmp_path / name.partition("/")[0]
        with after(5, (run / name).unlink):
            found = call("run", file, "--serial")
        assert found.exit_code == 1
        assert "has been changed by others" in found.stderr
        assert "sensitivity status" in found.stderr
        assert len(list((run / "commits").iterdir())) == (20 if name == "job.json" else 19)


def test_a_function_whose_classes_keras_knows_by_their_module_is_resumed(write_job, tmp_path):
    (tmp_path / "registered.py").write_text(
        "import keras\nfrom keras import layers\n"
        "@keras.saving.register_keras_serializable('ours')\n"
        "class Twice(layers.Layer):\n"
        "    def call(self, x):\n        return 2 * x\n"
        "def build():\n"
        "    source = keras.Input((6, 2))\n"
        "    return keras.Model(source, layers.Dense(1)(layers.Flatten()(Twice()(source))))\n"
    )
    file = small_job(write_job)
    file.write_text(file.read_text().replace("model.keras", "registered:build"))
    with after(3, terminate):
        assert call("run", file, "--serial").exit_code == 1
    assert (tmp_path / "run" / "model.keras").exists()
    process = start("resume", "run", "--serial", cwd=tmp_path)
    said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said


@pytest.fixture
def half_done(write_job, tmp_path) -> Path:
    """A run of 20 shards, of which 3 are missing."""
    assert run_job(Job.load(small_job(write_job)), How(serial=True)).complete
    for index in (1, 7, 19):
        (tmp_path / "run" / "commits" / f"{index:08d}.json").unlink()
    return tmp_path / "run"


def test_a_tensorflow_of_another_name_is_compared_too(monkeypatch):
    from sensitivity import versions

    def installed(name: str) -> str:
        if name == "tensorflow-cpu":
            return "2.99"
        raise versions.PackageNotFoundError

    monkeypatch.setattr(versions, "version", installed)
    monkeypatch.setattr(versions, "_distributions", lambda: {"tensorflow": ["tensorflow-cpu"]})
    ours = versions.__version__
    assert versions.numeric() == {"sensitivity-jobs": ours, "tensorflow": "2.99", "keras": None, "numpy": None}


def test_other_versions_are_refused_unless_allowed_and_then_recorded(half_done, monkeypatch):
    from sensitivity import versions

    installed = versions.version
    monkeypatch.setattr(versions, "version", lambda name: "9.9.9" if name == "tensorflow" else installed(name))
    refused = call("resume", half_done, "--serial")
    assert refused.exit_code == 2
    assert f"tensorflow: the run has {installed('tensorflow')}, here is 9.9.9" in refused.stderr
    assert "--allow-version-change" in refused.stderr
    assert call("run", half_done.parent / "job.toml", "--serial").exit_code == 2
    assert call("resume", half_done, "--serial", "--allow-version-change").exit_code == 0
    changed = f"changed: tensorflow: the run has {installed('tensorflow')}, here is 9.9.9"
    assert changed in call("status", half_done).stdout
    assert call("resume", half_done, "--serial").exit_code == 0
    assert call("verify", half_done).exit_code == 0
    monkeypatch.undo()
    assert call("resume", half_done, "--serial").exit_code == 2


def test_a_worker_elsewhere_with_other_versions_computes_nothing(half_done, monkeypatch):
    from sensitivity import versions
    from sensitivity.errors import Refused
    from sensitivity.worker import Worker

    monkeypatch.setattr(versions, "version", lambda name: "0.0.0")
    with pytest.raises(Refused, match="keras: the run has .*, here is 0.0.0"):
        Worker(half_done)


def test_a_run_is_not_gone_on_with_from_a_series_that_changed_whatever_the_job_names(write_job, tmp_path):
    """Workers read what the run began with, and not the job's own copy of it."""
    values = frame(300)[["rain", "heat"]].to_numpy()
    np.save(tmp_path / "a.npy", values)
    file = write_job(series={"path": "a.npy", "time": None}, sensitivity=KNOBS, run={"shard_windows": 50})
    with after(2, terminate):
        assert call("run", file, "--serial", "--grace", 0).exit_code == 1
    np.save(tmp_path / "b.npy", values)
    np.save(tmp_path / "a.npy", values[::-1])
    file.write_text(file.read_text().replace("a.npy", "b.npy"))
    found = call("run", file, "--serial")
    assert found.exit_code == 2
    assert "a.npy, whose content has changed since the run began" in found.stderr
    np.save(tmp_path / "a.npy", values)
    assert call("run", file, "--serial").exit_code == 0


def test_a_record_that_stays_odd_is_not_laid_to_others(half_done, monkeypatch):
    from sensitivity.worker import Worker

    compute = Worker.compute

    def all_but_one(worker, shard, attempt):
        if shard.index == 2:
            raise ValueError("no")
        return compute(worker, shard, attempt)

    monkeypatch.setattr(Worker, "compute", all_but_one)
    next((half_done / "results.zarr" / "jacobian").glob("c.2.*")).unlink()
    for _ in range(2):
        found = call("resume", half_done, "--serial")
        assert found.exit_code == 1
        assert "changed by others" not in found.stderr
        assert "--retry-failed" in found.stderr
    monkeypatch.undo()
    assert call("resume", half_done, "--serial", "--retry-failed").exit_code == 0


@pytest.mark.parametrize("change", ["weights", "architecture", "series"])
def test_a_run_whose_model_or_series_changed_is_not_resumed(half_done, change):
    from keras import layers

    if change == "series":
        frame(1005, seed=3).to_csv(half_done.parent / "series.csv", index=False)
        found = call("run", half_done.parent / "job.toml", "--serial")
        expected = "series content"
    else:
        model = sequential((6, 2), layers.Flatten(), layers.Dense(4, "tanh"), layers.Dense(1))
        if change == "weights":
            model.set_weights([2 * weight for weight in model.get_weights()])
        else:
            model = sequential((6, 2), layers.Flatten(), layers.Dense(4, "relu"), layers.Dense(1))
        model.save(half_done / "model.keras")
        found = call("resume", half_done, "--serial")
        expected = "has changed since the run began"
    assert found.exit_code == 2
    assert expected in found.stderr


def test_stored_code_runs_only_for_those_who_trust_it(write_job, tmp_path):
    from keras import layers

    flag = tmp_path / "ran"
    code = eval(f"lambda x: (open({str(flag)!r}, 'a').close(), 2 * x)[1]")  # Keras cannot restore a default argument
    stored = layers.Lambda(code, output_shape=(6, 2))
    file = write_job(sequential((6, 2), stored, layers.Flatten(), layers.Dense(1)), run={"shard_windows": 11})
    flag.unlink(missing_ok=True)
    for arguments in (("plan", file), ("run", file, "--serial")):
        refused = call(*arguments)
        assert refused.exit_code == 2
        assert "--trust-model" in refused.stderr
    assert not flag.exists()
    assert call("run", file, "--serial", "--trust-model").exit_code == 0
    (tmp_path / "run" / "commits" / "00000002.json").unlink()
    flag.unlink()
    assert call("resume", tmp_path / "run", "--serial").exit_code == 2
    assert not flag.exists()
    assert call("resume", tmp_path / "run", "--serial", "--trust-model").exit_code == 0


def test_a_run_directory_has_no_way_out(half_done, tmp_path):
    outside = tmp_path / "outside"
    (half_done / "commits").rename(outside)
    (half_done / "commits").symlink_to(outside)
    for command in ("status", "verify", "resume"):
        found = call(command, half_done)
        assert found.exit_code == 2
        assert "commits is a link to somewhere else" in found.stderr
    (half_done / "commits").unlink()
    outside.rename(half_done / "commits")
    content = json.loads((half_done / "job.json").read_text())
    (half_done / "job.json").write_text(json.dumps({**content, "model_file": "../model.keras"}))
    found = call("resume", half_done, "--serial")
    assert found.exit_code == 2
    assert "job.json has been changed" in found.stderr


def test_commands_that_are_shown_can_be_typed_whatever_the_name(write_job, tmp_path, monkeypatch):
    """A run's name reaches a shell as one word."""
    from sensitivity.worker import Worker

    name = "a run; touch injected $(touch injected) 'x"
    file = small_job(write_job, path=name)
    monkeypatch.setattr(Worker, "compute", lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
    shown = call("run", file, "--serial").stderr.splitlines()[-1].partition("to go on:  ")[2]
    assert shlex.split(shown) == ["sensitivity", "resume", str(tmp_path / name), "--retry-failed"]
    echoed = subprocess.run(f"echo {shown}", shell=True, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert str(tmp_path / name) in echoed.stdout
    assert not (tmp_path / "injected").exists()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 400 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"this user may not mount a file system: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@RUNNERS
def test_a_full_disk_stops_the_run_and_resume_completes_it(
    write_job, ray_session, undisturbed, small_disk, how, monkeypatch
):
    monkeypatch.setenv("SENSITIVITY_PATIENCE", "1")  # the disk stays full
    run = small_disk / "run"
    file = small_job(write_job, path=str(run))
    (small_disk / "ballast").write_bytes(bytes(200_000))
    with after(3, lambda: fill(small_disk)):
        summary = run_job(Job.load(file), how)
    assert "No space left on device" in summary.stopped
    assert 3 <= summary.done < 20
    assert not list((run / "failures").iterdir())
    assert not any(part.damages for part in inspect(Run.open(run)))
    (small_disk / "ballast").unlink()
    assert resume(run, how).already == summary.done
    assert contents(run) == undisturbed


def test_a_store_without_space_stops_the_run_and_resume_completes_it(write_job, undisturbed, tmp_path, monkeypatch):
    from zarr.storage import _local

    put, full = _local._put, threading.Event()

    def refusing(path, *rest, **options):
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return put(path, *rest, **options)

    monkeypatch.setattr(_local, "_put", refusing)
    monkeypatch.setenv("SENSITIVITY_PATIENCE", "1")  # the disk stays full
    with after(3, full.set):
        summary = run_job(Job.load(small_job(write_job)), How(serial=True))
    assert "No space left on device" in summary.stopped
    assert summary.done == 3
    full.clear()
    assert resume(tmp_path / "run", How(serial=True)).already == 3
    assert contents(tmp_path / "run") == undisturbed


def fill(disk: Path) -> None:
    try:
        with (disk / "ballast").open("ab") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
    except OSError:
        pass
