"""Jobs handed to a Ray cluster over HTTP: a real head that asks for a token, and what may go wrong on the way."""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ray.job_submission import JobStatus

import sensitivity
from jobs import follow as following
from jobs import submit as submitting
from jobs.driver import How, run_job
from jobs.follow import Lost, follow
from jobs.head import connected, refused_by
from jobs.submit import concluded, hand_over, next_id
from sensitivity.addresses import place_at
from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.lease import owner
from sensitivity.store import Run
from tests.conftest import frame
from tests.jobs.conftest import PATIENCE, call, contents
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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--address", "head:8265"], "http://head:8265"),
        (["--address", "auto"], "http://HEAD:8265"),
        (["--address", "ray://10.0.0.5:10001"], "http://10.0.0.5:8265"),
        (["--address", "http://127.0.0.1:6379"], "the port where nodes of a cluster talk to each other"),
        (["--address", "http://127.0.0.1:10001"], "the port where Ray Client"),
        (["--address", "http://127.0.0.1:99999"], "--address is refused"),
        (["--address", "http://127.0.0.1:1"], "connection refused"),
        (["--address", "http://127.0.0.1:1", "--env", "NEVER_SET"], "NEVER_SET, which is not set here"),
        (["--address", "http://127.0.0.1:1", "--env", "NEVER_SET=hush"], "NEVER_SET=…, which is not set here"),
        (["--address", "http://127.0.0.1:1", "--code", "/nowhere"], "'/nowhere' does not exist"),
    ],
)
def test_what_cannot_be_submitted_is_refused_before_anything_is_sent(write_job, tmp_path, options, says):
    found = call("submit", write_job(), "--shared", tmp_path, *options)
    assert (found.exit_code, found.stdout) == (2, "")
    assert says in found.stderr
    assert "hush" not in found.stderr
    assert len(found.stderr.splitlines()) < 12


def test_a_job_that_is_invalid_here_is_not_sent(write_job, tmp_path):
    file = write_job(windows={"lenght": 6})
    assert "windows.lenght" in call("submit", file, "--address", "http://127.0.0.1:1", "--shared", tmp_path).stderr
    unseen = call("submit", write_job(), "--address", "http://127.0.0.1:1")
    assert unseen.exit_code == 2
    assert f"{tmp_path}/run, which would be made on a disk of the cluster's head" in unseen.stderr


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


@pytest.mark.parametrize(
    ("run", "known", "expected"),
    [
        ("/runs/soil", [], "soil-a1"),
        ("/runs/soil", ["soil-a1", "soil-a10", "soil-a2", "soils-a20", "soil-ax", "None"], "soil-a11"),
        ("s3://bucket/my run (é)/", ["my-run-a1"], "run-a1"),
        ("s3://bucket/my run (é)", ["my-run-a1"], "my-run-a2"),
        ("/runs/…", [], "run-a1"),
        ("/runs/" + "x" * 500, [], "x" * 60 + "-a1"),
    ],
)
def test_ids_count_up_and_are_safe(run, known, expected):
    assert next_id(run, known) == expected


def details(submission_id="soil-a1", status="RUNNING", run="/runs/soil", code=None, message=None) -> Any:
    return SimpleNamespace(
        submission_id=submission_id,
        status=JobStatus(status),
        metadata={"sensitivity_run": run, "sensitivity_user": "ada"},
        driver_exit_code=code,
        message=message,
    )


class Cluster:
    """A job API as two who submit at once see it: `others` come in between a list and a submission."""

    def __init__(self, *others: Any) -> None:
        self.jobs, self.others = [details(None), details("soil-a1", "FAILED")], list(others)

    def list_jobs(self) -> list[Any]:
        return list(self.jobs)

    def submit_job(self, *, submission_id: str, **_: Any) -> str:
        self.jobs += self.others[:1]
        del self.others[:1]
        if submission_id in [job.submission_id for job in self.jobs]:
            raise RuntimeError(f"Request failed with status code 400: Job {submission_id} already exists.")
        return submission_id


def handed(cluster: Cluster) -> str:
    return hand_over(cluster, "/runs/soil", "http://head:8265", "true", {})


def test_who_comes_second_with_an_id_takes_the_next_unless_it_is_the_same_run():
    other = Cluster()
    other.jobs[0].metadata = None
    assert handed(other) == "soil-a2"
    cluster = Cluster(details("soil-a2", run="/elsewhere/soil"), details("soil-a3", run="/elsewhere/soil"))
    cluster.jobs[0].metadata = None
    assert handed(cluster) == "soil-a4"
    same = Cluster(details("soil-a2", "PENDING"))
    same.jobs[0].metadata = None
    with pytest.raises(Refused, match=r"soil-a2 of ada is at work on \(pending\)"):
        handed(same)


