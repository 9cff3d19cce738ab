"""A store that fails for a while is tried again, more and more slowly; then what fails is said once, in words."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

PATIENCE = "SENSITIVITY_PATIENCE"
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
# What trying again cannot mend.
_LASTING = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)

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
            _log.warning("%s fails (%s): trying again for %.0f s", self._where, reason(error), seconds())
        left = self._began + seconds() - now
        if left <= 0:
            raise StoreFailed(f"{self._where} has failed for {now - self._began:.0f} s: {reason(error)}") from error
        wait = min(left, self._pause * random.uniform(0.5, 1.0))
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return wait


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


def reason(error: BaseException) -> str:
    """What is wrong, on one line."""
    return (getattr(error, "strerror", None) or str(error).strip() or type(error).__name__).partition("\n")[0][:300]
