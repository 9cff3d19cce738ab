"""What verification finds, said; and mended where that is asked for."""

from __future__ import annotations

import contextlib
import shlex
import time

from sensitivity import integrity
from sensitivity.integrity import Damage
from sensitivity.progress import progress
from sensitivity.store import Run, owning

from .driver import say
from .status import DONE, INCOMPLETE, resume_command


def verify_run(run: Run, *, repair: bool) -> int:
    """Name every damaged file on stdout; the exit status. repair: make damaged shards missing, and restore the rest."""
    with owning(run.place) if repair else contextlib.nullcontext():
        found = _inspect(run)
        damages = [damage for part in found for damage in part.damages]
        for damage in damages:
            print(damage)
        left = integrity.repair(run, damages) if repair else []
    if not damages:
        shards = [part for part in found if part.shard is not None]
        chunks = sum(part.files - 1 for part in shards)
        print(f"{len(shards):,} of {run.layout.shard_count:,} shards committed, {chunks:,} chunks, all as committed")
        return DONE
    _say_how_to_go_on(run, damages, left, repaired=repair)
    return INCOMPLETE


def _inspect(run: Run) -> list[integrity.Inspected]:
    found, started = [], time.time()
    with progress(run.layout.shard_count, 0, "shards") as advance:
        for part in integrity.inspect(run):
            found.append(part)
            advance(part.shard is not None, started)
    return found


def _say_how_to_go_on(run: Run, damages: list[Damage], left: list[Damage], *, repaired: bool) -> None:
    if left:
        files = ", ".join(damage.file for damage in left)
        say(f"nothing to restore it from: copy it back, or run the job into a new run directory:  {files}")
    first = "" if repaired else f"sensitivity verify --repair {shlex.quote(str(run.place))}, then "
    if any(damage.shard is not None for damage in damages):
        say(f"to compute them again:  {first}{resume_command(run.place)}")
    elif not repaired:
        say(f"to restore them:  sensitivity verify --repair {shlex.quote(str(run.place))}")
