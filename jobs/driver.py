"""Runs a job to its end: what is missing is computed, counted and reported."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from sensitivity.addresses import place_at
from sensitivity.commits import Commit, Failure, Odd, count_records, each_failure
from sensitivity.creation import owning
from sensitivity.errors import Refused
from sensitivity.integrity import require_series
from sensitivity.job import Job
from sensitivity.lease import Lease, LeaseLost
from sensitivity.patience import StoreFailed
from sensitivity.placement import Node, place
from sensitivity.plan import Shards, Workers, fixed_memory, require_memory, worker_memory
from sensitivity.progress import Advance, progress
from sensitivity.setting import Choice
from sensitivity.standing import Keeper, Standing, stand
from sensitivity.store import JOB, Run
from sensitivity.tally import SHOWN
from sensitivity.versions import differences, versions

from .ledger import Ledger, WorkersLost
from .prepare import kept_choice, prepare
from .resources import hold, local, quiet
from .shard_log import shard_log
from .stopping import GRACE_SECONDS, Stop


@dataclass(frozen=True)
class How:
    """Where shards are computed: in this process, on Ray at `address`, or on a Ray of our own.

    retry_failed: also those that were given up. allow_version_change: of what computes numbers. trust_model: code that
    is stored in the model's file may run. grace: seconds that shards in hand have after SIGTERM. autoscale: the cluster
    adds nodes for workers that find no room. log_shards: a line of JSON a shard, in place of progress. copy_series: a
    new run holds its series even where workers could read it where it is.
    """

    address: str | None = None
    serial: bool = False
    retry_failed: bool = False
    allow_version_change: bool = False
    trust_model: bool = False
    grace: float = GRACE_SECONDS
    autoscale: bool = False
    log_shards: bool = False
    copy_series: bool = False

    def __post_init__(self) -> None:
        if self.autoscale and (self.serial or self.address is None):
            raise Refused(
                "--autoscale",
                given="no cluster" if self.address is None else "--serial",
                allowed="a Ray cluster that adds nodes (--address)",
                remedy="leave it out, or give the cluster's address",
            )


@dataclass(frozen=True)
class Summary:
    """What one call did. already, done: shards committed before and after; failed: given up, now or earlier;
    computed: windows; rate: windows a second from the first shard's start to the last commit; not_finite: derivatives
    of the first of so many shards; stopped: why, if before the end; intact: nobody else has been at the run, as far as
    is known.
    """

    run: Run
    already: int
    done: int
    failed: tuple[Failure, ...]
    shards: int
    computed: int
    rate: float
    not_finite: dict[int, int]
    not_finite_shards: int
    stopped: str | None
    intact: bool = True

    @property
    def complete(self) -> bool:
        return self.intact and self.done == self.shards


def run_job(job: Job, how: How) -> Summary:
    """Run a job, or what is missing of it. Raises `Refused` before any work; nothing but a run is left behind."""
    stop = Stop(how.grace)
    with stop.listening(), _cluster(how) as nodes, owning(place_at(job.run.path)) as lease:
        prepared = prepare(job, nodes, gpu=how.serial, trust_model=how.trust_model, autoscale=how.autoscale)
        run = replace(prepared, copy_series=how.copy_series).open_or_create(lease)
        _tell_suspicions(run)
        run = _as_ours(replace(run, code=job.directory), lease, how)
        surveyed = run.series == job.series and not prepared.copies_series  # just now, as workers are to read it
        if not lease.made and not surveyed:
            require_series(run)
        return _finish(run, lease, prepared.plan.choice, prepared.plan.workers, how, stop)


def resume(path: Path | str, how: How) -> Summary:
    """Finish a run from its own directory."""
    stop = Stop(how.grace)
    with stop.listening(), owning(Run.open(path).place) as lease, _cluster(how) as nodes:
        run = _as_ours(Run.open(lease.place), lease, how)
        _tell_suspicions(run)
        require_series(run)
        with quiet():
            found = local() if nodes is None else nodes
            hold(run.job, gpu=how.serial)
        needed = fixed_memory(run.facts)
        workers = place(run.job, found, needed, run.layout.shard_count, autoscale=how.autoscale)
        return _finish(run, lease, _choice(run, workers, how), workers, how, stop)


def _tell_suspicions(run: Run) -> None:
    for one in run.suspicions:
        say(f"suspicious: {one}")


def _as_ours(run: Run, lease: Lease, how: How) -> Run:
    """The run as ours, with the versions that it may be computed with."""
    held = run.held(lease, trust_model=how.trust_model)
    if not how.allow_version_change:
        held.require_versions()
        return held
    found = differences(run.versions, versions())
    for text in found:
        say(f"versions change, as allowed: {text}")
    return held.with_versions_changed() if found else held


def _choice(run: Run, workers: Workers, how: How) -> Choice:
    """What was given, or was timed on workers of this process's kind and fits; else workers find out themselves."""
    choice = run.choice
    if choice.by == "given":
        require_memory(worker_memory(run.facts, choice, run.layout), choice.setting, workers)
        return choice
    knows = how.serial or (how.address is None and not workers.gpus)
    return kept_choice(run, run.job.sensitivity, workers, knows) or replace(choice, by="rule")


