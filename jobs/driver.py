"""Runs a job to its end: what is missing is computed, counted and reported."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from sensitivity.commits import Commit, Failure, each_commit, missing
from sensitivity.job import Job
from sensitivity.plan import Workers, require_memory, worker_memory
from sensitivity.progress import progress
from sensitivity.series import survey
from sensitivity.setting import Choice
from sensitivity.store import Run

from .ledger import Ledger, WorkersLost
from .prepare import crew, kept_choice, prepare
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
        if resources is not None:
            from .ray_runner import require_a_node

            require_a_node(prepared.plan.workers, job.run.memory_bytes)
        run = prepared.open_or_create()
        return _finish(run, prepared.plan.choice, prepared.plan.workers, how)


def resume(path: Path, how: How) -> Summary:
    """Finish a run from its own directory."""
    run = Run.open(path)
    run.require_series(survey(run.series))
    with _resources(how) as resources:
        with quiet():
            found = resources or local()
            hold(run.job, gpu=how.serial)
        workers = crew(run.job, run.facts, found, run.layout.shard_count)
        return _finish(run, _choice(run, workers, how), workers, how)


def _choice(run: Run, workers: Workers, how: How) -> Choice:
    """What was given, or was timed on workers of this process's kind and fits; else workers find out themselves."""
    choice = run.choice
    if choice.by == "given":
        require_memory(worker_memory(run.facts, choice, run.layout), choice.setting, workers)
        return choice
    knows = how.serial or (how.address is None and not workers.gpus)
    return kept_choice(run, run.job.sensitivity, workers, knows) or replace(choice, by="rule")


@contextlib.contextmanager
def _resources(how: How) -> Iterator[Resources | None]:
    """The resources of the cluster asked for; None: this machine's, where Ray is started once it is needed."""
    if how.address is None or how.serial:
        yield None
        return
    from .ray_runner import session

    with session(how.address) as resources:
        yield resources


@dataclass
class _Tally:
    """What came of a run's shards so far: a few numbers, however many shards."""

    failed: list[Failure] = field(default_factory=list)
    committed: int = 0
    computed: int = 0
    started: float = float("inf")
    finished: float = 0.0

    def add(self, outcome: Commit | Failure) -> None:
        if isinstance(outcome, Failure):
            self.failed.append(outcome)
            return
        self.committed += 1
        self.computed += outcome.computed
        self.started = min(self.started, outcome.started)
        self.finished = max(self.finished, outcome.finished)

    @property
    def rate(self) -> float:
        """Windows a second, from the first shard's start to the last commit."""
        return self.computed / max(self.finished - self.started, 1e-9) if self.committed else 0.0


def _finish(run: Run, choice: Choice, workers: Workers, how: How) -> Summary:
    done = {record.shard: record.stop - record.start for record in each_commit(run)}
    todo = missing(run, done)
    total = run.layout.shard_count
    say(f"{len(done):,} of {total:,} shards are committed, {len(todo):,} to compute")
    tally, interrupted = _Tally(), False
    if todo:
        with (
            progress(run.layout.windows, sum(done.values())) as advance,
            contextlib.closing(_outcomes(run, Ledger(todo), choice, workers, how)) as outcomes,
        ):
            try:
                for outcome in outcomes:
                    tally.add(outcome)
                    if isinstance(outcome, Commit):
                        advance(outcome.stop - outcome.start, outcome.started)
            except KeyboardInterrupt:
                interrupted = True
            except WorkersLost as error:
                say(str(error))
                interrupted = True
    return Summary(
        run=run,
        already=len(done),
        # After an interruption, a shard may have been committed unheard.
        done=sum(1 for _ in each_commit(run)) if interrupted else len(done) + tally.committed,
        failed=tuple(tally.failed),
        shards=total,
        computed=tally.computed,
        rate=tally.rate,
        interrupted=interrupted,
    )


def _outcomes(
    run: Run, ledger: Ledger, choice: Choice, workers: Workers, how: How
) -> Generator[Commit | Failure, None, None]:
    if how.serial:
        from .serial import run_serial

        with _interruptible():
            yield from run_serial(run, ledger, choice, workers)
        return
    from .ray_runner import run_on_ray, session

    with session(how.address, workers), _interruptible():  # after Ray, which takes SIGTERM too
        yield from run_on_ray(run, ledger, choice, workers)


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
