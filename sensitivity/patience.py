"""A store that fails for a while is tried again, more and more slowly; then what fails is said once, in words."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable
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


def patiently(
    where: object, act: Callable[Arguments, Found], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Found:
    """`act(…)`, which may be done twice, tried again while it raises `OSError`, with random pauses that double.

    where: the store, for messages. Raises `StoreFailed` once patience ends.
    """
    began, pause = time.monotonic(), FIRST_PAUSE
    while True:
        try:
            return act(*args, **kwargs)
        except (StoreFailed, *_LASTING):
            raise
        except OSError as error:
            left = began + seconds() - time.monotonic()
            if left <= 0:
                raise StoreFailed(
                    f"{where} has failed for {time.monotonic() - began:.0f} s: {reason(error)}"
                ) from error
            if pause == FIRST_PAUSE:
                _log.warning("%s fails (%s): trying again for %.0f s", where, reason(error), left)
            time.sleep(min(left, pause * random.uniform(0.5, 1.0)))
            pause = min(2 * pause, LONGEST_PAUSE)


def reason(error: BaseException) -> str:
    """What is wrong, on one line."""
    return (getattr(error, "strerror", None) or str(error).strip() or type(error).__name__).partition("\n")[0][:300]
