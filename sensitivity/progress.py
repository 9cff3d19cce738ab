"""How far a run is: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

SECONDS_BETWEEN_LINES = 5.0
LONG_SECONDS = 5.0
Advance = Callable[[int, float], None]


@contextmanager
def progress(total: int, done: int, what: str = "windows", *, quiet: bool = False) -> Iterator[Advance]:
    """Show progress over `total` windows, `done` of them from earlier. quiet: show nothing.

    Yields `advance(count, started)`: so many more, work on which began at `started` seconds since 1970.
    """
    if quiet:
        yield lambda count, started: None
        return
    with (_bar if sys.stderr.isatty() else _lines)(total, done, what) as advance:
        yield advance


@contextmanager
def progress_of_long(total: int, what: str = "windows", *, warm: bool = True) -> Iterator[Callable[[int], None]]:
    """Show progress of work in this process once what is left will take longer than `LONG_SECONDS`, as its rate so far
    tells. Yields `moved(count)`: so many more. warm: its first part is as fast as others; else it is not timed.
    """
    started, done = time.time() if warm else None, 0
    advance: Advance | None = None
    with ExitStack() as shown:

        def moved(count: int) -> None:
            nonlocal started, done, advance
            done += count
            if started is None:
                started = time.time()
            elif advance is not None:
                advance(count, started)
            elif (time.time() - started) * (total / done - 1) > LONG_SECONDS:
                advance = shown.enter_context(progress(total, 0, what))
                advance(done, started)

        yield moved


@contextmanager
def _bar(total: int, done: int, what: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    clock = _Clock(done)
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total, completed=done, rate="starting")

        def advance(count: int, started: float) -> None:
            clock.add(count, started)
            bar.update(task, advance=count, rate=f"{clock.rate:,.0f} {what}/s")

        yield advance


@contextmanager
def _lines(total: int, done: int, what: str) -> Iterator[Advance]:
    clock = _Clock(done)
    said = time.monotonic()

    def advance(count: int, started: float) -> None:
        nonlocal said
        clock.add(count, started)
        now = time.monotonic()
        if now - said >= SECONDS_BETWEEN_LINES or clock.done >= total:
            said = now
            left = (total - clock.done) / clock.rate if clock.rate else float("inf")
            print(
                f"{clock.done:,} of {total:,} {what}, {clock.rate:,.0f} {what}/s, {duration(left)} left",
                file=sys.stderr,
            )

    yield advance


class _Clock:
    """Counts since the first work began: starting workers up is not working slowly."""

    def __init__(self, done: int) -> None:
        self.done, self._counted = done, 0
        self._started = float("inf")

    def add(self, count: int, started: float) -> None:
        self.done += count
        self._counted += count
        self._started = min(self._started, started)

    @property
    def rate(self) -> float:
        return self._counted / max(time.time() - self._started, 1e-9)


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