@contextlib.contextmanager
def _cluster(how: How) -> Iterator[list[Node] | None]:
    """The nodes of the cluster asked for; None: this machine, where Ray is started once it is needed."""
    if how.address is None or how.serial:
        yield None
        return
    from .ray_session import session

    with session(how.address) as nodes:
        yield nodes


@dataclass
class _Tally:
    """What came of a run's shards so far: a few numbers, however many shards. odd: those with a record that does not
    count.
    """

    odd: set[int] = field(default_factory=set)
    failed: list[Failure] = field(default_factory=list)
    not_finite: dict[int, int] = field(default_factory=dict)
    not_finite_shards: int = 0
    committed: int = 0
    computed: int = 0
    started: float = float("inf")
    finished: float = 0.0

    def add(self, outcome: Commit | Failure) -> None:
        if isinstance(outcome, Failure):
            if outcome.given_up:
                self.failed.append(_without_traceback(outcome))
            return
        self.committed += 1
        self.odd.discard(outcome.shard)
        if outcome.not_finite:
            self.not_finite_shards += 1
            if len(self.not_finite) < SHOWN:
                self.not_finite[outcome.shard] = outcome.not_finite
        self.computed += outcome.computed
        self.started = min(self.started, outcome.started)
        self.finished = max(self.finished, outcome.finished)

    @property
    def rate(self) -> float:
        """Windows a second, from the first shard's start to the last commit."""
        return self.computed / max(self.finished - self.started, 1e-9) if self.committed else 0.0


@dataclass(frozen=True)
class _End:
    """Why a run ended before its shards did, if so. intact: nobody else has been at it, as far as is known."""

    why: str | None = None
    intact: bool = True


def _finish(run: Run, lease: Lease, choice: Choice, workers: Workers, how: How, stop: Stop) -> Summary:
    odd: list[Odd] = []
    standing = stand(run, odd.append)
    for record in odd:
        say(str(record))
    done = standing.tally.shards
    failures = {one.shard: _without_traceback(one) for one in each_failure(run) if not standing.done[one.shard]}
    left = {} if how.retry_failed else {i: failure for i, failure in failures.items() if failure.given_up}
    todo = _to_compute(run, standing, list(left))
    total = run.layout.shard_count
    given_up = f", {len(left):,} given up earlier" if left else ""
    say(f"{done:,} of {total:,} shards are committed, {len(todo):,} to compute{given_up}")
    tally, end = _Tally(odd={record.shard for record in odd}, failed=list(left.values())), _End()
    if todo:
        ledger = Ledger(todo, failures)
        if lease.token > 1:
            run.place.sweep()
        shown = progress(run.layout.windows, standing.tally.windows, quiet=how.log_shards)
        keeper = Keeper(run, standing)
        try:
            with shown as advance:
                outcomes = _outcomes(run, lease, ledger, choice, workers, how, stop)
                end = _hear_all(_watched(outcomes, keeper, how), tally, advance, stop)
        finally:
            keeper.close(hurry=tally.committed < len(todo))
    after = done + tally.committed
    if end.why is None:
        end = _changed(run, after + len(tally.odd))
    else:
        after = _committed(run, after)
    return Summary(
        run=run,
        already=done,
        done=after,
        failed=tuple(tally.failed),
        shards=total,
        computed=tally.computed,
        rate=tally.rate,
        not_finite=tally.not_finite,
        not_finite_shards=tally.not_finite_shards,
        stopped=end.why,
        intact=end.intact,
    )


