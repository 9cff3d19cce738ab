"""Shards that take far longer than others are begun a second time elsewhere; one of the two is stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import crew
from jobs.driver import How, run_job
from jobs.ledger import Trouble
from sensitivity.commits import read_commits, read_failures
from sensitivity.integrity import inspect
from sensitivity.job import Job
from tests.jobs.conftest import PATIENCE, contents
from tests.jobs.test_runners import poisoned

# What the first worker to meet the odd window does, and what the second: each writes down who it is.
ODD = """
first = not os.path.exists({log!r})
        with open({log!r}, "a") as log:
            log.write(str(os.getpid()) + "\\n")
        {first} if first else {second}"""
STOP, NOTHING = "os.kill(os.getpid(), signal.SIGSTOP)", "None"
RAISE = "exec('raise RuntimeError(\"no rain here\")')"
WAIT = f"[__import__('time').sleep(0.05) for _ in range({int(PATIENCE / 0.05)}) if {{}}]"
AWAIT = WAIT.format("len(open(log.name).read().split()) < 2")  # until the second has begun
AWAIT_TROUBLE = WAIT.format("not os.path.exists(log.name + '.trouble')")  # until the driver has heard of it
AWAIT_END = WAIT.format("not os.path.exists(log.name + '.end')")  # until the test lets it


def late(write_job, tmp_path: Path, name: str, first: str, second: str = NOTHING) -> tuple[Job, Path]:
    """The job, and the file that those write to who meet its odd window."""
    log = tmp_path / "log"
    harm = ODD.format(log=str(log), first=first, second=second).strip()
    return poisoned(write_job, tmp_path, harm, name), log


@pytest.fixture
def hasty_crew(monkeypatch):
    monkeypatch.setattr(crew, "LATE_SECONDS", 1.0)
    monkeypatch.setattr(crew, "LATE", 1.0)
    monkeypatch.setattr(crew, "GIVE_UP_SECONDS", 2.0)


@pytest.fixture
def trouble_told(monkeypatch, tmp_path):
    """What waits for trouble waits until the driver has dealt with it."""
    settle = crew.Crew._settle

    def telling(work, seat, call, outcome):
        yield from settle(work, seat, call, outcome)
        if isinstance(outcome, Trouble):
            (tmp_path / "log.trouble").touch()

    monkeypatch.setattr(crew.Crew, "_settle", telling)


@pytest.fixture
def end(tmp_path):
    """Whoever waits for the end waits until the test is over."""
    yield
    (tmp_path / "log.end").touch()


def expected(write_job, tmp_path: Path) -> dict[str, bytes]:
    """What the store holds when nobody is late."""
    job = poisoned(write_job, tmp_path, "pass", "in_time")
    run = job.run.model_copy(update={"path": str(tmp_path / "in_time")})
    assert run_job(job.model_copy(update={"run": run}), How(serial=True)).complete
    return contents(tmp_path / "in_time")


@pytest.mark.parametrize("first", [AWAIT_END, STOP], ids=["slow", "frozen"])
def test_a_late_shard_is_taken_over(write_job, ray_session, tmp_path, hasty_crew, end, first):
    wanted = expected(write_job, tmp_path)
    job, log = late(write_job, tmp_path, f"late_{'frozen' if first == STOP else 'slow'}", first)
    summary = run_job(job, How())
    assert summary.complete
    slow, quick = map(int, log.read_text().split())
    record = read_commits(summary.run)[3]
    assert record.pid == quick != slow
    assert record.attempt == 1
    assert read_failures(summary.run) == {}
    assert contents(tmp_path / "run") == wanted
    assert not [damage for part in inspect(summary.run) for damage in part.damages]


def test_of_two_the_first_is_stored(write_job, ray_session, tmp_path, hasty_crew, end):
    job, log = late(write_job, tmp_path, "late_both", AWAIT, AWAIT_END)
    summary = run_job(job, How())
    assert summary.complete
    first, _ = map(int, log.read_text().split())
    assert read_commits(summary.run)[3].pid == first


def test_what_fails_at_the_second_worker_costs_nothing(write_job, ray_session, tmp_path, hasty_crew, trouble_told):
    job, log = late(write_job, tmp_path, "late_failing", AWAIT_TROUBLE, RAISE)
    summary = run_job(job, How())
    assert summary.complete
    assert len(log.read_text().split()) == 2
    assert read_failures(summary.run) == {}
    assert read_commits(summary.run)[3].attempt == 1


def test_a_worker_that_fails_late_leaves_its_shard_to_the_second(
    write_job, ray_session, tmp_path, hasty_crew, trouble_told
):
    job, log = late(write_job, tmp_path, "late_then_failing", f"({AWAIT}, {RAISE})", AWAIT_TROUBLE)
    summary = run_job(job, How())
    assert summary.complete
    _, second = map(int, log.read_text().split())
    record = read_commits(summary.run)[3]
    assert (record.pid, record.attempt) == (second, 2)
    assert read_failures(summary.run) == {}
