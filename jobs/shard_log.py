"""One line a shard, as JSON on stderr, for whoever collects logs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from sensitivity.commits import Commit, Failure

Log = Callable[[Commit | Failure], None]


def shard_log(wanted: bool) -> Log:
    return _write if wanted else lambda outcome: None


def _write(outcome: Commit | Failure) -> None:
    print(json.dumps(fields(outcome)), file=sys.stderr, flush=True)


def fields(outcome: Commit | Failure) -> dict[str, Any]:
    """What a line says: seconds and windows/s of one shard, the worker's peak memory in bytes so far."""
    about = {"shard": outcome.shard, "first_window": outcome.start, "windows": outcome.stop - outcome.start}
    if isinstance(outcome, Failure):
        event = "given up" if outcome.given_up else "failed"
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "event": event,
            **about,
            "attempt": outcome.attempts,
            "worker": outcome.host,
            "reason": outcome.reason,
        }
    return {
        "time": datetime.fromtimestamp(outcome.finished, UTC).isoformat(timespec="milliseconds"),
        "event": "committed",
        **about,
        "attempt": outcome.attempt,
        "worker": f"{outcome.host}:{outcome.pid}",
        "seconds": round(outcome.seconds, 3),
        "windows_per_second": round(outcome.computed / max(outcome.seconds, 1e-9), 1),
        "skipped": outcome.skipped,
        "not_finite": outcome.not_finite,
        "peak_memory": outcome.peak_memory,
    }
