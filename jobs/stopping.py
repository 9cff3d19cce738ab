"""How a run is asked to stop: Ctrl-C at once, SIGTERM (a machine that is taken away) with time to finish."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

GRACE_SECONDS = 20.0  # Kubernetes, Slurm and preemptible machines kill after 30 by default


class Stop:
    """Turns signals into a wish, `draining`, while shards are computed, and into `KeyboardInterrupt` otherwise.

    While draining, shards in hand may finish for `grace` seconds, or until a second signal.
    """

    def __init__(self, grace: float = GRACE_SECONDS) -> None:
        self.draining = False
        self._grace, self._at_work = grace, False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Hear signals; in another thread than the main one nothing is heard, as Python has it."""
        try:
            before = {name: signal.signal(name, self._hear) for name in (signal.SIGTERM, signal.SIGALRM)}
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for name, handler in before.items():
                signal.signal(name, handler)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Shards are computed within; to be entered after Ray has started, which takes SIGTERM too."""
        with self.listening():
            self._at_work = True
            try:
                yield
            finally:
                self._at_work = False

    def _hear(self, *_: Any) -> None:
        if not self._at_work or self.draining:
            raise KeyboardInterrupt
        self.draining = True
        signal.setitimer(signal.ITIMER_REAL, max(self._grace, 1e-3))
