"""Which shards wait, and how often each was tried. Every runner takes its work from here."""

from __future__ import annotations

import socket
import traceback
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from sensitivity.commits import Failure
from sensitivity.lease import LeaseLost
from sensitivity.patience import StoreFailed
from sensitivity.plan import Shard

# A worker may die of its shard, but also of much else, as on machines that are taken away.
ATTEMPTS, DEATHS = 3, 6


class WorkersLost(RuntimeError):
    """Workers die, or cannot be set up, before they compute anything."""


@dataclass(frozen=True)
class Attempt:
    """The `number`-th try at a shard, counted from 1; `failed_at` names the workers at which it failed before.

    raised, deaths: how the tries before ended, since it was last given up.
    """

    shard: Shard
    number: int
    failed_at: frozenset[str] = frozenset()
    raised: int = 0
    deaths: int = 0

    @classmethod
    def after(cls, shard: Shard, failure: Failure | None) -> Attempt:
        """The next one after those of an earlier run; one that was given up has its tries anew."""
        if failure is None:
            return cls(shard, 1)
        if failure.given_up:
            return cls(shard, failure.attempts + 1)
        return cls(shard, failure.attempts + 1, raised=failure.raised, deaths=failure.deaths)


@dataclass(frozen=True)
class Trouble:
    """Why an attempt failed, as a small record that travels from worker to driver.

    blames: the shard, the worker that died of it or of something else, the store that failed, or the lease that was
    lost; the last two cost the shard no attempt.
    """

    reason: str
    traceback: str
    host: str
    blames: Literal["shard", "worker", "store", "lease"] = "shard"

    @classmethod
    def of(cls, error: Exception) -> Trouble:
        text = "".join(traceback.format_exception(error))
        blames: Any = {StoreFailed: "store", LeaseLost: "lease"}.get(type(error), "shard")
        return cls(f"{type(error).__name__}: {_gist(str(error))}", text[-8000:], socket.gethostname(), blames)

    def require_shard(self) -> None:
        """Raise what was raised where it is no fault of the shard's."""
        if self.blames == "store":
            raise StoreFailed(self.reason.partition(": ")[2])
        if self.blames == "lease":
            raise LeaseLost(self.reason.partition(": ")[2])


def _gist(message: str) -> str:
    """What is wrong, on one line. TensorFlow says it last, after its own account of the graph."""
    lines = [line for line in message.splitlines() if line.strip() and "[[{{node" not in line]
    if lines and lines[0].startswith("Graph execution error"):
        account = [i for i, line in enumerate(lines) if line[0].isspace() or line.startswith(_ACCOUNT)]
        lines = lines[account[-1] + 1 :] or lines
    return " ".join(line.strip() for line in lines[:3])[:500] or "no message"


_ACCOUNT = ("Graph execution error", "Detected at node", "<stack traces", "Traceback")


class Ledger:
    """Shards in order; those that failed again at the end, until their attempts are used up.

    Holds those that were tried; others are counted. failures: of earlier runs, whose attempts count.
    """

    def __init__(self, shards: Collection[Shard], failures: Mapping[int, Failure] | None = None) -> None:
        before = failures or {}
        self._new = (Attempt.after(shard, before.get(shard.index)) for shard in shards)
        self._untried = len(shards)
        self._returned: deque[Attempt] = deque()
        self._failed: deque[Attempt] = deque()

    def __len__(self) -> int:
        return len(self._returned) + self._untried + len(self._failed)

    def take(self, worker: str | None = None) -> Attempt | None:
        """The next attempt, or None while nothing waits; for a named `worker`, the next that did not fail there.

        So one broken worker cannot use up the attempts of every shard.
        """
        found = _first(self._returned, worker)
        if found is None and self._untried:
            self._untried -= 1
            return next(self._new)
        return found or _first(self._failed, worker)

    def take_again(self, shard: Shard) -> Attempt | None:
        """The next attempt at a shard that has just failed, out of turn; None where it is given up."""
        found = next((attempt for attempt in self._failed if attempt.shard == shard), None)
        if found is not None:
            self._failed.remove(found)
        return found

    def give_back(self, attempt: Attempt, worker: str | None = None) -> None:
        """An attempt that never began, or ended through no fault of its shard: it does not count.

        worker: where it ended, so that others are asked first.
        """
        failed_at = attempt.failed_at | ({worker} if worker else set())
        self._returned.appendleft(replace(attempt, failed_at=failed_at))

    def fail(self, attempt: Attempt, trouble: Trouble, worker: str = "") -> Failure:
        """Count a failed attempt: the shard will be tried again, or is given up."""
        shard, died = attempt.shard, trouble.blames == "worker"
        raised, deaths = attempt.raised + (not died), attempt.deaths + died
        is_last = raised >= ATTEMPTS or deaths >= DEATHS
        if not is_last:
            failed_at = attempt.failed_at | {worker}
            self._failed.append(Attempt(shard, attempt.number + 1, failed_at, raised, deaths))
        return Failure(
            shard=shard.index,
            start=shard.start,
            stop=shard.stop,
            attempts=attempt.number,
            reason=trouble.reason,
            traceback=trouble.traceback,
            host=trouble.host,
            given_up=is_last,
            raised=raised,
            deaths=deaths,
        )


def _first(waiting: deque[Attempt], worker: str | None) -> Attempt | None:
    """Take the first that did not fail at a worker."""
    for i, attempt in enumerate(waiting):
        if worker is None or worker not in attempt.failed_at:
            del waiting[i]
            return attempt
    return None
