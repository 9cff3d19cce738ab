"""A report written: its store read twice, one file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ..errors import Refused
from ..query import open_run
from ..store import Run
from .answers import MEMORY, Answers, answers_of
from .page import GENERATOR, page
from .state import state_of

HEAD = 4096  # bytes in which a report says that it is one


def write(run: Run | str | Path, file: str | Path, *, memory: str | int = MEMORY, force: bool = False) -> Path:
    """Write the report of a run, whole or not, to an HTML file; its store is read twice.

    memory: what sums may take, in bytes or as "2GB"; what does not fit is left out, and the report says so. force:
    write over a file that is no report, too. Raises `Refused` where there is no run, or another file in the way.
    """
    target = Path(file)
    require_free(target, force=force)
    state = state_of(Run.open(run))
    answers = answers_of(open_run(str(state.run.place)), memory) if state.coverage.computed else Answers()
    _replace(target, page(state, answers).encode())
    return target


def require_free(file: Path, *, force: bool = False) -> None:
    """Refuse a file that a report cannot, or should not, be written to."""
    if not file.absolute().parent.is_dir():
        raise Refused("--output", given=file, allowed="a file in an existing directory", remedy="make the directory")
    if file.is_dir():
        raise Refused("--output", given=file, allowed="a file: this is a directory", remedy="choose another name")
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
    """Whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=file.absolute().parent, prefix=f".{file.name[:50]}-", delete=False) as made:
        try:
            made.write(content)
            made.close()
            os.chmod(made.name, 0o666 & ~_umask())
            os.replace(made.name, file)
        except BaseException:
            os.unlink(made.name)
            raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
