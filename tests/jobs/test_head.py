"""Jobs handed to a Ray head over HTTP: a real one that asks for a token, and what may answer in place of one."""

from __future__ import annotations

import http.server
import os
import re
import signal
import threading
import time

import pytest

import sensitivity
from jobs import submit as submitting
from jobs.driver import How, run_job
from jobs.head import connected, refused_by
from sensitivity.addresses import place_at
from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.lease import owner
from sensitivity.store import Run
from tests.conftest import frame
from tests.jobs.conftest import PATIENCE, contents
from tests.jobs.ray_head import started
from tests.test_readme import README

MODEL = """
import os, time
import helper
import keras, tensorflow as tf
from keras import layers

def wait(windows):
    while windows.max() > 50 and not os.path.exists(os.environ["MAY_GO_ON"]):
        time.sleep(0.05)
    return windows

@tf.custom_gradient
def waiting(windows):
    same = tf.ensure_shape(tf.numpy_function(wait, [windows], tf.float32), windows.shape)
    return same, lambda upstream: upstream

def build():
    keras.utils.set_random_seed(1)
    source = keras.Input((6, 2))
    slow = layers.Lambda(waiting, output_shape=(6, 2))(source)
    return keras.Model(source, layers.Dense(helper.UNITS)(layers.Flatten()(slow)))
"""


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """Its nodes have something else installed under our names."""
    installed = tmp_path_factory.mktemp("installed")
    for package in ("sensitivity", "jobs"):
        (installed / package).mkdir()
        (installed / package / "__init__.py").write_text("raise ImportError('another version')")
    with started(installed) as head:
        yield head


def as_in_readme(head) -> list[str]:
    """The arguments of the README's command, with the address of this head."""
    [command] = re.findall(r"^    sensitivity submit (.+?)(?:  +#.*)?$", README, re.MULTILINE)
    assert "http://head:8265" in command
    return command.replace("http://head:8265", head.address).split()


def test_a_killed_job_is_submitted_again_and_ends_as_a_serial_run(head, write_job, tmp_path, monkeypatch):
    """Its last shard waits for a file, so that the first submission is at work when it is killed."""
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "slow.py").write_text(MODEL)
    (tmp_path / "helper.py").write_text("UNITS = 1")
    table = frame(200)
    table.loc[180, "rain"] = 100.0
    knobs = {"kernel": "gradient", "windows_per_call": 10}
    sections = {"run": {"path": "runs/soil", "shard_windows": 50, "workers": 1}, "sensitivity": knobs}
    text = write_job({"path": "nets.slow:build"}, table, **sections).read_text()
    (tmp_path / "soil.toml").write_text(text)
    go, run = tmp_path / "go", place_at(tmp_path / "runs" / "soil")
    arguments = [*as_in_readme(head), "--env", "MAY_GO_ON"]

    first = head.submit(*arguments, cwd=tmp_path, MAY_GO_ON=str(go))
    assert (first.returncode, first.stdout) == (0, "soil-a1\n"), first.stderr
    assert f"ray job logs --follow --address {head.address} soil-a1" in first.stderr
    assert f"ray job stop --address {head.address} soil-a1" in first.stderr
    assert f"sensitivity status {run}" in first.stderr
    wait_for_commits(head, run, 3)
    second = head.submit(*arguments, cwd=tmp_path, MAY_GO_ON=str(go))
    assert second.returncode == 2
    assert f"{run}, which soil-a1 of " in second.stderr
    assert "(running)" in second.stderr
    os.kill(owner(run).pid, signal.SIGKILL)
    head.wait_for("soil-a1", "FAILED")

    go.touch()
    third = head.submit(*arguments, "--wait", cwd=tmp_path, MAY_GO_ON=str(go))
    assert (third.returncode, third.stdout) == (0, f"soil-a2\n{run}/results.zarr\n"), third.stderr
    assert third.stderr.count("3 of 4 shards are committed, 1 to compute\n") == 1
    details = head.job("soil-a2")
    assert details["metadata"]["sensitivity_run"] == str(run)
    assert details["metadata"]["sensitivity_version"] == sensitivity.__version__

    monkeypatch.setenv("MAY_GO_ON", str(go))
    serial = tmp_path / "serial.toml"
    serial.write_text(text.replace("runs/soil", "serial"))
    assert run_job(Job.load(serial), How(serial=True)).complete
    assert contents(run.path) == contents(tmp_path / "serial")
    assert Run.open(run).versions["sensitivity-jobs"] == sensitivity.__version__


