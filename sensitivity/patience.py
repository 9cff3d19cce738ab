"""A store that fails for a while is tried again, more and more slowly; then what fails is said once, in words."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import random
import time
from collections.abc import Awaitable, Callable
from typing import ClassVar, ParamSpec, TypeVar

PATIENCE = "SENSITIVITY_PATIENCE"
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
# What trying again cannot mend.
_LASTING = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
_SPOILED = {errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)}  # so says a disk of its own blocks
_TELL_SECONDS = 10.0

_log = logging.getLogger(__package__)
Arguments = ParamSpec("Arguments")
Found = TypeVar("Found")


class StoreFailed(OSError):
    """A store went on failing: nothing is wrong with what was to be stored, and trying again later may help."""


def seconds() -> float:
    """For how long a failing store is tried again."""
    try:
        return float(os.environ.get(PATIENCE, ""))
    except ValueError:
        return 120.0


class Patience:
    """For how long one call is borne with that fails: from its first failure on, with random pauses that double.

    where: the store, for messages.
    """

    _told: ClassVar[dict[str, float]] = {}  # by store, when its trouble was last spoken of

    def __init__(self, where: object) -> None:
        self._where, self._pause = where, FIRST_PAUSE
        self._began: float | None = None

    def pause(self, error: OSError) -> float:
        """Seconds to wait before the next try. Raises `StoreFailed` once patience ends, and what it cannot mend."""
        if isinstance(error, (StoreFailed, *_LASTING)):
            raise error
        now = time.monotonic()
        if self._began is None:
            self._began = now
            self._tell(error)
        left = self._began + seconds() - now
        if left <= 0:
            what = f"{reason(error)}: {error.filename}" if error.filename else reason(error)
            raise StoreFailed(f"{self._where} has failed for {now - self._began:.0f} s: {what}") from error
        wait = min(left, self._pause * random.uniform(0.5, 1.0))
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return wait

    def _tell(self, error: OSError) -> None:
        """Once for all who wait for the same store."""
        now, where = time.monotonic(), str(self._where)
        if now - self._told.get(where, -math.inf) > _TELL_SECONDS:
            self._told[where] = now
            _log.warning("%s fails (%s): trying again for %.0f s", where, reason(error), seconds())


def patiently(
    where: object, act: Callable[Arguments, Found], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Found:
    """`act(…)`, which may be done twice, tried again while it raises `OSError`; see `Patience` for what is raised."""
    patience = Patience(where)
    while True:
        try:
            return act(*args, **kwargs)
        except OSError as error:
            time.sleep(patience.pause(error))


async def awaited_patiently(where: object, act: Callable[[], Awaitable[Found]]) -> Found:
    """The same for what is awaited."""
    patience = Patience(where)
    while True:
        try:
            return await act()
        except OSError as error:
            await asyncio.sleep(patience.pause(error))


def is_damage(error: OSError) -> bool:
    """Whether an error tells of one file that a disk has spoiled, or that is none, and not of a store that is away or
    closed to us.
    """
    cause = error.__cause__ if isinstance(error, StoreFailed) else error
    return isinstance(cause, _LASTING) or getattr(cause, "errno", None) in _SPOILED


def reason(error: BaseException) -> str:
    """What is wrong, on one line."""
    return (getattr(error, "strerror", None) or str(error).strip() or type(error).__name__).partition("\n")[0][:300]
