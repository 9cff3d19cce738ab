"""Results on their way to the store while the next are computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, ParamSpec, Protocol, TypeVar

Arguments = ParamSpec("Arguments")
Found = TypeVar("Found")


class GivenUp(RuntimeError):
    """Somebody else writes this shard."""


class Gate:
    """Whether a shard's results may be written; asked before each chunk and the record.

    Of two workers that compute one shard only one is let through, for what they write may be rounded otherwise. That
    holds while both live and answer; of one that was taken for dead, `commits.commit` sorts out what it still writes.
    held: nothing is written until `let`.
    """

    def __init__(self, *, held: bool = False) -> None:
        self._change = threading.Condition()
        self._held, self._closed, self._inside, self._reached, self._done = held, False, False, False, False
        self.attempt: int | None = None

    @contextmanager
    def passed(self, *, last: bool = False) -> Iterator[None]:
        """Write within. Waits while held; raises `GivenUp` once closed. last: nothing is left to be written then."""
        with self._change:
            self._reached = True
            self._change.notify_all()
            self._change.wait_for(lambda: self._closed or not self._held)
            if self._closed:
                raise GivenUp("another worker has this shard")
            self._inside = True
        try:
            yield
            self._done = last
        finally:
            with self._change:
                self._inside = False
                self._change.notify_all()

    def let(self, attempt: int | None = None) -> None:
        """attempt: as which it counts, if not as the one that it was begun as."""
        with self._change:
            self._held, self.attempt = False, attempt
            self._change.notify_all()

    def close(self, seconds: float | None = None) -> bool | None:
        """Let nothing more through. False: all had passed already; None: something is still being written after so
        many seconds, and it may be the last.
        """
        with self._change:
            self._closed = True
            self._change.notify_all()
            if not self._change.wait_for(lambda: not self._inside, seconds):
                return None
            return not self._done

    @property
    def is_closed(self) -> bool:
        return self._closed

    def reached(self, seconds: float) -> bool:
        """Wait for so long until there is something to be written."""
        with self._change:
            return self._change.wait_for(lambda: self._reached, seconds)


class Writer(Protocol):
    def hand_over(
        self, act: Callable[Arguments, Found], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Found]: ...

    def hand_after(
        self, act: Callable[Arguments, Found], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Found]: ...


class AtOnce:
    """Writes what is handed over before anything else happens."""

    def hand_over(
        self, act: Callable[Arguments, Found], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Found]:
        future: Future[Found] = Future()
        try:
            future.set_result(act(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    hand_after = hand_over


class InBackground:
    """Writes in a thread, in order: whoever hands something over waits until what was handed over before is written.

    So one thing is written while one more is made, and memory is known.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "writing")
        self._last: Future[Any] | None = None

    def hand_over(
        self, act: Callable[Arguments, Found], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Found]:
        if self._last is not None:
            wait([self._last])
        return self.hand_after(act, *args, **kwargs)

    def hand_after(
        self, act: Callable[Arguments, Found], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Found]:
        """The same for something small that belongs to what was handed over before: nobody waits."""
        future = self._thread.submit(act, *args, **kwargs)
        self._last = future
        return future