def wait_for_commits(head, run, count: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while sum(name.startswith("0") for name in run.names("commits")) < count:
        assert time.monotonic() < deadline
        job = head.job("soil-a1")
        assert job["status"] in ("PENDING", "RUNNING"), job["message"]
        time.sleep(0.1)


def test_what_the_cluster_refuses_is_refused_here(head, write_job, tmp_path):
    write_job(series={"features": ["rain", "snow"]})
    found = head.submit("job.toml", "--address", head.address, "--shared", tmp_path / "run", "--wait", cwd=tmp_path)
    assert (found.returncode, found.stdout) == (2, "run-a1\n")
    assert "series.features is refused" in found.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"RAY_AUTH_MODE": "disabled"}, "RAY_AUTH_MODE is disabled here"),
        ({"RAY_AUTH_TOKEN": "another"}, "Invalid authentication token"),
    ],
)
def test_a_token_is_asked_for_in_one_screen(head, write_job, tmp_path, environment, why):
    write_job()
    found = head.submit("job.toml", "--address", head.address, "--shared", tmp_path, cwd=tmp_path, **environment)
    assert (found.returncode, found.stdout) == (2, "")
    assert all(text in found.stderr for text in (why, "ray get-auth-token", "export RAY_AUTH_MODE=token"))
    assert head.token not in found.stderr
    assert "another" not in found.stderr
    assert len(found.stderr.splitlines()) < 12


@pytest.fixture
def server():
    """Says `server.says` with `server.status` to whatever it is asked."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(server.status)
            if server.status == 301:
                self.send_header("Location", server.sends_to + self.path)
            self.end_headers()
            self.wfile.write(server.says)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.status, server.says = 200, b"Welcome"
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "says", "message"),
    [
        (200, b"Welcome", "with status 200, is not Ray's job server"),
        (404, b"", "with status 404, is not Ray's job server"),
        (200, b"[]", "is not Ray's job server"),
        (200, b'{"ray_version": "2.9.3"}', r"Ray 2\.40 or later"),
    ],
)
def test_what_is_no_head_or_an_old_one_is_refused(server, status, says, message):
    server.status, server.says = status, says
    with pytest.raises(Refused, match=message):
        connected(server.url)


def test_an_address_that_sends_on_is_refused_with_where_to(server, head):
    """As http:// of what is served with https://."""
    server.status, server.sends_to = 301, head.address
    with pytest.raises(Refused, match=rf"(?s)which sends on to {head.address}\n.*do +--address {head.address}$"):
        connected(server.url)


def test_the_address_given_is_the_one_that_is_asked(server, monkeypatch):
    """Ray would take what the environment says."""
    server.says = b'{"ray_version": "2.60.0"}'
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")
    assert connected(f"{server.url}/").get_address() == server.url
    assert os.environ["RAY_ADDRESS"] == "http://127.0.0.1:1"
    assert submitting._ray("stop", server.url, "a b").startswith("env -u RAY_ADDRESS ray job stop ")


def test_the_heads_traceback_is_not_shown():
    with pytest.raises(Refused, match=r"does not take the job \(ValueError: no room\)"), refused_by("http://head:8265"):
        raise RuntimeError("Request failed with status code 500: Traceback\n  File\nValueError: no room\n.")
