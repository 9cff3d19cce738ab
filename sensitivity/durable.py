"""Small files that are whole or absent, and bytes that survive a power cut."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Wait until the file or directory at `path` is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(paths: Iterable[Path]) -> None:
    """Wait for files, then for the directories that name them."""
    directories = set()
    for path in paths:
        sync(path)
        directories.add(path.parent)
    for directory in directories:
        sync(directory)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write atomically and durably: readers see the old file or the new one, never a part."""
    scratch = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    with scratch.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
    sync(path.parent)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object at `path`, or None where it is absent, torn or something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
