"""The same work on Ray: one actor a worker, fed shards through a bounded window of pending calls.

Actors hold the model and its compiled kernel. Each has at most `DEPTH` calls pending, so the next shard is there
when one is done and the driver holds little, however many shards there are. Only small records travel.

Ray restarts and retries nothing here: a lost worker is replaced, its current shard counts one attempt, and shards
that only waited on it count none.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from sensitivity import machine, patience
from sensitivity.commits import Commit, Failure, read_commit, record_failure
from sensitivity.errors import Refused
from sensitivity.lease import Lease
from sensitivity.patience import PATIENCE
from sensitivity.plan import Shard, Workers, human_bytes
from sensitivity.setting import Choice
from sensitivity.store import Run

from .deaths import Origin, died_by_itself, was_for_memory
from .ledger import Attempt, Ledger, Trouble, WorkersLost
from .resources import MEMORY_SHARE, Resources
from .stopping import Stop

DEPTH = 2
LOST_WHILE_STARTING = 3  # answers in a row that a worker cannot be set up
DIED_WHILE_STARTING = 6  # workers in a row that die of it, each but the first with calls of half the size
CONNECT_SECONDS, PATIENCE_SECONDS, LOOK_SECONDS = 5.0, 30.0, 1.0


class ShardWorker:
    """A `sensitivity.worker.Worker` behind Ray."""

    def __init__(self, run: Run, choice: Choice, workers: Workers, halvings: int, bearing: float) -> None:
        """bearing: seconds with a store that fails, as the driver has it."""
        os.environ[PATIENCE] = str(bearing)
        self._run, self._choice, self._workers, self._halvings = run, choice, workers, halvings

    def origin(self) -> Origin:
        return Origin.here()

    def set_up(self) -> None:
        """Load the model and compile its kernel: a call of its own, so that what goes wrong is an answer."""
        from sensitivity.device import use_threads
        from sensitivity.worker import Worker

        workers = self._workers
        use_threads(workers.cpus, gpu=workers.gpus > 0, share=workers.gpu_share)
        self._worker = Worker(self._run, self._choice, workers, self._halvings)
        self._worker.warm_up()

    def compute(self, shard: Shard, attempt: int) -> Commit | Trouble:
        try:
            return self._worker.compute(shard, attempt)
        except Exception as error:
            return Trouble.of(error)


@contextlib.contextmanager
def session(address: str | None, workers: Workers | None = None) -> Iterator[Resources]:
    """Ray for the length of a run: an existing cluster at `address`, else one of our own on this machine.

    A session that is open already is used and left open. workers: what one of our own is to hold. Yields what the
    cluster has.
    """
    ours = not ray.is_initialized()
    with contextlib.redirect_stdout(sys.stderr):  # Ray tells of dead workers on stdout, which is for results
        if ours:
            _connect(address, workers)
        try:
            yield _resources()
        finally:
            if ours:
                ray.shutdown()


def _connect(address: str | None, workers: Workers | None) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        if workers is not None:
            quiet |= {"num_cpus": workers.count * workers.cpus, "_memory": workers.count * workers.memory}
        ray.init(address="local", include_dashboard=False, **quiet)
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
    node = int(max((node.get("memory", memory) for node in _nodes()), default=memory) * MEMORY_SHARE)
    return Resources(int(total.get("CPU", 0)), int(total.get("GPU", 0)), memory, node)


def _nodes() -> list[dict[str, float]]:
    """What each node that is alive has in all."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def run_on_ray(
    run: Run, ledger: Ledger, choice: Choice, workers: Workers, lease: Lease | None = None, stop: Stop | None = None
) -> Iterator[Commit | Failure]:
    """Compute every shard of the ledger on the open Ray session, until asked to stop; yields what became of each, as
    it comes.

    Raises `LeaseLost` once another driver owns the run, `StoreFailed` once no worker can write any more.
    """
    require_a_node(workers, run.job.run.memory_bytes)
    crew = _Crew(run, choice, workers, lease, stop or Stop())
    try:
        yield from crew.work(ledger)
        if crew.replaced:
            run.place.sweep()
    finally:
        crew.dismiss()


