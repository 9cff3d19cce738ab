"""Folders of a file system as places: files are written beside their name, made durable and then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import stat
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from .patience import reason
from .places import Place

if TYPE_CHECKING:
    from zarr.abc.store import Store

# Half-written files: our own, and Zarr's.
_UNFINISHED = re.compile(r"\..+\.\d+\.[0-9a-f]{8}\.tmp|.+\.[0-9a-f]{32}\.partial")
SYNCS_AT_ONCE = 8
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Folder(Place):
    """A folder of a file system; made when something is first written there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made: Path | None = None  # the uppermost folder of ours
        self._named: set[Path] = set()  # folders whose folders are there to last

    def __str__(self) -> str:
        return str(self.path)

    def zarr(self, name: str) -> Store:
        from zarr.storage import LocalStore

        from .guarded import Guarded

        store = LocalStore(self.path / name)
        return store if self.guard is None else Guarded(store, self.guard)

    @contextlib.contextmanager
    def local_copy(self, name: str) -> Iterator[Path]:
        yield self.path / name

    def seekable(self, name: str) -> Path:
        return self.path / name

    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self._existing()).free

    def sweep(self) -> None:
        for name in self._try(self._unfinished):
            self.delete(name)

    def _unfinished(self) -> list[str]:
        found = []
        for folder, _, files in os.walk(self.path):
            below = Path(folder).relative_to(self.path).as_posix()
            if below != "lease":  # others may be about to ask for that
                found += [f"{below}/{file}" for file in files if is_unfinished(file)]
        return found

    def make_folder(self, name: str) -> None:
        self._change(self._make, self.path / name)

    def outside(self, names: Iterable[str]) -> str | None:
        here = self.path.resolve()
        links = (name for name in names if (self.path / name).is_symlink())
        return next((name for name in links if not (self.path / name).resolve().is_relative_to(here)), None)

    def blocked(self) -> str | None:
        """Why no folder can be made or written here, in words; None where it can."""
        existing = self._existing()
        if not existing.is_dir():
            return f"{existing} is a file"
        try:  # rights alone do not tell, of a network's file system or a kernel's
            tempfile.TemporaryFile(dir=existing).close()
        except OSError as error:
            return f"{existing} is not writable ({reason(error)})"
        return None

    def _existing(self) -> Path:
        return next(folder for folder in (self.path, *self.path.parents) if folder.exists())

    def _read(self, name: str) -> bytes | None:
        path = self.path / name
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
                raise IsADirectoryError(errno.EISDIR, "it is not a file", str(path))
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _write(self, name: str, content: bytes) -> None:
        with self._scratch(name, content) as scratch:
            try:
                os.replace(scratch, self.path / name)
            except FileNotFoundError:  # over NFS, a renaming that was done may be done again
                if self._read(name) != content:
                    raise

    def _create(self, name: str, content: bytes) -> bool:
        with self._scratch(name, content) as scratch:
            try:
                os.link(scratch, self.path / name)
            except FileExistsError:
                return self._read(name) == content  # ours, if we were not told the first time
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return self._create_in_place(scratch, name, content)
        return True

    def _create_in_place(self, scratch: Path, name: str, content: bytes) -> bool:
        """On a file system without hard links; a crash here leaves an empty file."""
        try:
            open(self.path / name, "xb").close()
        except FileExistsError:
            return self._read(name) == content
        os.replace(scratch, self.path / name)
        return True

    @contextlib.contextmanager
    def _scratch(self, name: str, content: bytes) -> Iterator[Path]:
        """A durable file with that content beside `name`, whose folder is made durable in the end."""
        path = self.path / name
        self._make(path.parent)
        scratch = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            with scratch.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            yield scratch
        finally:
            scratch.unlink(missing_ok=True)
        sync(path.parent)

    def _make(self, folder: Path) -> None:
        absent = [above for above in (folder, *folder.parents) if not above.exists()]
        if absent and self.path.is_relative_to(absent[-1]):
            self._made = self._made or absent[-1]
        folder.mkdir(parents=True, exist_ok=True)
        for made in absent:
            sync(made.parent)

    def _version(self, name: str) -> str | None:
        try:
            found = (self.path / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _version_of(found)

    def _versions(self, folder: str, names: list[str] | None) -> dict[str, str]:
        if names is not None:
            known = ((name, self._version(f"{folder}/{name}")) for name in names)
            return {name: version for name, version in known if version is not None}
        found = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path / folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # it went meanwhile, or is a link to nothing
                    found[entry.name] = _version_of(entry.stat())
        return found

    def _delete(self, name: str) -> None:
        path = self.path / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        if path.parent.exists():
            sync(path.parent)

    def _size(self, name: str) -> int | None:
        try:
            return (self.path / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _names(self, folder: str) -> list[str]:
        try:
            return os.listdir(self.path / folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _files(self) -> list[str]:
        found = []
        for folder, _, files in os.walk(self.path):
            below = Path(folder).relative_to(self.path)
            found += [(below / file).as_posix() for file in files]
        return found

    def _make_durable(self, names: list[str]) -> None:
        """Files, the folders that name them, and once those that name these: a disk takes them together."""
        paths = [self.path / name for name in names]
        beside = {path.parent for path in paths}
        above = {folder for path in paths for folder in path.parents if folder.is_relative_to(self.path)}
        new = above - beside - self._named
        with ThreadPoolExecutor(SYNCS_AT_ONCE) as pool:
            list(pool.map(sync, [*paths, *beside, *new]))
        self._named |= new

    def _discard(self, name: str) -> None:
        self._delete(name)

    def leave(self) -> None:
        """The folder itself stays if it was there before: it may be a mount point."""
        for folder in (self.path, *self.path.parents):
            if self._made is None or not folder.is_relative_to(self._made):
                break
            with contextlib.suppress(OSError):  # others may have put something there since
                folder.rmdir()


def _version_of(found: os.stat_result) -> str:
    return f"{found.st_mtime_ns} {found.st_size}"


def is_unfinished(name: str) -> bool:
    """Whether a file of that name is one that was being written, here or by Zarr."""
    return _UNFINISHED.fullmatch(name.rpartition("/")[2]) is not None


def sync(path: Path) -> None:
    """Wait until the file or folder at `path` is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
