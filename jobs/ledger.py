"""Which shards wait, and how often each was tried. Every runner takes its work from here."""

from __future__ import annotations

import socket
import traceback
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sensitivity.commits import Failure
from sensitivity.lease import LeaseLost
from sensitivity.patience import StoreFailed
from sensitivity.plan import Shard

ATTEMPTS = 3


class WorkersLost(RuntimeError):
    """Workers die, or cannot be set up, before they compute anything."""


@dataclass(frozen=True)
class Attempt:
    """The `number`-th try at a shard, counted from 1; `failed_at` names the workers at which it failed before."""

    shard: Shard
    number: int
    failed_at: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Trouble:
    """Why an attempt failed, as a small record that travels from worker to driver.

    blames: the shard, the store that failed, or the lease that was lost; the last two cost the shard no attempt.
    """

    reason: str
    traceback: str
    host: str
    blames: Literal["shard", "store", "lease"] = "shard"

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

    tried: how often shards failed in earlier runs, which counts; one that has used up its attempts gets as many again.
    """

    def __init__(
        self, shards: Iterable[Shard], tried: Mapping[int, int] | None = None, attempts: int = ATTEMPTS
    ) -> None:
        before = tried or {}
        self._waiting = deque(Attempt(shard, before.get(shard.index, 0) + 1) for shard in shards)
        self._attempts = attempts
        self._budgets = {shard: attempts * (count // attempts + 1) for shard, count in before.items()}

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, worker: str | None = None) -> Attempt | None:
        """The next attempt, or None while nothing waits; for a named `worker`, the next that did not fail there.

        So one broken worker cannot use up the attempts of every shard.
        """
        for i, attempt in enumerate(self._waiting):
            if worker is None or worker not in attempt.failed_at:
                del self._waiting[i]
                return attempt
        return None

    def give_back(self, attempt: Attempt) -> None:
        """An attempt that never began, or ended through no fault of its shard: it does not count."""
        self._waiting.appendleft(attempt)

    def fail(self, attempt: Attempt, trouble: Trouble, worker: str = "") -> Failure:
        """Count a failed attempt: the shard will be tried again, or is given up."""
        shard = attempt.shard
        is_last = attempt.number >= self._budgets.get(shard.index, self._attempts)
        if not is_last:
            self._waiting.append(Attempt(shard, attempt.number + 1, attempt.failed_at | {worker}))
        return Failure(
            shard.index,
            shard.start,
            shard.stop,
            attempt.number,
            trouble.reason,
            trouble.traceback,
            trouble.host,
            is_last,
        )
