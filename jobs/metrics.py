"""What Ray's dashboard and Prometheus are told of a run while it goes on."""

from __future__ import annotations

import os
import string
import time
from collections import Counter as Count
from collections import deque
from urllib.parse import quote

from ray.util.metrics import Counter, Gauge

from sensitivity.commits import Commit, Failure

TELL_SECONDS = 1.0  # there may be thousands of shards a second
RATE_SECONDS = 60.0  # over which windows/s are counted


class Metrics:
    """`sensitivity_*`, by run: windows, shards and retries so far, windows/s over the last minute, workers' memory."""

    def __init__(self, run: str) -> None:
        self._tags = {"run": quote(os.fsencode(run), safe=string.printable)}  # Ray takes no tag but of ASCII
        self._counters = {
            "windows": Counter("sensitivity_windows", "windows committed", ("run",)),
            "shards": Counter("sensitivity_shards_done", "shards committed", ("run",)),
            "retries": Counter("sensitivity_retries", "tries at shards that failed", ("run",)),
        }
        self._rate = Gauge("sensitivity_windows_per_second", "windows committed a second, last minute", ("run",))
        self._memory = Gauge("sensitivity_worker_peak_memory_bytes", "peak resident memory", ("run", "worker"))
        self._new: Count[str] = Count()
        self._peaks: dict[str, int] = {}
        self._told: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def hear(self, outcome: Commit | Failure) -> None:
        if isinstance(outcome, Failure):
            self._new["retries"] += 1
        else:
            self._new["windows"] += outcome.stop - outcome.start
            self._new["shards"] += 1
            self._peaks[f"{outcome.host}:{outcome.pid}"] = outcome.peak_memory

    def tell_in_time(self) -> None:
        """`tell`, where it was not done just now."""
        if time.monotonic() - self._told[-1][0] > TELL_SECONDS:
            self.tell()

    def tell(self) -> None:
        """Pass on what was heard since."""
        now = time.monotonic()
        self._told.append((now, self._new["windows"]))
        while len(self._told) > 2 and now - self._told[0][0] > RATE_SECONDS:
            self._told.popleft()
        for name, count in self._new.items():
            self._counters[name].inc(count, self._tags)
        for worker, peak in self._peaks.items():
            self._memory.set(peak, {**self._tags, "worker": worker})
        began = self._told[0][0]
        windows = sum(count for _, count in self._told) - self._told[0][1]
        self._rate.set(windows / max(now - began, 1e-9), self._tags)
        self._new.clear()
        self._peaks.clear()