def require_a_node(workers: Workers, memory: int | None) -> None:
    """Refuse workers that no node can hold: Ray would wait for ever. memory: bytes that the user asked for."""
    wanted = {"CPU": workers.cpus, "GPU": workers.gpus, "memory": memory or 0}
    nodes = _nodes()
    if not any(all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in nodes):
        raise Refused(
            "run.cpus_per_worker, run.gpus_per_worker, run.memory_per_worker",
            given=f"workers of {_in_words(wanted)}",
            allowed=f"what one node has: {'; '.join(map(_in_words, nodes[:5]))}",
            remedy="lower them, or add a node that is large enough",
        )


def _in_words(has: dict[str, float]) -> str:
    memory = f", {human_bytes(has['memory'])}" if has.get("memory") else ""
    return f"{has.get('CPU', 0):g} cores, {has.get('GPU', 0):g} GPUs{memory}"


@dataclass
class _Seat:
    """One worker's place: the actor in it, and its pending calls, the first of them running."""

    name: str
    actor: ActorHandle
    origin: ray.ObjectRef
    starting: ray.ObjectRef | None
    halvings: int = 0
    pending: deque[tuple[ray.ObjectRef, Attempt]] = field(default_factory=deque)

    @property
    def next_call(self) -> ray.ObjectRef | None:
        return self.starting or (self.pending[0][0] if self.pending else None)