def _to_compute(run: Run, standing: Standing, left: list[int]) -> Shards:
    done = standing.done.copy()
    done[left] = True
    return Shards(run.layout, (~done).nonzero()[0])


def _without_traceback(failure: Failure) -> Failure:
    """What is held of it here: its record has the rest."""
    return replace(failure, traceback="")


def _watched(
    outcomes: Generator[Commit | Failure, None, None], keeper: Keeper, how: How
) -> Generator[Commit | Failure, None, None]:
    """The same outcomes, logged and kept count of."""
    log = shard_log(how.log_shards)
    with contextlib.closing(outcomes):
        for outcome in outcomes:
            log(outcome)
            if isinstance(outcome, Commit):
                keeper.heard(outcome.shard)
            yield outcome


def _hear_all(outcomes: Generator[Commit | Failure, None, None], tally: _Tally, advance: Advance, stop: Stop) -> _End:
    """Count what becomes of shards."""
    try:
        with contextlib.closing(outcomes):
            for outcome in outcomes:
                tally.add(outcome)
                if isinstance(outcome, Commit):
                    advance(outcome.stop - outcome.start, outcome.started)
    except KeyboardInterrupt:
        return _End("the time to finish is over" if stop.draining else "interrupted")
    except (LeaseLost, StoreFailed, WorkersLost) as error:
        return _End(str(error), intact=not isinstance(error, LeaseLost))
    return _End("asked to end, and shards in hand are finished" if stop.draining else None)


def _changed(run: Run, known: int) -> _End:
    """Whether the run directory is not what it is believed to be: somebody else may have been at it."""
    try:
        run.require_lease()
        there = count_records(run)
    except (LeaseLost, StoreFailed) as error:
        return _End(str(error), intact=False)
    if there == known and run.place.size(JOB) is not None:
        return _End()
    what = f"{run.place} has been changed by others meanwhile: {there:,} commit records, {known:,} expected"
    return _End(what, intact=False)


def _committed(run: Run, known: int) -> int:
    """After an interruption, a shard may have been committed unheard."""
    here = replace(run, place=run.place.once())
    try:
        return known if count_records(here) == known else stand(here).tally.shards
    except OSError:
        return known


def _outcomes(
    run: Run, lease: Lease, ledger: Ledger, choice: Choice, workers: Workers, how: How, stop: Stop
) -> Generator[Commit | Failure, None, None]:
    if how.serial:
        from .serial import run_serial

        with stop.at_work():
            yield from run_serial(run, ledger, choice, workers, stop)
        return
    from .ray_runner import run_on_ray
    from .ray_session import nodes, session
    from .roster import Demand

    joined = how.address is not None
    least = None
    if joined and run.job.run.workers == "auto":
        is_few = workers.count == run.layout.shard_count  # each then has more than others would
        least = run.job.run.memory_bytes or (workers.memory if is_few else 2 * fixed_memory(run.facts))
    demand = Demand(workers, nodes, joined, least, comes_later=how.autoscale)
    with session(how.address, workers), stop.at_work():
        yield from run_on_ray(run, ledger, choice, demand, lease, stop)


def say(text: str) -> None:
    """Messages go to stderr; stdout is for results."""
    print(text, file=sys.stderr, flush=True)
