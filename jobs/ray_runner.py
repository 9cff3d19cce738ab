"""The same work on Ray: one actor a worker, fed shards through a bounded window of pending calls.

Actors hold the model and its compiled kernel. Each has at most `DEPTH` calls pending, so the next shard is there
when one is done and the driver holds little, however many shards there are. Only small records travel.

Ray restarts and retries nothing here: a lost worker is replaced, its current shard counts one attempt, and shards
that only waited on it count none.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from sensitivity import machine
from sensitivity.commits import Commit, Failure, record_failure
from sensitivity.errors import Refused
from sensitivity.plan import Setting, Shard, Workers
from sensitivity.store import Run

from .ledger import Attempt, Ledger, Trouble
from .resources import MEMORY_SHARE, Resources

DEPTH = 2
LOST_WHILE_STARTING = 3
CONNECT_SECONDS = 5.0


class WorkersLost(RuntimeError):
    """Workers die, or cannot be set up, before they compute anything."""


class ShardWorker:
    """A `sensitivity.worker.Worker` behind Ray."""

    def __init__(self, path: Path, setting: Setting, workers: Workers) -> None:
        self._path, self._setting, self._workers = path, setting, workers

    def set_up(self) -> None:
        """Load the model and compile its kernel: a call of its own, so that what goes wrong is an answer."""
        from sensitivity.tuning import use_threads
        from sensitivity.worker import Worker

        workers = self._workers
        share = workers.memory if 0 < workers.gpus < 1 else None
        use_threads(workers.cpus, gpu=workers.gpus > 0, gpu_memory=share)
        self._worker = Worker(self._path, self._setting)
        self._worker.warm_up()

    def compute(self, shard: Shard, attempt: int) -> Commit | Trouble:
        try:
            return self._worker.compute(shard, attempt)
        except Exception as error:
            return Trouble.of(error)


@contextlib.contextmanager
def session(address: str | None, cpus: int | None = None) -> Iterator[Resources]:
    """Ray for the length of a run: an existing cluster at `address`, else one of our own on this machine.

    A session that is open already is used and left open. Yields what the cluster has.
    """
    ours = not ray.is_initialized()
    with contextlib.redirect_stdout(sys.stderr):  # Ray tells of dead workers on stdout, which is for results
        if ours:
            _connect(address, cpus)
        try:
            yield _resources()
        finally:
            if ours:
                ray.shutdown()


def _connect(address: str | None, cpus: int | None) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        ray.init(address="local", include_dashboard=False, num_cpus=cpus or machine.cores(), **quiet)
        return
    _require_reachable(address)
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _unreachable(address, error) from error


def _require_reachable(address: str) -> None:
    """Ray itself would try for ten minutes, and hear no Ctrl-C."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise _unreachable(address, error) from error


def _unreachable(address: str, error: Exception) -> Refused:
    return Refused(
        "--address",
        given=f"{address} ({str(error).strip().partition(chr(10))[0]})",
        allowed="a Ray cluster that can be reached, such as 10.0.0.5:6379 or auto",
        remedy="check the address with `ray status --address ADDRESS`, or leave it out to run on this machine",
    )


def _resources() -> Resources:
    total = ray.cluster_resources()
    memory = int(total.get("memory", machine.available_memory()) * MEMORY_SHARE)
    return Resources(int(total.get("CPU", 0)), int(total.get("GPU", 0)), memory)


def run_on_ray(run: Run, ledger: Ledger, setting: Setting, workers: Workers) -> Iterator[Commit | Failure]:
    """Compute every shard of the ledger on the open Ray session; yields what became of each, as it comes."""
    crew = _Crew(run, setting, workers)
    try:
        yield from crew.work(ledger)
    finally:
        crew.dismiss()


@dataclass
class _Seat:
    """One worker's place: the actor in it, and its pending calls, the first of them running."""

    actor: ActorHandle
    ready: bool = False
    pending: deque[tuple[ray.ObjectRef, Attempt]] = field(default_factory=deque)


