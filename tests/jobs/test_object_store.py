"""Series, model and run directory on an object store, which fails now and then."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import xarray as xr

import sensitivity
from jobs.driver import run_job
from sensitivity.addresses import place_at
from sensitivity.integrity import inspect
from sensitivity.job import Job
from sensitivity.store import Run
from tests.jobs.conftest import RUNNERS, after, call, contents, small_job


@RUNNERS
def test_series_model_and_run_on_an_object_store(write_job, ray_session, undisturbed, s3, tmp_path, how):
    """With faults among its answers."""
    file = on_s3(small_job(write_job), tmp_path, s3.home)
    faults = iter(["500", None, "torn", None, None, "lost"] * 5)
    with s3.failing(lambda method, path: next(faults, None) if method == "PUT" and "/c" in path else None):
        summary = run_job(Job.load(file), how)
    assert summary.complete
    run = Run.open(f"{s3.home}/run")
    assert not any(part.damages for part in inspect(run))
    copy = tmp_path / "copy"
    for name in run.place.files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(run.place.read(name))
    assert contents(copy) == undisturbed
    dataset = sensitivity.open_run(f"{s3.home}/run")
    xr.testing.assert_identical(dataset.load().drop_attrs(), sensitivity.open_run(copy).load().drop_attrs())


def on_s3(file: Path, folder: Path, home: str) -> Path:
    """The same job with everything in a bucket."""
    bucket, text = place_at(home), file.read_text()
    for name in ("model.keras", "series.csv"):
        bucket.write(name, (folder / name).read_bytes())
        text = text.replace(f'"{name}"', f'"{home}/{name}"')
    file.write_text(text.replace('path = "run"', f'path = "{home}/run"'))
    shutil.copy(file, folder / "s3.toml")
    return folder / "s3.toml"


def test_an_object_store_that_fails_for_long_stops_the_run(write_job, undisturbed, s3, tmp_path):
    file = on_s3(small_job(write_job), tmp_path, s3.home)
    down = threading.Event()
    with s3.failing(lambda method, path: "500" if down.is_set() and method == "PUT" else None):
        with after(3, down.set):
            found = call("run", file, "--serial")
        assert found.exit_code == 1
        assert "500" in found.stderr
        assert "Traceback" not in found.stderr
    assert f"sensitivity resume {s3.home}/run" in found.stderr
    assert "missing" in call("status", f"{s3.home}/run").stdout
    assert call("resume", f"{s3.home}/run", "--serial").exit_code == 0
    assert call("verify", f"{s3.home}/run").exit_code == 0


def test_a_store_that_cannot_be_reached_is_refused_at_once(write_job, tmp_path, monkeypatch, s3):
    file = on_s3(small_job(write_job), tmp_path, s3.home)
    with s3.failing(lambda method, path: "500"):
        found = call("run", file, "--serial")
    assert found.exit_code == 2
    assert "AWS_ENDPOINT_URL" in found.stderr
    place_at(s3.home).delete("series.csv")
    found = call("run", file, "--serial")
    assert found.exit_code == 2
    assert "series.csv (no such file)" in found.stderr
    assert place_at(f"{s3.home}/run").files() == []


def test_what_was_heard_of_is_counted_while_the_store_is_away(write_job, s3, tmp_path):
    file = on_s3(small_job(write_job), tmp_path, s3.home)
    down = threading.Event()
    with s3.failing(lambda method, path: "500" if down.is_set() and "/commits/" in path else None):
        with after(3, down.set):
            found = call("run", file, "--serial")
    assert found.exit_code == 1
    assert "stopped: 3 of 20 shards are committed" in found.stderr