@pytest.mark.parametrize(
    ("ended", "status", "says"),
    [
        (details(status="SUCCEEDED", code=0), 0, ""),
        (details(status="FAILED", code=1), 1, ""),
        (details(status="FAILED", code=2, message="…"), 2, ""),
        (details(status="FAILED", code=1, message="No module named 'zarr'"), 1, "--install"),
        (details(status="FAILED", code=-9), 1, "exit status -9, the driver was killed"),
        (details(status="FAILED", code=127), 1, "python is not on the PATH of the head"),
        (details(status="FAILED", message="runtime_env setup failed: x\n" + "at\n" * 90 + "no pip"), 1, "failed: x\n…"),
        (details(status="STOPPED", message="Job was intentionally stopped."), 1, "soil-a1 stopped: Job was"),
    ],
)
def test_waiting_ends_as_the_run_did(capsys, ended, status, says):
    assert concluded(ended, "s3://bucket/soil/") == status
    found = capsys.readouterr()
    assert found.out == ("s3://bucket/soil/results.zarr\n" if status == 0 else "")
    assert says in found.err
    assert len(found.err.splitlines()) < 24


class Broken:
    """A head whose connections break: each tells the log from its beginning, up to a point."""

    def __init__(self, log: str, *breaks: int, ended: list[Any]) -> None:
        self.log, self.breaks, self.ended = log, list(breaks), ended

    async def tail_job_logs(self, _):
        if not self.breaks:
            yield self.log
            return
        point = self.breaks.pop(0)
        yield self.log[: point // 2]
        yield self.log[point // 2 : point]
        raise RuntimeError("WebSocket connection closed unexpectedly")

    def get_job_info(self, _):
        found = self.ended.pop(0) if len(self.ended) > 1 else self.ended[0]
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(following, "AGAIN_SECONDS", 0.0)


def test_no_line_is_lost_or_said_twice_over_connections_that_break():
    said: list[str] = []
    log = "".join(f"line {i}\n" for i in range(20))
    done = details(status="SUCCEEDED")
    head = Broken(log, 30, 10, 0, 55, ended=[details(), ConnectionError(), details(), details(), done])
    assert follow(head, "soil-a1", said.append) is done
    assert "".join(said) == log


def test_a_job_that_waits_to_begin_is_told_of():
    said: list[str] = []
    waiting, done = details(status="PENDING", message="It waits for its environment."), details(status="FAILED")
    assert follow(Broken("", 0, ended=[waiting, done]), "soil-a1", said.append) is done
    assert "It waits for its environment.\n" in said


def test_a_head_that_is_gone_or_another_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(following, "LOST_SECONDS", 0.0)
    with pytest.raises(Lost, match="nothing has been heard of soil-a1"):
        follow(Broken("", ended=[ConnectionError()]), "soil-a1", print)
    gone = RuntimeError("Request failed with status code 404: Job soil-a1 does not exist.")
    with pytest.raises(Lost, match="its head has been replaced"):
        follow(Broken("", ended=[gone]), "soil-a1", print)


def test_a_head_that_does_not_answer_is_told_of_once_each_time(monkeypatch):
    monkeypatch.setattr(following, "TOLD_SECONDS", 0.0)
    said: list[str] = []
    away, done = ConnectionError(), details(status="SUCCEEDED")
    follow(Broken("x", 1, ended=[away, away, away, details(), away, done]), "soil-a1", said.append)
    assert said.count("the head does not answer; it is asked again for 600 s\n") == 2


def test_ctrl_c_while_the_job_is_on_its_way_is_no_failed_run(write_job, tmp_path, monkeypatch):
    cluster = Cluster()
    monkeypatch.setattr(cluster, "submit_job", lambda **_: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(submitting, "connected", lambda _: cluster)
    found = call("submit", write_job(), "--shared", tmp_path, "--address", "http://head:8265")
    assert (found.exit_code, found.stdout) == (130, "")
    assert "whether the head has the job already" in found.stderr


def test_ctrl_c_leaves_the_job_running(monkeypatch, capsys):
    monkeypatch.setattr(submitting, "follow", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert submitting._waited_for(None, "soil-a1", "/runs/soil", "http://head:8265") == 130
    said = capsys.readouterr().err
    assert "soil-a1 goes on without us" in said
    assert "ray job stop --address http://head:8265 soil-a1" in said


def test_what_the_cluster_is_to_run():
    how = submitting.How("http://head:8265", trust_model=True, autoscale=True, grace=7.5, retry_failed=True)
    words = "python -m jobs.cli run job.toml --address auto --grace 7.5 --log-shards"
    assert how.entrypoint(copy_series=False) == f"{words} --retry-failed --trust-model --autoscale"
    assert how.entrypoint(copy_series=True).endswith(" --copy-series")
    assert how.variables()["RAY_JOB_STOP_WAIT_TIME_S"] == "18"
    assert how.variables()["SENSITIVITY_PATIENCE"] == os.environ["SENSITIVITY_PATIENCE"]
    assert json.dumps(how.variables())
