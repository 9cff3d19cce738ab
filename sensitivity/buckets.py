"""Object stores (`s3://`, `gs://`, `az://`) as places: atomic by nature, exclusive by conditional puts.

Credentials, region and endpoint come from the environment as everywhere (`AWS_ACCESS_KEY_ID`, `AWS_REGION`,
`AWS_ENDPOINT_URL`, …; a machine's own role), for S3 also from profiles where boto3 is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from zarr.storage import ObjectStore as ZarrStore
from zarr.storage import WrapperStore

from .errors import Refused
from .patience import Found, StoreFailed, awaited_patiently
from .places import Place

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore
    from zarr.abc.store import ByteRequest, Store
    from zarr.core.buffer import Buffer, BufferPrototype

SCHEMES = ("s3://", "gs://", "az://")
_PART = 64 << 20
_AHEAD = 1 << 17  # read of a file in parts, at least: its tables of contents are small and scattered
# The library's own patience: ours comes on top of it, and covers what it gives up at once.
_RETRIES: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=20)}
_CLIENT: Any = {"connect_timeout": "5s", "timeout": "300s", "read_timeout": "30s"}


class Bucket(Place):
    """What lies below a URL of an object store."""

    at_once = 32

    def __init__(self, url: str) -> None:
        if not url.startswith(SCHEMES):
            raise Refused(
                "path",
                given=url,
                allowed=f"a path, or a URL beginning with {', '.join(SCHEMES)}",
                remedy="copy it to one of these, or mount it and give the path",
            )
        if odd := [mark for mark in "#?%" if mark in url]:
            raise Refused(
                "path",
                given=f"{url}, with {' and '.join(odd)} in it",
                allowed="names without #, ? and %, which a URL means something else by",
                remedy="choose another name",
            )
        self.url = url.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def __getstate__(self) -> dict[str, Any]:
        """No client travels to workers, which have credentials of their own."""
        return {name: value for name, value in self.__dict__.items() if name != "_store"}

    def __copy__(self) -> Bucket:
        """Another face of the same client."""
        other = object.__new__(Bucket)
        other.__dict__.update(self.__dict__)
        return other

    @cached_property
    def _store(self) -> ObjectStore:
        return _store_at(self.url)

    def zarr(self, name: str) -> Store:
        below = Bucket(f"{self.url}/{name}")
        below.patient, below.guard = self.patient, self.guard
        return _Careful(ZarrStore(below._store), below)

    @contextlib.contextmanager
    def local_copy(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / Path(name).name
            self._fetch(name, copy)
            yield copy

    def seekable(self, name: str) -> IO[bytes]:
        return io.BufferedReader(_Parts(self, name, self._found(name)), _AHEAD)

    def free_bytes(self) -> int | None:
        return None

    def _read(self, name: str) -> bytes | None:
        import obstore

        try:
            with _said_by_the_store():
                return bytes(obstore.get(self._store, name).bytes())
        except FileNotFoundError:
            return None

    def _fetch(self, name: str, copy: Path) -> None:
        """Part by part, each with patience of its own, and all of one version."""
        found = self._found(name)
        with copy.open("wb") as file:
            for start in range(0, found["size"], _PART):
                stop = min(start + _PART, found["size"])
                file.write(self._try(self._part, name, start, stop, found["e_tag"]))

    def _found(self, name: str) -> ObjectMeta:
        found = self._try(self._head, name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "it is not there", f"{self.url}/{name}")
        return found

    def _part(self, name: str, start: int, stop: int, tag: str | None) -> bytes:
        import obstore

        options: Any = {"range": (start, stop)} | ({"if_match": tag} if tag else {})
        with _said_by_the_store():
            return bytes(obstore.get(self._store, name, options=options).bytes())

    def _write(self, name: str, content: bytes) -> None:
        import obstore

        with _said_by_the_store():
            obstore.put(self._store, name, content, use_multipart=False)
        if self._is_torn(name, content):
            raise OSError(f"{name} was not stored as it was sent")

    def _put(self, name: str, content: bytes) -> None:
        """The same for a large file, of which only the size is looked at."""
        import obstore

        with _said_by_the_store():
            obstore.put(self._store, name, content)
        if self._size(name) != len(content):
            raise OSError(f"{name} was not stored as it was sent")

    def _create(self, name: str, content: bytes) -> bool:
        """A put that is tried again may meet itself: what is there then is what was to be written."""
        import obstore

        try:
            with _said_by_the_store():
                obstore.put(self._store, name, content, mode="create", use_multipart=False)
        except FileExistsError:
            return self._read(name) == content
        if self._is_torn(name, content):
            self._delete(name)
            raise OSError(f"{name} was not stored as it was sent")
        return True

    def _is_torn(self, name: str, content: bytes) -> bool:
        """Small files are read back: not every store checks what it was sent. Another's file is no part of ours."""
        found = self._read(name)
        return found is None or (found != content and content.startswith(found))

    def _delete(self, name: str) -> None:
        import obstore

        with contextlib.suppress(FileNotFoundError), _said_by_the_store():
            obstore.delete(self._store, name)

    def _head(self, name: str) -> ObjectMeta | None:
        import obstore

        try:
            with _said_by_the_store():
                return obstore.head(self._store, name)
        except FileNotFoundError:
            return None

    def _size(self, name: str) -> int | None:
        found = self._head(name)
        return found["size"] if found else None

    def _names(self, folder: str) -> list[str]:
        import obstore

        with _said_by_the_store():
            found = obstore.list_with_delimiter(self._store, folder or None)
        paths = [entry["path"] for entry in found["objects"]] + list(found["common_prefixes"])
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def _files(self) -> list[str]:
        import obstore

        with _said_by_the_store():
            return [entry["path"] for batch in obstore.list(self._store) for entry in batch]

    def _make_durable(self, names: Iterable[str]) -> None:
        """What a store has acknowledged is durable."""

    def _version(self, name: str) -> str | None:
        found = self._head(name)
        return found and f"{found['e_tag']} {found['version']} {found['last_modified']} {found['size']}"

    def _versions(self, folder: str, names: list[str] | None) -> dict[str, str]:
        """A listing tells the same of a file each time, but not the same as asking for that file."""
        import obstore

        versions: dict[str, str] = {}
        wanted, last = (None, "") if names is None else (set(names), names[-1])
        before = f"{folder}/{names[0][:-1]}" if names else None
        with _said_by_the_store():
            for batch in obstore.list(self._store, f"{folder}/", offset=before):
                entries = {entry["path"].rpartition("/")[2]: entry for entry in batch}
                some = entries if wanted is None else entries.keys() & wanted
                versions |= {name: f"{entries[name]['e_tag']} {entries[name]['size']}" for name in some}
                if wanted is not None and max(entries, default="") >= last:
                    break
        return versions

    def _discard(self, name: str) -> None:
        import obstore

        self._delete(name)
        with _said_by_the_store():
            for batch in obstore.list(self._store, f"{name}/"):
                if self.guard is not None:  # each time: there may be many
                    self.guard()
                obstore.delete(self._store, [entry["path"] for entry in batch])


