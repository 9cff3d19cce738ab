"""Which shards wait, and how often each was tried. Every runner takes its work from here."""

from __future__ import annotations

import socket
import traceback
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from sensitivity.commits import Failure
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
    """Why an attempt failed, as a small record that travels from worker to driver."""

    reason: str
    traceback: str
    host: str

    @classmethod
    def of(cls, error: BaseException) -> Trouble:
        text = "".join(traceback.format_exception(error))
        return cls(f"{type(error).__name__}: {_gist(str(error))}", text[-8000:], socket.gethostname())


def _gist(message: str) -> str:
    """What is wrong, on one line. TensorFlow says it last, after its own account of the graph."""
    lines = [line for line in message.splitlines() if line.strip() and "[[{{node" not in line]
    if lines and lines[0].startswith("Graph execution error"):
        account = [i for i, line in enumerate(lines) if line[0].isspace() or line.startswith(_ACCOUNT)]
        lines = lines[account[-1] + 1 :] or lines
    return " ".join(line.strip() for line in lines[:3])[:500] or "no message"


_ACCOUNT = ("Graph execution error", "Detected at node", "<stack traces", "Traceback")


class Ledger:
    """Shards in order; those that failed again at the end, until their attempts are used up."""

    def __init__(self, shards: Iterable[Shard], attempts: int = ATTEMPTS) -> None:
        self._waiting = deque(Attempt(shard, 1) for shard in shards)
        self._attempts = attempts

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

    def fail(self, attempt: Attempt, trouble: Trouble, worker: str = "") -> Failure | None:
        """Count a failed attempt: None while the shard will be tried again, else why it is given up."""
        shard = attempt.shard
        if attempt.number < self._attempts:
            self._waiting.append(Attempt(shard, attempt.number + 1, attempt.failed_at | {worker}))
            return None
        return Failure(
            shard.index, shard.start, shard.stop, attempt.number, trouble.reason, trouble.traceback, trouble.host
        )
