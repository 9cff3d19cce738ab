"""What a job handed to a cluster is, and how it is followed: what may go wrong on the way."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
from ray.job_submission import JobStatus

from jobs import follow as following
from jobs import submit as submitting
from jobs.follow import Lost, follow
from jobs.submit import concluded, hand_over, next_id
from sensitivity.errors import Refused
from tests.jobs.conftest import call


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
