"""The same work on Ray as in one process: a crew of workers that are fed shards."""

from __future__ import annotations

from collections.abc import Iterator

from sensitivity.commits import Commit, Failure
from sensitivity.lease import Lease
from sensitivity.setting import Choice
from sensitivity.store import Run

from .crew import Crew
from .ledger import Ledger
from .metrics import Metrics
from .roster import Demand, Roster
from .stopping import Stop


def run_on_ray(
    run: Run,
    ledger: Ledger,
    choice: Choice,
    demand: Demand,
    lease: Lease | None = None,
    stop: Stop | None = None,
) -> Iterator[Commit | Failure]:
    """Compute every shard of the ledger on the open Ray session, until asked to stop; yields what became of each try,
    as it is heard.

    Raises `LeaseLost` once another driver owns the run, `StoreFailed` once no worker can write any more.
    """
    roster = Roster(run, choice, demand)
    metrics = Metrics(str(run.place))
    crew = Crew(run, roster, ledger, lease, stop or Stop(), metrics.tell_in_time)
    try:
        for outcome in crew.work():
            metrics.hear(outcome)
            yield outcome
        if roster.replaced:
            run.place.sweep()
    finally:
        crew.dismiss()
        metrics.tell()
