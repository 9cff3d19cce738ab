"""Runs a job to its end: what is missing is computed, counted and reported."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sensitivity.commits import Commit, Failure, missing, read_commits
from sensitivity.job import Job
from sensitivity.plan import Setting, Workers, place, require_memory, worker_memory
from sensitivity.series import survey
from sensitivity.store import Run

from .ledger import Ledger, WorkersLost
from .prepare import prepare
from .progress import progress
from .resources import Resources, hold, local, quiet


@dataclass(frozen=True)
class How:
    """Where shards are computed: in this process, on Ray at `address`, or on a Ray of our own."""

    address: str | None = None
    serial: bool = False


@dataclass(frozen=True)
class Summary:
    """What one call did. already, done: shards committed before and after; computed: windows; rate: windows a second
    from the first shard's start to the last commit.
    """

    run: Run
    already: int
    done: int
    failed: tuple[Failure, ...]
    shards: int
    computed: int
    rate: float
    interrupted: bool

    @property
    def complete(self) -> bool:
        return self.done == self.shards


def run_job(job: Job, how: How) -> Summary:
    """Run a job, or what is missing of it. Raises `Refused` before anything is written."""
    with _resources(how) as resources:
        prepared = prepare(job, resources, gpu=how.serial)
        run = prepared.open_or_create()
        return _finish(run, prepared.plan.setting, prepared.plan.workers, how)


def resume(path: Path, how: How) -> Summary:
    """Finish a run from its own directory."""
    run = Run.open(path)
    run.require_series(survey(run.series))
    with _resources(how) as resources:
        with quiet():
            found = resources or local()
            hold(run.job, gpu=how.serial)
        workers = place(run.job, found.cpus, found.gpus, found.memory)
        require_memory(worker_memory(run.facts, run.setting, run.layout), run.setting, workers)
        return _finish(run, run.setting, workers, how)


@contextlib.contextmanager
def _resources(how: How) -> Iterator[Resources | None]:
    """The resources of the cluster asked for; None: this machine's, where Ray is started once it is needed."""
    if how.address is None or how.serial:
        yield None
        return
    from .ray_runner import session

    with session(how.address) as resources:
        yield resources


def _finish(run: Run, setting: Setting, workers: Workers, how: How) -> Summary:
    done = read_commits(run)
    todo = missing(run, done)
    total = run.layout.shard_count
    say(f"{total - len(todo):,} of {total:,} shards are committed, {len(todo):,} to compute")
    commits: list[Commit] = []
    failures: list[Failure] = []
    interrupted = False
    if todo:
        already = sum(record.stop - record.start for record in done.values())
        with (
            progress(run.layout.windows, already) as advance,
            contextlib.closing(_outcomes(run, Ledger(todo), setting, workers, how)) as outcomes,
        ):
            try:
                for outcome in outcomes:
                    if isinstance(outcome, Failure):
                        failures.append(outcome)
                    else:
                        commits.append(outcome)
                        advance(outcome.stop - outcome.start, outcome.started)
            except KeyboardInterrupt:
                interrupted = True
            except WorkersLost as error:
                say(str(error))
                interrupted = True
    return _summary(run, len(done), commits, failures, interrupted)


def _outcomes(
    run: Run, ledger: Ledger, setting: Setting, workers: Workers, how: How
) -> Generator[Commit | Failure, None, None]:
    if how.serial:
        from .serial import run_serial

        with _interruptible():
            yield from run_serial(run, ledger, setting, workers)
        return
    from .ray_runner import run_on_ray, session

    with session(how.address, workers), _interruptible():  # after Ray, which takes SIGTERM too
        yield from run_on_ray(run, ledger, setting, workers)


def _summary(run: Run, already: int, commits: list[Commit], failures: list[Failure], interrupted: bool) -> Summary:
    return Summary(
        run=run,
        already=already,
        done=len(read_commits(run)) if interrupted else already + len(commits),  # one may have come unheard
        failed=tuple(failures),
        shards=run.layout.shard_count,
        computed=sum(record.computed for record in commits),
        rate=throughput(commits),
        interrupted=interrupted,
    )


def throughput(commits: Iterable[Commit]) -> float:
    """Windows a second, from the first shard's start to the last commit."""
    records = list(commits)
    if not records:
        return 0.0
    seconds = max(record.finished for record in records) - min(record.started for record in records)
    return sum(record.computed for record in records) / max(seconds, 1e-9)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM stops a run as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def say(text: str) -> None:
    """Messages go to stderr; stdout is for results."""
    print(text, file=sys.stderr, flush=True)
