"""What is told of a run while it goes on: a line a shard, Ray's metrics, status."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs import metrics, status
from jobs.driver import How, run_job
from jobs.metrics import Metrics
from sensitivity.commits import Commit, read_commits
from sensitivity.job import Job
from sensitivity.store import Run
from tests.jobs.conftest import KNOBS, PATIENCE, RUNNERS, after, call, small_job, start, until
from tests.jobs.test_runners import poisoned


def lines(err: str) -> list[dict]:
    return [json.loads(line) for line in err.splitlines() if line.startswith("{")]


@RUNNERS
def test_a_line_a_shard_says_who_and_how_fast(write_job, ray_session, capsys, how):
    job = Job.load(write_job(sensitivity=KNOBS, run={"shard_windows": 20}))
    summary = run_job(job, How(serial=how.serial, log_shards=True))
    found = sorted(lines(capsys.readouterr().err), key=lambda line: line["shard"])
    assert [(line["shard"], line["first_window"], line["windows"]) for line in found] == [
        (0, 0, 20),
        (1, 20, 20),
        (2, 40, 15),
    ]
    for line, record in zip(found, read_commits(summary.run).values(), strict=True):
        assert line["event"] == "committed"
        assert line["worker"] == f"{record.host}:{record.pid}"
        assert line["seconds"] == pytest.approx(record.seconds, abs=1e-3)
        assert line["windows_per_second"] == pytest.approx(record.computed / record.seconds, rel=1e-2)
        assert line["peak_memory"] == record.peak_memory > 10**8


def test_a_line_a_try_that_fails(write_job, tmp_path, capsys):
    job = poisoned(write_job, tmp_path, 'raise RuntimeError("too much rain")', "logged")
    assert not run_job(job, How(serial=True, log_shards=True)).complete
    found = [line for line in lines(capsys.readouterr().err) if line["shard"] == 3]
    assert [(line["event"], line["attempt"]) for line in found] == [("failed", 1), ("failed", 2), ("given up", 3)]
    assert "too much rain" in found[0]["reason"]


def test_metrics_reach_what_prometheus_reads(write_job, ray_session, tmp_path):
    import ray

    run_job(Job.load(write_job(sensitivity=KNOBS, run={"path": "läufe/run", "shard_windows": 20})), How())
    port = ray.nodes()[0]["MetricsExportPort"]
    name = f'run="{tmp_path}/l%C3%A4ufe/run"'
    whole = [
        re.compile(rf"sensitivity_{metric}{{[^}}]*{re.escape(name)}[^}}]*}} {value}")  # each is told at its own moment
        for metric, value in {
            "windows_total": 55,
            "shards_done_total": 3,
            "windows_per_second": "",
            "worker_peak_memory_bytes": "",
        }.items()
    ]
    said = until_said(port, lambda said: all(one.search(said) for one in whole))
    mine = [line for line in said.splitlines() if name in line]
    values = {re.sub(r".*sensitivity_(\w+)\{.*", r"\1", line): float(line.split()[-1]) for line in mine}
    assert values["windows_total"] == 55
    assert values["shards_done_total"] == 3
    assert values["windows_per_second"] > 0
    assert values["worker_peak_memory_bytes"] > 10**8


def until_said(port: int, enough: Callable[[str], bool]) -> str:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=PATIENCE) as answer:
            said = answer.read().decode()
        if enough(said):
            return said
        time.sleep(0.5)
    raise AssertionError(said[-2000:])


def test_the_rate_is_that_of_the_last_minute(monkeypatch):
    told, clock = [], [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    found = Metrics("a run")
    monkeypatch.setattr(found, "_rate", Told(told))
    for second in range(1, 200):
        clock[0] = float(second)
        found._new["windows"] += 10 if second < 100 else 30
        found.tell()
    assert told[50] == pytest.approx(10)
    assert told[-1] == pytest.approx(30)


class Told:
    def __init__(self, values: list[float]) -> None:
        self._values = values

    def set(self, value: float, tags: dict[str, str]) -> None:
        self._values.append(value)


def test_status_tells_of_a_run_at_work(write_job, tmp_path):
    file = small_job(write_job)
    seen = []
    with after(5, lambda: seen.append(call("status", tmp_path / "run").output)):
        assert run_job(Job.load(file), How(serial=True)).complete
    assert re.search(r"driver +process \d+ on", seen[0])
    assert re.search(r"shards +[56] done, 0 failed, 1[45] missing, of 20", seen[0])
    assert re.search(r"rate +[\d,]+ windows/s over", seen[0])
    assert re.search(r"time left +\S+ (s|min)", seen[0])
    assert re.search(r"workers +1 so far\n +\S+:\d+  [56] shards, [\d,]+ windows/s, last \S+ s ago", seen[0])
    assert "to go on" not in seen[0]
    done = call("status", tmp_path / "run").output
    assert "time left" not in done
    assert "none at work" in done


def test_status_watches_until_the_run_ends(write_job, tmp_path, held, monkeypatch):
    """The run is held until it has been looked at once."""
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        held.release()
        time.sleep(0.05)

    monkeypatch.setattr(status, "time", SimpleNamespace(sleep=pause, time=time.time))
    held.hold(3)
    process = start("run", str(small_job(write_job)), "--serial", cwd=tmp_path)
    until(lambda: held.is_reached(3), process)
    watched = call("status", tmp_path / "run", "--watch", "--every", "0.2")
    process.communicate(timeout=PATIENCE)
    assert watched.exit_code == 0, watched.output
    assert set(pauses) == {0.2}
    assert "20 done, 0 failed, 0 missing, of 20" in watched.output


def test_a_run_that_ends_while_it_is_looked_at_was_not_left(write_job, monkeypatch):
    """A driver commits its last shard and is gone: whoever sees it gone has not missed that shard."""
    run = run_job(Job.load(small_job(write_job)), How(serial=True)).run
    asked = []
    for name in ("stand", "owner"):
        own = getattr(status, name)
        monkeypatch.setattr(status, name, lambda *given, own=own, name=name: asked.append(name) or own(*given))
    assert status.look(run).complete
    assert asked == ["owner", "stand"]


def test_status_of_a_run_that_was_left_says_how_to_go_on(write_job, tmp_path):
    file = small_job(write_job)
    assert run_job(Job.load(file), How(serial=True)).complete
    (tmp_path / "run" / "commits" / "00000003.json").unlink()
    watched = call("status", tmp_path / "run", "--watch")
    assert watched.exit_code == 1
    assert "sensitivity resume" in watched.output


def test_workers_with_other_settings_are_told_apart(write_job, tmp_path):
    file = small_job(write_job)
    assert run_job(Job.load(file), How(serial=True)).complete
    run = Run.open(tmp_path / "run")
    change(run, 7, lambda record: {**record, "pid": 77, "setting": {**record["setting"], "windows_per_call": 1}})
    said = call("status", run.place).output
    assert "2 so far" in said
    assert re.search(r":77  1 shards, [\d,]+ windows/s, setting 2, last", said)


def change(run: Run, shard: int, changed: Callable[[dict], dict]) -> None:
    from dataclasses import asdict

    from sensitivity.commits import _sealed

    record = Commit(**changed(asdict(read_commits(run)[shard])))
    Path(run.place.path / "commits" / f"{shard:08d}.json").write_bytes(_sealed(record))
