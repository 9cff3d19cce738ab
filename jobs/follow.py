"""What a submitted job says, until it has ended, over a connection that may break."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import aiohttp

SILENT_SECONDS = 60.0  # of a connection, which may have broken unnoticed: a laptop has slept
AGAIN_SECONDS = 1.0
TOLD_SECONDS = 10.0
LOST_SECONDS = 600.0
BROKEN = (RuntimeError, OSError, aiohttp.ClientError)


class Lost(Exception):
    """The head does not answer any more, or does not know the job: what became of it is not known."""


def follow(client: Any, submission_id: str, show: Callable[[str], Any]) -> Any:
    """Show what the job says, once, and give Ray's details of it when it has ended.

    client: a JobSubmissionClient. Raises `Lost`.
    """
    log, heard, ended, told = _Log(client, submission_id, show), time.monotonic(), False, False
    while True:
        complete = asyncio.run(log.read())
        details = _details(client, submission_id)
        if details is None:
            silence = time.monotonic() - heard
            if silence > LOST_SECONDS:
                raise Lost(f"nothing has been heard of {submission_id} for {LOST_SECONDS:,.0f} s")
            if silence > TOLD_SECONDS and not told:
                show(f"the head does not answer; it is asked again for {LOST_SECONDS:,.0f} s\n")
                told = True
        else:
            heard, told = time.monotonic(), False
            if details.status.is_terminal() and (complete or ended):  # what it said may be lost with its node
                return details
            ended = details.status.is_terminal()
            if not log.has_begun and not ended:
                show(f"{details.message}\n")
        time.sleep(AGAIN_SECONDS)


def _details(client: Any, submission_id: str) -> Any:
    """None: the head cannot be reached."""
    try:
        return client.get_job_info(submission_id)
    except RuntimeError as error:
        if "status code 404" in str(error):
            raise Lost(f"the cluster does not know {submission_id} any more: its head has been replaced") from error
        return None
    except OSError:
        return None


class _Log:
    """Each connection tells it from its beginning."""

    def __init__(self, client: Any, submission_id: str, show: Callable[[str], Any]) -> None:
        self._client, self._id, self._show, self._shown = client, submission_id, show, 0

    @property
    def has_begun(self) -> bool:
        return self._shown > 0

    async def read(self) -> bool:
        """Show what is new of it; whether the head closed it, as it does when the job has ended."""
        position = 0
        try:
            async with contextlib.aclosing(self._client.tail_job_logs(self._id)) as parts:
                while (part := await asyncio.wait_for(anext(parts, None), SILENT_SECONDS)) is not None:
                    self._show(part[max(0, self._shown - position) :])
                    position += len(part)
                    self._shown = max(self._shown, position)
        except BROKEN:
            return False
        return True
