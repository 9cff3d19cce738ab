"""One worker in this process, without Ray: the oracle that every other runner must equal."""

from __future__ import annotations

from collections.abc import Iterator

from sensitivity import machine, meter
from sensitivity.commits import Commit, Failure, record_failure
from sensitivity.device import use_threads
from sensitivity.lease import LeaseLost
from sensitivity.patience import StoreFailed
from sensitivity.plan import Workers, fixed_memory
from sensitivity.setting import Choice
from sensitivity.store import Run
from sensitivity.worker import Worker

from .ledger import Ledger, Trouble
from .resources import quiet
from .stopping import Stop


def run_serial(
    run: Run, ledger: Ledger, choice: Choice, workers: Workers, stop: Stop | None = None
) -> Iterator[Commit | Failure]:
    """Compute every shard of the ledger, one after another, until asked to stop; yields what became of each try.

    The memory of a worker is what it takes itself: a notebook's own arrays, say, are no part of it.
    """
    use_threads(workers.cpus, gpu=workers.gpus > 0, share=workers.gpu_share)
    held = max(0, machine.resident_memory() - meter.reusable() - fixed_memory(run.facts))
    with quiet():
        worker = Worker(run, choice, workers, held=held)
        worker.warm_up()
    while not (stop and stop.draining) and (attempt := ledger.take()) is not None:
        try:
            outcome: Commit | Failure = worker.compute(attempt.shard, attempt.number)
        except (StoreFailed, LeaseLost):
            raise
        except Exception as error:
            outcome = ledger.fail(attempt, Trouble.of(error))
            record_failure(run, outcome)
        yield outcome
