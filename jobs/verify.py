"""What verification finds, said; and mended where that is asked for."""

from __future__ import annotations

import contextlib
import shlex
import time

from sensitivity import integrity
from sensitivity.commits import count_records
from sensitivity.creation import owning
from sensitivity.integrity import Damage
from sensitivity.progress import progress
from sensitivity.store import Run

from .driver import say
from .status import DONE, INCOMPLETE, resume_command


def verify_run(run: Run, *, repair: bool) -> int:
    """Name every damaged file on stdout; the exit status. repair: make damaged shards missing, and restore the rest."""
    with owning(run.place) if repair else contextlib.nullcontext() as lease:
        held = Run.open(lease.place, to_mend=True).held(lease) if lease else run
        shards, chunks, damages = _inspect(held)
        left = integrity.repair(held, damages) if repair else []
    if not damages:
        print(f"{shards:,} of {run.layout.shard_count:,} shards committed, {chunks:,} chunks, all as committed")
        return DONE
    _say_how_to_go_on(run, damages, left, repaired=repair)
    return INCOMPLETE


def _inspect(run: Run) -> tuple[int, int, list[Damage]]:
    """Shards, their chunks, and the damages, each of which is said as it is found."""
    shards, chunks, damages, started = 0, 0, [], time.time()
    with progress(count_records(run), 0, "shards") as advance:
        for part in integrity.inspect(run):
            for damage in part.damages:
                print(damage, flush=True)
            damages += part.damages
            if part.shard is not None:
                shards += 1
                chunks += part.files - 1
                advance(1, started)
    return shards, chunks, damages


def _say_how_to_go_on(run: Run, damages: list[Damage], left: list[Damage], *, repaired: bool) -> None:
    if left:
        files = ", ".join(damage.file for damage in left)
        say(f"nothing to restore it from: copy it back, or run the job into a new run directory:  {files}")
    first = "" if repaired else f"sensitivity verify --repair {shlex.quote(str(run.place))}, then "
    if any(damage.shard is not None for damage in damages):
        say(f"to compute them again:  {first}{resume_command(run.place)}")
    elif not repaired:
        say(f"to restore them:  sensitivity verify --repair {shlex.quote(str(run.place))}")
