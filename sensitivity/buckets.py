"""Object stores (`s3://`, `gs://`, `az://`) as places: atomic by nature, exclusive by conditional puts.

Credentials, region and endpoint come from the environment as everywhere (`AWS_ACCESS_KEY_ID`, `AWS_REGION`,
`AWS_ENDPOINT_URL`, …; a machine's own role), for S3 also from profiles where boto3 is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zarr.storage import ObjectStore as ZarrStore
from zarr.storage import WrapperStore

from .errors import Refused
from .patience import StoreFailed
from .places import Place

if TYPE_CHECKING:
    from obstore.store import ObjectStore
    from zarr.abc.store import ByteRequest, Store
    from zarr.core.buffer import Buffer, BufferPrototype

SCHEMES = ("s3://", "gs://", "az://")
_PART = 16 << 20
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
        """The address alone travels to workers, which have credentials of their own."""
        return {"url": self.url, "patient": self.patient}

    @cached_property
    def _store(self) -> ObjectStore:
        return _store_at(self.url)

    def zarr(self, name: str) -> Store:
        below = Bucket(f"{self.url}/{name}")
        below.patient = self.patient
        return _Careful(ZarrStore(below._store), below)

    @contextlib.contextmanager
    def local_copy(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / Path(name).name
            self._try(self._fetch, name, copy)
            yield copy

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
        import obstore

        with _said_by_the_store(), copy.open("wb") as file:
            for part in obstore.get(self._store, name).stream(min_chunk_size=_PART):
                file.write(part)

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

    def _size(self, name: str) -> int | None:
        import obstore

        try:
            with _said_by_the_store():
                return obstore.head(self._store, name)["size"]
        except FileNotFoundError:
            return None

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

    def version(self, name: str) -> str | None:
        import obstore

        try:
            with _said_by_the_store():
                found = obstore.head(self._store, name)
        except FileNotFoundError:
            return None
        return f"{found['e_tag']} {found['version']} {found['last_modified']} {found['size']}"

    def _discard(self, keep: str) -> None:
        import obstore

        names = [name for name in self._files() if not (keep and name.startswith(f"{keep}/"))]
        with _said_by_the_store():
            for start in range(0, len(names), 1000):
                obstore.delete(self._store, names[start : start + 1000])


class _Careful(WrapperStore[Any]):
    """A Zarr store that raises Python's own errors, and writes with patience."""

    def __init__(self, store: ZarrStore, bucket: Bucket) -> None:
        super().__init__(store)
        self._bucket = bucket

    def _with_store(self, store: ZarrStore) -> _Careful:
        return _Careful(store, self._bucket)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        with _said_by_the_store():
            return await self._store.get(key, prototype, byte_range)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        with _said_by_the_store():
            return await self._store.get_partial_values(prototype, key_ranges)

    async def exists(self, key: str) -> bool:
        with _said_by_the_store():
            return await self._store.exists(key)

    async def set(self, key: str, value: Buffer) -> None:
        await asyncio.to_thread(self._bucket._try, self._bucket._put, key, value.to_bytes())

    async def delete(self, key: str) -> None:
        with _said_by_the_store():
            await self._store.delete(key)


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
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    found["region"] = region or "us-east-1"
    if "AWS_ACCESS_KEY_ID" not in os.environ and _has_profile():
        with contextlib.suppress(ImportError):
            from obstore.auth.boto3 import Boto3CredentialProvider

            found["credential_provider"] = Boto3CredentialProvider()
    return found


def _has_profile() -> bool:
    file = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials"
    return "AWS_PROFILE" in os.environ or Path(file).expanduser().exists()
