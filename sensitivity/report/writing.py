"""A report written: its store read twice, one file."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from ..errors import Refused
from ..query.opening import dataset_of
from ..store import Run
from .answers import MEMORY, Answers, answers_of
from .page import GENERATOR, page
from .state import state_of

HEAD = 4096  # bytes in which a report says that it is one


def write(
    run: Run | str | Path,
    file: str | Path,
    *,
    memory: str | int = MEMORY,
    force: bool = False,
    align: str | None = None,
) -> Path:
    """Write the report of a run, whole or not, to an HTML file; its store is read twice.

    memory: what sums may take, in bytes or as "2GB"; what does not fit is left out, and the report says so. force:
    write over a file that is no report, too. align: what lags count back from, as `query.ask` has it. Raises `Refused`
    where there is no run, or another file in the way.
    """
    target = Path(file)
    require_free(target, force=force)
    state = state_of(Run.open(run))
    done = dataset_of(state.run, state.standing.done)  # what commits meanwhile is in neither
    answers = answers_of(done, memory, align) if state.coverage.computed else Answers()
    _replace(target.resolve(), page(state, answers).encode())  # what a link leads to
    return target


def require_free(file: Path, *, force: bool = False) -> None:
    """Refuse a file that a report cannot, or should not, be written to."""
    if not file.absolute().parent.is_dir():
        raise Refused("--output", given=file, allowed="a file in an existing directory", remedy="make the directory")
    if file.exists() and not file.is_file():
        what = "a directory" if file.is_dir() else "a device or a pipe"
        raise Refused("--output", given=file, allowed=f"a file: this is {what}", remedy="choose another name")
    if file.exists() and not force and not _is_report(file):
        raise Refused(
            "--output",
            given=f"{file}, a file that is no report",
            allowed="a path where nothing is yet, or an earlier report",
            remedy="choose another name, or write over it with --force",
        )


def _is_report(file: Path) -> bool:
    with file.open("rb") as content:
        return f'content="{GENERATOR} '.encode() in content.read(HEAD)


def _replace(file: Path, content: bytes) -> None:
    """Whole or not at all; with the rights that the file had, if there was one."""
    made = file.parent / f".{file.name[:50]}-{uuid.uuid4().hex[:8]}"
    try:
        with made.open("xb") as new:
            new.write(content)
        if file.exists():
            shutil.copymode(file, made)
        made.replace(file)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
