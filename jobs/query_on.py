"""Where queries are computed: on threads of this process, on a Dask cluster by its address, or on Ray."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

import dask
import dask.threaded

from sensitivity.errors import Refused

CONNECT_SECONDS, ANSWER_SECONDS = 5, 10
THREADS = "threads"
ALLOWED = (
    "threads, a Dask scheduler such as tcp://10.0.0.5:8786, ray for the cluster of this machine, ray:10.0.0.5:6379"
)
INSTALL = "pip install 'sensitivity-jobs[distributed]'"


@contextmanager
def on(where: str) -> Iterator[None]:
    """What Dask computes inside is computed there. Raises `Refused` for an address where nothing answers."""
    with ExitStack() as stack:
        if where == THREADS:
            scheduler: Any = dask.threaded.get  # by its name, Dask would import distributed first
        elif where.partition(":")[0] == "ray":
            scheduler = _ray(where, stack)
        elif "://" in where:
            scheduler = _distributed(where, stack)
        else:
            raise Refused("--on", given=where, allowed=ALLOWED, remedy="leave it out for threads")
        stack.enter_context(dask.config.set(scheduler=scheduler))
        yield


def _ray(where: str, stack: ExitStack) -> Any:
    from .ray_session import session
    from .ray_tasks import get

    address = where if where.startswith("ray://") else where.partition(":")[2] or "auto"
    try:
        stack.enter_context(session(address))
    except Refused as refusal:
        remedy = "check it with `ray status --address ADDRESS`, or leave it out for threads"
        raise Refused("--on", given=refusal.given, allowed=refusal.allowed, remedy=remedy) from refusal
    return get


def _distributed(where: str, stack: ExitStack) -> Any:
    try:
        from distributed import Client
    except ImportError as error:
        given = f"{where}, and distributed is not installed"
        raise Refused("--on", given=given, allowed="threads, or ray", remedy=INSTALL) from error
    try:
        client = _within(ANSWER_SECONDS, lambda: Client(where, timeout=CONNECT_SECONDS, set_as_default=False))
    except (OSError, ValueError) as error:
        given = f"{where} ({' '.join(str(error).split())})"
        allowed = "the address of a Dask scheduler that answers, such as tcp://10.0.0.5:8786"
        remedy = "take the address that the scheduler says when it starts, or leave it out for threads"
        raise Refused("--on", given=given, allowed=allowed, remedy=remedy) from error
    stack.enter_context(client)
    if not client.nthreads():
        print(f"the Dask cluster {where} has no workers yet: the query waits for them", file=sys.stderr)
    stack.enter_context(_same_here_and_there(where))
    return client


def _within(seconds: float, act: Callable[[], Any]) -> Any:
    """Dask waits without end for the first word of a server that is no scheduler, such as a dashboard."""
    answer: Future[Any] = Future()

    def acting() -> None:
        try:
            answer.set_result(act())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=acting, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no answer of a Dask scheduler within {seconds:g} s") from error


@contextmanager
def _same_here_and_there(where: str) -> Iterator[None]:
    """What the cluster cannot read of a graph is no damage of the store."""
    try:
        yield
    except RuntimeError as error:
        if "deserializ" not in str(error):
            raise
        raise Refused(
            "--on",
            given=f"{where}, which cannot read the query's tasks ({error.__cause__ or error})",
            allowed="a Dask cluster whose scheduler and workers have this library, in the same version",
            remedy="install it there too",
        ) from error
