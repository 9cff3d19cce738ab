"""BLAS in one thread where Dask's threads call it: threads of its own beside them cost far more than they save."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from threadpoolctl import ThreadpoolController


class OneThread:
    """The limit is the whole process's: the first to come sets it, the last to leave lifts it.

    It is set and lifted in a thread of its own: once the main thread has done so, OpenBLAS no longer listens to others.
    Where it does not listen, callers take turns.
    """

    def __init__(self) -> None:
        self._change, self._turn = threading.Lock(), threading.Lock()
        self._inside, self._heard = 0, True
        self._limit: Any = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._change:
            if not self._inside:
                _aside(self._set)
            self._inside += 1
        try:
            with nullcontext() if self._heard else self._turn:
                yield
        finally:
            with self._change:
                self._inside -= 1
                if not self._inside:
                    _aside(self._limit.restore_original_limits)

    def _set(self) -> None:
        self._limit = _controller().limit(limits=1, user_api="blas")
        self._heard = all(known["num_threads"] == 1 for known in _controller().select(user_api="blas").info())


@functools.cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


def _aside(act: Callable[[], Any]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


one_thread = OneThread()
