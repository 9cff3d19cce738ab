"""One worker in this process, without Ray: the oracle that every other runner must equal."""

from __future__ import annotations

from collections.abc import Iterator

from sensitivity.commits import Commit, Failure, record_failure
from sensitivity.device import use_threads
from sensitivity.plan import Workers
from sensitivity.setting import Choice
from sensitivity.store import Run
from sensitivity.worker import Worker

from .ledger import Ledger, Trouble
from .resources import quiet


def run_serial(run: Run, ledger: Ledger, choice: Choice, workers: Workers) -> Iterator[Commit | Failure]:
    """Compute every shard of the ledger, one after another; yields what became of each."""
    use_threads(workers.cpus, gpu=workers.gpus > 0, share=workers.gpu_share)
    with quiet():
        worker = Worker(run.path, choice, workers)
        worker.warm_up()
    while (attempt := ledger.take()) is not None:
        try:
            yield worker.compute(attempt.shard, attempt.number)
        except Exception as error:
            failure = ledger.fail(attempt, Trouble.of(error))
            if failure is not None:
                record_failure(run, failure)
                yield failure