class _Crew:
    def __init__(self, run: Run, setting: Setting, workers: Workers) -> None:
        self._run, self._setting, self._workers = run, setting, workers
        self._busy: dict[ray.ObjectRef, _Seat] = {}  # by the call that each will answer next
        self._idle: list[_Seat] = []
        self._lost_while_starting = 0

    def work(self, ledger: Ledger) -> Iterator[Commit | Failure]:
        for _ in range(min(self._workers.count, len(ledger))):
            self._hire()
        while self._busy:
            answered, _ = ray.wait(list(self._busy), num_returns=1)
            outcome = self._hear(answered[0], self._busy.pop(answered[0]), ledger)
            if outcome is not None:
                yield outcome
            idle, self._idle = self._idle, []
            for seat in idle:  # a shard to be tried again may have come back
                self._feed(seat, ledger)

    def dismiss(self) -> None:
        for seat in (*self._busy.values(), *self._idle):
            ray.kill(seat.actor)

    def _hire(self) -> None:
        options: dict[str, Any] = {"num_cpus": self._workers.cpus, "num_gpus": self._workers.gpus}
        if self._run.job.run.memory_bytes:
            options["memory"] = self._workers.memory
        remote = ray.remote(ShardWorker).options(
            scheduling_strategy="SPREAD", max_restarts=0, max_task_retries=0, **options
        )
        actor: Any = remote.remote(self._run.path, self._setting, self._workers)
        self._busy[actor.set_up.remote()] = _Seat(actor)

    def _feed(self, seat: _Seat, ledger: Ledger) -> None:
        """Fill the seat's window of pending calls; near the end one at a time, so that nobody waits for another."""
        depth = DEPTH if len(ledger) > self._workers.count else 1
        while len(seat.pending) < depth and (attempt := ledger.take()) is not None:
            seat.pending.append((seat.actor.compute.remote(attempt.shard, attempt.number), attempt))
        if seat.pending:
            self._busy[seat.pending[0][0]] = seat
        else:
            self._idle.append(seat)

    def _hear(self, call: ray.ObjectRef, seat: _Seat, ledger: Ledger) -> Commit | Failure | None:
        """Take a call's answer and give its worker more to do; the outcome of a shard that is settled by it."""
        outcome: Commit | Failure | None = None
        try:
            answer = ray.get(call)
        except RayActorError as error:
            return self._replace(seat, error, ledger)
        except RayTaskError as error:
            if isinstance(error.cause, Refused):
                raise error.cause from error
            raise WorkersLost(f"a worker could not be set up: {error.cause!r}") from error
        if seat.ready:
            _, attempt = seat.pending.popleft()
            outcome = answer if isinstance(answer, Commit) else self._failed(attempt, answer, ledger)
        seat.ready, self._lost_while_starting = True, 0
        self._feed(seat, ledger)
        return outcome

    def _replace(self, seat: _Seat, error: RayActorError, ledger: Ledger) -> Failure | None:
        """Put a new worker in the seat of one that died; the shard it was computing counts an attempt."""
        outcome = None
        attempts = [attempt for _, attempt in seat.pending]
        for attempt in reversed(attempts[1:]):
            ledger.give_back(attempt)
        if attempts:
            outcome = self._failed(attempts[0], Trouble.of(error), ledger)
        if not seat.ready:
            self._lost_while_starting += 1
            if self._lost_while_starting >= LOST_WHILE_STARTING:
                raise WorkersLost(f"{LOST_WHILE_STARTING} workers in a row died while being set up: {error}") from error
        if len(ledger):
            self._hire()
        return outcome

    def _failed(self, attempt: Attempt, trouble: Trouble, ledger: Ledger) -> Failure | None:
        failure = ledger.fail(attempt, trouble)
        if failure is not None:
            record_failure(self._run, failure)
        return failure