class _Crew:
    def __init__(self, run: Run, choice: Choice, workers: Workers, lease: Lease | None, stop: Stop) -> None:
        self._run, self._choice, self._workers, self._lease, self._stop = run, choice, workers, lease, stop
        self._seats: list[_Seat] = []
        self._store_failed: set[str] = set()
        self.replaced = 0
        self._hired = self._died = self._halvings = self._lost_while_starting = self._died_while_starting = 0

    def work(self, ledger: Ledger) -> Iterator[Commit | Failure]:
        """Until nothing waits and nothing is computed: a worker that Ray has not started by then is not needed."""
        # The first worker of an unknown kind finds its setting and keeps it; the others then start at once.
        self._hire_all(1 if self._choice.by == "rule" else len(ledger))
        heard = time.monotonic()
        while any(seat.pending for seat in self._seats) or (len(ledger) and not self._stop.draining):
            calls = {seat.next_call: seat for seat in self._seats if seat.next_call is not None}
            answered, _ = ray.wait(list(calls), num_returns=1, timeout=LOOK_SECONDS)
            if self._lease is not None and self._lease.lost.is_set():
                self._lease.require()
            if answered:
                heard = time.monotonic()
                outcome = self._hear(answered[0], calls[answered[0]], ledger)
                if outcome is not None:
                    yield outcome
                self._feed(ledger)
            elif time.monotonic() - heard > PATIENCE_SECONDS:
                heard = time.monotonic()
                if not _nodes():
                    raise WorkersLost("Ray has lost its last node")
                self._say_what_is_waited_for()
                self._feed(ledger, patient=False)

    def _hire_all(self, most: int) -> None:
        for _ in range(min(self._workers.count - len(self._seats), most)):
            self._hire()

    def dismiss(self) -> None:
        for seat in self._seats:
            ray.kill(seat.actor)

    def _say_what_is_waited_for(self) -> None:
        starting = sum(seat.starting is not None for seat in self._seats)
        if starting == len(self._seats):
            wanted = f"{self._workers.cpus} cores and {self._workers.gpus:g} GPUs each"
            what = ", the first of which times kernels" if self._choice.by == "rule" else ""
            print(f"waiting for {starting} of Ray's workers to start ({wanted}){what}", file=sys.stderr)

    def _hire(self) -> None:
        options: dict[str, Any] = {"num_cpus": self._workers.cpus, "num_gpus": self._workers.gpus}
        if self._run.job.run.memory_bytes or self._is_memory_for_all:
            options["memory"] = self._workers.memory
        remote = ray.remote(ShardWorker).options(
            scheduling_strategy="SPREAD", max_restarts=0, max_task_retries=0, **options
        )
        actor: Any = remote.remote(self._run, self._choice, self._workers, self._halvings, patience.seconds())
        calls = actor.origin.remote(), actor.set_up.remote()
        self._seats.append(_Seat(f"worker {self._hired}", actor, *calls, self._halvings))
        self._hired += 1

    @functools.cached_property
    def _is_memory_for_all(self) -> bool:
        """Whether Ray counts as much: it then puts no two workers where there is room for one."""
        places = sum(int(node.get("memory", 0) // self._workers.memory) for node in _nodes())
        return places >= self._workers.count

    def _feed(self, ledger: Ledger, *, patient: bool = True) -> None:
        """Fill every worker's window of pending calls; near the end one at a time, so that nobody waits for another.

        A shard that failed at every worker at hand waits, while we are patient, for one that is being started.
        """
        if self._stop.draining:
            return
        ready = [seat for seat in self._seats if seat.starting is None]
        depth = DEPTH if len(ledger) > self._workers.count else 1
        for seat in ready:
            while len(seat.pending) < depth and (attempt := ledger.take(seat.name)) is not None:
                self._give(seat, attempt)
        waited_for = self._seats if patient else ready
        if ready and not any(seat.next_call for seat in waited_for) and (attempt := ledger.take()) is not None:
            self._give(ready[0], attempt)

    def _give(self, seat: _Seat, attempt: Attempt) -> None:
        seat.pending.append((seat.actor.compute.remote(attempt.shard, attempt.number), attempt))

    def _hear(self, call: ray.ObjectRef, seat: _Seat, ledger: Ledger) -> Commit | Failure | None:
        """Take a call's answer; the outcome of a shard that is settled by it."""
        try:
            answer = ray.get(call)
        except RayError as error:
            return self._replace(seat, error, ledger)
        if seat.starting is not None:
            seat.starting, self._lost_while_starting, self._died_while_starting = None, 0, 0
            self._hire_all(len(ledger) - len(self._seats))
            return None
        _, attempt = seat.pending.popleft()
        if self._stop.draining:
            self._let_go(seat, ledger)
        if isinstance(answer, Commit):
            self._died = 0
            self._store_failed.clear()
            return answer
        return self._failed(seat, attempt, answer, ledger)

    def _let_go(self, seat: _Seat, ledger: Ledger) -> None:
        """A worker that has finished what it had in hand; what waited for it is not heard of."""
        self._seats.remove(seat)
        ray.kill(seat.actor)
        for _, attempt in reversed(seat.pending):
            ledger.give_back(attempt)

    def _replace(self, seat: _Seat, error: RayError, ledger: Ledger) -> Commit | Failure | None:
        """Put a new worker in the seat of one that is lost; the shard it was computing counts an attempt."""
        self.replaced += 1
        self._seats.remove(seat)
        ray.kill(seat.actor)  # it may be unreachable and yet hold its cores
        died = died_by_itself(error)
        if died:
            self._halve_calls(seat, was_for_memory(error, seat.origin))
        if seat.starting is not None:
            self._lost_while_starting += not died
            self._require_hope(error)
        outcome = None
        attempts = [attempt for _, attempt in seat.pending]
        for attempt in reversed(attempts[1:]):
            ledger.give_back(attempt)
        if attempts:
            trouble = replace(Trouble.of(error), blames="worker")
            outcome = self._failed(seat, attempts[0], trouble, ledger)
        if len(ledger) and not self._stop.draining:
            self._hire()
        return outcome

    def _halve_calls(self, seat: _Seat, for_memory: bool | None) -> None:
        """Where a worker died for want of memory, or, where that is not known, from the second death on with no shard
        done in between. Those hired together count as one.
        """
        if seat.halvings == self._halvings:
            self._died_while_starting += seat.starting is not None
            self._halvings += self._died > 0 if for_memory is None else for_memory
        self._died += 1

    def _require_hope(self, error: RayError) -> None:
        """Raise where workers have been lost before their first shard once too often."""
        if self._lost_while_starting < LOST_WHILE_STARTING and self._died_while_starting < DIED_WHILE_STARTING:
            return
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, Refused):
            raise cause from error
        lost = self._lost_while_starting + self._died_while_starting
        raise WorkersLost(f"{lost} workers in a row could not be set up: {cause}") from error

    def _failed(self, seat: _Seat, attempt: Attempt, trouble: Trouble, ledger: Ledger) -> Commit | Failure | None:
        record = read_commit(self._run, attempt.shard)  # it may have died between its commit and its answer
        if record is not None:
            return record
        if trouble.blames in ("store", "lease"):
            ledger.give_back(attempt, seat.name)
            self._store_failed.add(seat.name)
            if trouble.blames == "lease" or self._store_failed >= {seat.name for seat in self._seats}:
                trouble.require_shard()
            return None
        failure = ledger.fail(attempt, trouble, seat.name)
        record_failure(self._run, failure)
        return failure if failure.given_up else None
