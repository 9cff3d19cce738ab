"""A worker behind Ray: an actor that holds the model and its compiled kernel, and is fed shards.

Only small records travel. An answer tells what has become of shards given before, for the last one may still be
written while the next is computed. Every time that a shard is given has a number of its own, its call: a shard may come
back to a worker that had given it up.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future

import ray

from sensitivity.commits import Commit
from sensitivity.patience import PATIENCE
from sensitivity.plan import Shard, Workers
from sensitivity.setting import Choice
from sensitivity.store import Run
from sensitivity.writing import Gate, GivenUp

from .deaths import Origin
from .ledger import Trouble

Settled = list[tuple[int, Commit | Trouble | None]]  # by call; None: it was given up to another worker, or not begun
ANSWER_SECONDS = 2.0
CONTROL = "control"  # calls that are answered while a shard is computed


class ShardWorker:
    """A `sensitivity.worker.Worker` behind Ray."""

    def __init__(self, run: Run, choice: Choice, halvings: int, bearing: float) -> None:
        """bearing: seconds with a store that fails, as the driver has it."""
        os.environ[PATIENCE] = str(bearing)
        self._run, self._choice, self._halvings = run, choice, halvings
        self._gates: dict[int, Gate] = {}  # of calls that are not settled
        self._writing: dict[int, Future[Commit]] = {}
        self._begun = -1  # the last call; they come in order
        self._lock = threading.Lock()  # of what calls of both kinds change
        self._draining = False

    def origin(self) -> Origin:
        return Origin.here()

    def set_up(self, workers: Workers) -> None:
        """Load the model and compile its kernel: a call of its own, so that what goes wrong is an answer.

        workers: of which this is one, with the memory that it has here.
        """
        from sensitivity.device import use_threads
        from sensitivity.worker import Worker

        use_threads(workers.cpus, gpu=workers.gpus > 0, share=workers.gpu_share)
        self._worker = Worker(self._run, self._choice, workers, self._halvings, overlap=True)
        self._worker.warm_up()

    def compute(self, call: int, shard: Shard, attempt: int, held: bool = False) -> Settled:
        """Compute a shard, and leave its last results to be written. held: nothing is written until `let`."""
        with self._lock:
            gate = self._gates.setdefault(call, Gate(held=held))
            self._begun = call
        if self._draining or gate.is_closed:
            del self._gates[call]
            return [(call, None), *self._settled()]
        try:
            self._writing[call] = self._worker.begin(shard, attempt, gate)
        except Exception as error:
            gate.close()  # a chunk of it may be on its way
            failed: Future[Commit] = Future()
            failed.set_exception(error)
            self._writing[call] = failed
        return self._settled()

    def finish(self) -> Settled:
        """Wait until everything is written."""
        for future in self._writing.values():
            future.exception()
        return self._settled()

    def _settled(self) -> Settled:
        done = [call for call, future in self._writing.items() if future.done()]
        with self._lock:
            for call in done:
                del self._gates[call]
        return [(call, _outcome(self._writing.pop(call))) for call in done]

    @ray.method(concurrency_group=CONTROL)
    def ready(self, call: int) -> bool:
        """Whether there is something to be written of a shard that is held; waits for it, but not for long."""
        gate = self._gate(call, held=True)
        return gate is not None and gate.reached(ANSWER_SECONDS)

    @ray.method(concurrency_group=CONTROL)
    def let(self, call: int, attempt: int) -> None:
        """Write what was held, as that attempt."""
        gate = self._gate(call, held=True)
        if gate is not None:
            gate.let(attempt)

    @ray.method(concurrency_group=CONTROL)
    def give_up(self, call: int) -> bool | None:
        """Do not begin a shard, or write no more of it; False if it is all written, None while something is."""
        gate = self._gate(call)
        return gate is not None and gate.close(ANSWER_SECONDS)

    def _gate(self, call: int, *, held: bool = False) -> Gate | None:
        """Of a call that is not begun yet, or not settled."""
        with self._lock:
            return self._gates.get(call) if call <= self._begun else self._gates.setdefault(call, Gate(held=held))

    @ray.method(concurrency_group=CONTROL)
    def drain(self) -> None:
        """Begin no shard any more."""
        self._draining = True


def _outcome(future: Future[Commit]) -> Commit | Trouble | None:
    try:
        return future.result()
    except GivenUp:
        return None
    except Exception as error:
        return Trouble.of(error)
