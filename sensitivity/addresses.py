"""From the path or URL that a user gives to the place that is there."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from .folders import Folder
from .places import Place

# What object stores want to know of us, by scheme: some of what the environment may say.
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY",
}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def scheme(path: str) -> str:
    """`"s3"` of `s3://bucket/run`; empty for a path of a file system."""
    found = _URL.match(path)
    return found[1].lower() if found else ""


def place_at(path: str | os.PathLike[str]) -> Place:
    """The folder at a path, or the part of an object store at a URL."""
    text = os.fspath(path)
    if not scheme(text):
        return Folder(Path(text).absolute())
    from .buckets import Bucket

    return Bucket(text)


def place_of(path: str) -> tuple[Place, str]:
    """The place that a file is in, and its name there."""
    folder, _, name = path.rstrip("/").rpartition("/")
    return place_at(folder or "/"), name


@contextlib.contextmanager
def local_folder(path: str) -> Iterator[Path]:
    """A folder of this machine with all files at a path or URL, to be read."""
    place = place_at(path)
    if isinstance(place, Folder):
        yield place.path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy_files(place, Folder(Path(folder)))
        yield Path(folder)


def copy_files(source: Place, target: Place, below: str = "") -> None:
    """Every file at a place, to below a folder of another."""
    for name in source.files():
        target.write(below + name, source.read(name) or b"")


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Whether a path or URL is one of the folders, or in one. By name alone: none of them need be here."""
    return any(f"{path.rstrip('/')}/".startswith(f"{folder.rstrip('/')}/") for folder in folders)