class _Careful(WrapperStore[Any]):
    """A Zarr store that raises Python's own errors, with the patience and the guard of a bucket."""

    def __init__(self, store: ZarrStore, bucket: Bucket) -> None:
        super().__init__(store)
        self._bucket = bucket

    def _with_store(self, store: ZarrStore) -> _Careful:
        return _Careful(store, self._bucket)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        return await self._awaited(lambda: self._store.get(key, prototype, byte_range))

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        wanted = list(key_ranges)
        return await self._awaited(lambda: self._store.get_partial_values(prototype, wanted))

    async def exists(self, key: str) -> bool:
        return await self._awaited(lambda: self._store.exists(key))

    async def set(self, key: str, value: Buffer) -> None:
        await asyncio.to_thread(self._bucket._change, self._bucket._put, key, value.to_bytes())

    async def delete(self, key: str) -> None:
        await asyncio.to_thread(self._bucket.delete, key)

    async def is_empty(self, prefix: str) -> bool:
        return not await asyncio.to_thread(self._bucket.names, prefix)

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        for name in await asyncio.to_thread(self._bucket.names, prefix):
            yield name

    async def _awaited(self, act: Callable[[], Awaitable[Found]]) -> Found:
        async def asked() -> Found:
            with _said_by_the_store():
                return await act()

        return await (awaited_patiently(self._bucket, asked) if self._bucket.patient else asked())


class _Parts(io.RawIOBase):
    """An object read by ranges, each with patience of its own, and all of one version."""

    def __init__(self, bucket: Bucket, name: str, found: ObjectMeta) -> None:
        self._bucket, self._name, self._found, self._at = bucket, name, found, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._found["size"]}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), self._found["size"])
        if stop <= self._at:
            return 0
        part = self._bucket._try(self._bucket._part, self._name, self._at, stop, self._found["e_tag"])
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


@contextlib.contextmanager
def _said_by_the_store() -> Iterator[None]:
    """obstore's errors as Python's own, in one line. To be denied access is nothing that passes."""
    from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError

    try:
        yield
    except AlreadyExistsError as error:
        raise FileExistsError(str(error).partition("\n")[0]) from error
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise StoreFailed(_gist(str(error))) from error
    except BaseError as error:
        raise OSError(_gist(str(error))) from error


def _gist(message: str) -> str:
    """Without the Rust structures below the first lines."""
    return message.partition("\n\nDebug source")[0].replace("\n", " ").strip()[:300]


def _store_at(url: str) -> ObjectStore:
    import obstore.store

    options: dict[str, Any] = {"client_options": dict(_CLIENT), "retry_config": _RETRIES}
    if url.startswith("s3://"):
        options |= _of_the_environment(options["client_options"])
    return obstore.store.from_url(url, **options)


def _of_the_environment(client: dict[str, Any]) -> dict[str, Any]:
    """What AWS' own tools read from the environment and obstore does not."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    found: dict[str, Any] = {}
    if endpoint:
        found["endpoint"] = endpoint
        if endpoint.startswith("http://"):
            client["allow_http"] = True
    if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        found["region"] = region
    if "AWS_ACCESS_KEY_ID" not in os.environ and _has_profile():
        with contextlib.suppress(ImportError):
            from obstore.auth.boto3 import Boto3CredentialProvider

            found["credential_provider"] = Boto3CredentialProvider()
    return found


def _has_profile() -> bool:
    file = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials"
    return "AWS_PROFILE" in os.environ or Path(file).expanduser().exists()
