"""Where a run's files are, whatever it is: a folder here, or a part of an object store elsewhere.

Files are known by their names below it (`commits/00000012.json`). What is written is whole or not there at all, and
survives a power cut once the call is back.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, TypeVar

from .patience import Arguments, Found, patiently

if TYPE_CHECKING:
    from zarr.abc.store import Store

Item = TypeVar("Item")


class Place(ABC):
    """What is read and written is tried again while the store fails for a while; `Patience` says what is raised then.

    Under a guard, whatever would change something calls it first, each time that it is tried; it raises where the place
    may not be changed.
    """

    patient = True
    guard: Callable[[], None] | None = None
    at_once = 1  # calls that are worth making side by side

    def once(self) -> Self:
        """The same place without patience: every call is tried once."""
        other = copy.copy(self)
        other.patient = False
        return other

    def guarded(self, guard: Callable[[], None]) -> Self:
        """The same place under a guard."""
        other = copy.copy(self)
        other.guard = guard
        return other

    def _try(self, act: Callable[Arguments, Found], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Found:
        return patiently(self, act, *args, **kwargs) if self.patient else act(*args, **kwargs)

    def _change(self, act: Callable[Arguments, Found], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Found:
        def changing() -> Found:
            if self.guard is not None:
                self.guard()
            return act(*args, **kwargs)

        return self._try(changing)

    def read(self, name: str) -> bytes | None:
        """The content of a file, or None where there is none."""
        return self._try(self._read, name)

    def write(self, name: str, content: bytes) -> None:
        """Put a file in its place: readers see the old one or the new one, never a part."""
        self._change(self._write, name, content)

    def create(self, name: str, content: bytes) -> bool:
        """The same for a file that must not be there; of several who try at once one succeeds."""
        return self._change(self._create, name, content)

    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""
        self._change(self._delete, name)

    def size(self, name: str) -> int | None:
        """Bytes of a file, or None where there is none."""
        return self._try(self._size, name)

    def version(self, name: str) -> str | None:
        """What changes with a file's content; None where there is no file."""
        return self._try(self._version, name)

    def names(self, folder: str = "") -> list[str]:
        """What is directly in a folder: files and folders, in no order; none where there is no folder."""
        return self._try(self._names, folder)

    def versions(self, folder: str, names: Iterable[str] | None = None) -> dict[str, str]:
        """What changes with the content of each file that is directly in a folder, by its name: one listing.

        names: of these alone, where they are there; to be near each other in the order of names.
        """
        return self._try(self._versions, folder, None if names is None else sorted(names))

    def files(self) -> list[str]:
        """Every file at or below this place."""
        return self._try(self._files)

    def make_durable(self, names: Iterable[str]) -> None:
        """Wait until files that others wrote here, Zarr for one, will survive a power cut.

        Not tried again: what a disk could not write it may call written when it is asked once more. Raises `OSError`.
        """
        self._make_durable(list(names))

    def discard(self, names: Iterable[str]) -> None:
        """Remove files and folders that are directly here, one after another."""
        for name in names:
            self._change(self._discard, name)

    def leave(self) -> None:  # noqa: B027
        """Remove the folders that this object made, where nothing is in them."""

    def sweep(self) -> None:  # noqa: B027
        """Remove what writers that were killed left half-written, where a store shows such files at all."""

    def make_folder(self, name: str) -> None:  # noqa: B027
        """Make a folder to last, where a store has any."""

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        self.write(name, json.dumps(content, indent=1).encode())

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The object in a file, or None where it is absent, torn or something else."""
        try:
            content = json.loads(self.read(name) or b"")
        except (ValueError, RecursionError):
            return None
        return content if isinstance(content, dict) else None

    def each(self, act: Callable[[Item], Found], items: Iterable[Item]) -> Iterator[Found]:
        """`act` of every item, in order; side by side where answers come from far away."""
        if self.at_once == 1:
            yield from map(act, items)
            return
        left = iter(items)
        with ThreadPoolExecutor(self.at_once) as pool:
            asked = deque(pool.submit(act, item) for item in itertools.islice(left, 4 * self.at_once))
            while asked:
                yield asked.popleft().result()
                asked.extend(pool.submit(act, item) for item in itertools.islice(left, 1))

    @abstractmethod
    def zarr(self, name: str) -> Store:
        """The Zarr store at `name`, under the same guard."""

    @abstractmethod
    def local_copy(self, name: str) -> contextlib.AbstractContextManager[Path]:
        """A file of this machine with the content of `name`, to be read."""

    @abstractmethod
    def seekable(self, name: str) -> Path | IO[bytes]:
        """A file to be read in parts: of this machine, or as it was when it was opened."""

    def outside(self, names: Iterable[str]) -> str | None:
        """The first of these that is a way out of this place."""
        return None

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Bytes that can still be written; None where there is no limit that can be known."""

    @abstractmethod
    def _read(self, name: str) -> bytes | None: ...
    @abstractmethod
    def _write(self, name: str, content: bytes) -> None: ...
    @abstractmethod
    def _create(self, name: str, content: bytes) -> bool: ...
    @abstractmethod
    def _delete(self, name: str) -> None: ...
    @abstractmethod
    def _size(self, name: str) -> int | None: ...
    @abstractmethod
    def _version(self, name: str) -> str | None: ...
    @abstractmethod
    def _names(self, folder: str) -> list[str]: ...
    @abstractmethod
    def _versions(self, folder: str, names: list[str] | None) -> dict[str, str]: ...
    @abstractmethod
    def _files(self) -> list[str]: ...
    @abstractmethod
    def _make_durable(self, names: list[str]) -> None: ...
    @abstractmethod
    def _discard(self, name: str) -> None: ...
