"""What Ray's dashboard and Prometheus are told of a run while it goes on."""

from __future__ import annotations

import time
from collections import deque

from ray.util.metrics import Counter, Gauge

from sensitivity.commits import Commit, Failure

SECONDS = 60.0  # over which windows/s are counted


class Metrics:
    """`sensitivity_*`, by run: windows, shards and retries so far, windows/s over the last minute, workers' memory."""

    def __init__(self, run: str) -> None:
        by_run, by_worker = ("run",), ("run", "worker")
        self._run = {"run": run}
        self._windows = Counter("sensitivity_windows", "windows committed", by_run)
        self._shards = Counter("sensitivity_shards_done", "shards committed", by_run)
        self._retries = Counter("sensitivity_retries", "tries at shards that failed", by_run)
        self._rate = Gauge("sensitivity_windows_per_second", "windows committed a second, last minute", by_run)
        self._memory = Gauge("sensitivity_worker_peak_memory_bytes", "peak resident memory of a worker", by_worker)
        self._recent: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        self._recent_windows = 0

    def hear(self, outcome: Commit | Failure) -> None:
        if isinstance(outcome, Failure):
            self._retries.inc(1, self._run)
            return
        windows = outcome.stop - outcome.start
        self._windows.inc(windows, self._run)
        self._shards.inc(1, self._run)
        self._rate.set(self._rate_with(windows), self._run)
        worker = f"{outcome.host}:{outcome.pid}"
        self._memory.set(outcome.peak_memory, {**self._run, "worker": worker})

    def _rate_with(self, windows: int) -> float:
        now = time.monotonic()
        self._recent.append((now, windows))
        self._recent_windows += windows
        while len(self._recent) > 2 and now - self._recent[0][0] > SECONDS:
            self._recent.popleft()
            self._recent_windows -= self._recent[0][1]
        return self._recent_windows / max(now - self._recent[0][0], 1e-9)
