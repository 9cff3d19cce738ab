"""Shards written, committed and listed.

A shard is done when, and only when, its commit record exists and agrees with the run. The order is what makes
that true: chunks written, chunks on the disk, record created whole, record on the disk. Of two records of a shard the
first stands.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import zarr
from pydantic import TypeAdapter, ValidationError
from zarr.core.buffer import Buffer
from zarr.storage import WrapperStore

from .checksums import SEAL, checksum, seal
from .patience import StoreFailed, is_damage, patiently, reason
from .plan import Shard
from .store import COMMITS, FAILURES, RESULTS, Run
from .variables import Variable


@dataclass(frozen=True)
class Commit:
    """A shard that is done: windows `[start, stop)`, CRC-32C of every stored chunk, and how it was computed.

    seconds: from reading the series to the chunks being on the disk. started, finished: seconds since 1970.
    peak_memory: the worker's peak resident bytes so far; projected_memory: what was projected. not_finite:
    derivatives that are NaN or infinite in computed windows. why: the setting was chosen; trials are in tuning.json.
    token: the lease's, under which it was computed; 0: under none.
    """

    shard: int
    start: int
    stop: int
    job: str
    chunks: dict[str, str]
    computed: int
    skipped: int
    not_finite: int
    attempt: int
    host: str
    pid: int
    started: float
    finished: float
    peak_memory: int
    setting: dict[str, Any]
    projected_memory: int = 0
    why: str = ""
    token: int = 0

    @property
    def seconds(self) -> float:
        return self.finished - self.started


@dataclass(frozen=True)
class Failure:
    """A shard that failed `attempts` times so far, with the last one's reason and traceback.

    given_up: it is tried again only when that is asked for. raised, deaths: how its tries ended since then, in an error
    or with the worker.
    """

    shard: int
    start: int
    stop: int
    attempts: int
    reason: str
    traceback: str
    host: str
    given_up: bool = True
    raised: int = 0
    deaths: int = 0


SUM_BYTES = 4
_NAME = re.compile(r"[0-9]{8,}\.json")
_COMMIT, _FAILURE = TypeAdapter(Commit), TypeAdapter(Failure)


class _Summed(WrapperStore[Any]):
    """A store that knows the CRC-32C that each chunk ended with when it was last sent."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.sent: dict[str, str] = {}

    async def set(self, key: str, value: Buffer) -> None:
        self.sent[key] = _end(value[-SUM_BYTES:].to_bytes())
        await self._store.set(key, value)


class Results:
    """The arrays of a run's store, open for writing shards."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._store = _Summed(run.place.once().zarr(RESULTS))
        self._arrays = patiently(run.place, self._open)

    def _open(self) -> dict[str, Any]:
        # An all-NaN chunk is written like any other: a committed chunk that is absent is then always damage.
        with zarr.config.set({"array.write_empty_chunks": True}):
            group = zarr.open_group(self._store, mode="r+")
            return {variable.name: group[variable.name] for variable in self.run.variables}

    def write_chunks(self, start: int, stop: int, values: np.ndarray) -> None:
        """Write windows `[start, stop)` of the run's product, `time` first: whole chunks, no others."""
        layout = self.run.layout
        size = layout.chunk_windows
        if start % size or (stop % size and stop != layout.windows):
            raise ValueError(
                f"windows [{start}, {stop}) are not whole chunks of {size} windows: two writers would share a chunk "
                "and one would lose its part; write from one chunk border to another"
            )
        self._write(self.run.variables[0].name, start, stop, values)

    def write_beside(self, shard: Shard, values: Mapping[str, np.ndarray]) -> None:
        """Write the shard's other variables, `time` first, `prediction` among them: exactly one chunk each."""
        for name, array in values.items():
            self._write(name, shard.start, shard.stop, array)

    def _write(self, name: str, start: int, stop: int, values: np.ndarray) -> None:
        patiently(self.run.place, self._arrays[name].__setitem__, slice(start, stop), values)

    def make_durable(self, shard: Shard) -> dict[str, str]:
        """Wait until the shard's chunks are on the disk; their CRC-32C by chunk key, as hexadecimal.

        Raises `StoreFailed` where the disk says that they are not: they must be written again.
        """
        keys = list(chunk_keys(self.run, shard))
        try:
            self.run.place.make_durable(f"{RESULTS}/{key}" for key in keys)
        except OSError as error:
            raise StoreFailed(f"{self.run.place} could not keep shard {shard.index}: {reason(error)}") from error
        return {key: self._store.sent.pop(key) for key in keys}


def chunk_keys(run: Run, shard: Shard) -> Iterator[str]:
    """The keys in `results.zarr` of every chunk that belongs to the shard."""
    layout, (product, *others) = run.layout, run.variables
    for start, _ in layout.chunks(shard):
        yield from product.keys(start // layout.chunk_windows, layout.chunk_steps)
    for variable in others:
        yield from variable.keys(shard.index, variable.cut_size)


class Chunks:
    """Which chunks were there when the store was listed."""

    def __init__(self, run: Run) -> None:
        layout, (product, *others) = run.layout, run.variables
        self._layout = layout
        self._product = _there(run, product, -(-layout.windows // layout.chunk_windows), layout.chunk_steps)
        self._others = [_there(run, variable, layout.shard_count, variable.cut_size) for variable in others]

    def hold(self, first: int, stop: int) -> bool:
        """Whether every chunk of shards `[first, stop)` was there."""
        size, chunk = self._layout.shard_windows, self._layout.chunk_windows
        chunks = slice(first * size // chunk, -(-min(stop * size, self._layout.windows) // chunk))
        return bool(self._product[chunks].all() and all(other[first:stop].all() for other in self._others))


def _there(run: Run, variable: Variable, count: int, length: int) -> np.ndarray:
    """Which of a variable's chunks a listing names: bool `(chunk along time)`.

    length: of a chunk of the dim that it is cut along.
    """
    names, parts = set(run.place.names(f"{RESULTS}/{variable.name}")), range(-(-variable.cut_size // length))
    return np.fromiter((all(variable.key(i, part) in names for part in parts) for i in range(count)), bool, count)


def chunk_checksum(chunk: bytes) -> str | None:
    """The CRC-32C that a chunk ends with (little endian, as Zarr's codec writes it), or None where it is not that of
    the bytes before.

    Never the checksum of all of it: together with their own CRC any bytes have the same.
    """
    found = checksum(chunk[:-SUM_BYTES])
    return found if _end(chunk) == found else None


def _end(chunk: bytes) -> str:
    return chunk[-SUM_BYTES:][::-1].hex()


# ---- records ---------------------------------------------------------------------------------------


def commit(run: Run, record: Commit) -> Commit:
    """Make the shard count as done, and forget its earlier failures; the record that stands.

    Of two workers that computed it, one of them taken for dead, the first's stands; if they round differently, that of
    the one whose chunks are there. Raises `StoreFailed`, and the shard is missing, where they are of both.
    """
    name, content = _name(COMMITS, record.shard), _sealed(record)
    if not run.place.create(name, content):
        earlier = read_commit(run, run.layout.shard(record.shard))
        if earlier is not None and _is_stored(run, earlier):
            return earlier
        if earlier is not None and not _is_stored(run, record):
            run.place.delete(name)
            raise StoreFailed(f"{run.place}: two workers wrote shard {record.shard} at once: it is missing again")
        run.place.write(name, content)
    if record.attempt > 1:
        run.place.delete(_name(FAILURES, record.shard))
    return record


def _is_stored(run: Run, record: Commit) -> bool:
    stored = (run.place.read(f"{RESULTS}/{key}") for key in record.chunks)
    return [chunk_checksum(chunk or b"") for chunk in stored] == list(record.chunks.values())


def record_failure(run: Run, failure: Failure) -> None:
    run.place.write(_name(FAILURES, failure.shard), _FAILURE.dump_json(failure, indent=1))


def read_commit(run: Run, shard: Shard) -> Commit | None:
    """The shard's commit record, or None where there is none that agrees with the run and its chunks."""
    found = read_record(run, shard)
    return found if isinstance(found, Commit) else None


@dataclass(frozen=True)
class Odd:
    """A commit record that does not count, and why."""

    shard: int
    file: str
    why: str

    def __str__(self) -> str:
        return f"shard {self.shard} counts as missing: {self.file}: {self.why}"


def each_record(run: Run, chunks: Chunks | None = None, shards: Iterable[int] | None = None) -> Iterator[Commit | Odd]:
    """Commit records in order, one small file read a shard: every one that is listed, or those of some shards.

    chunks: those that were there; a record of which one is gone does not count. None: they are not looked for.
    """

    def read(index: int) -> Commit | Odd | None:
        is_whole = chunks is None or chunks.hold(index, index + 1)
        return read_record(run, run.layout.shard(index), with_chunks=not is_whole)

    listed = _listed(run, COMMITS) if shards is None else shards
    yield from (found for found in run.place.each(read, listed) if found is not None)


def read_commits(run: Run) -> dict[int, Commit]:
    """Every commit record that counts, by shard."""
    return {record.shard: record for record in each_record(run, Chunks(run)) if isinstance(record, Commit)}


def each_failure(run: Run) -> Iterator[Failure]:
    """How shards failed, in order; torn records are passed over. Of shards that are done since, one may be left."""
    found = run.place.each(functools.partial(_read_failure, run), _listed(run, FAILURES))
    return (failure for failure in found if failure is not None)


def read_failures(run: Run) -> dict[int, Failure]:
    """The same, by shard."""
    return {failure.shard: failure for failure in each_failure(run)}


def forget(run: Run, shard: int) -> None:
    """Make a shard missing again, to be computed by the next run as if it had never been tried."""
    run.place.delete(_name(FAILURES, shard))
    run.place.delete(_name(COMMITS, shard))


def count_records(run: Run) -> int:
    """How many commit records there are, whether they count or not: one listing."""
    return len(_listed(run, COMMITS))


def read_record(run: Run, shard: Shard, *, with_chunks: bool = True) -> Commit | Odd | None:
    """A shard's record, whether it counts or not. with_chunks: its chunks are looked for."""
    file = _name(COMMITS, shard.index)
    try:
        content = run.place.read(file)
    except OSError as error:
        if not is_damage(error):
            raise
        return Odd(shard.index, file, f"it cannot be read: {reason(error.__cause__ or error)}")
    if content is None:
        return None
    record = _opened(content)
    why = _disagreement(run, shard, record) if record else "the record is torn" if content else "the record is empty"
    if record and with_chunks and not why:
        gone = next((key for key in record.chunks if run.place.size(f"{RESULTS}/{key}") is None), None)
        why = f"its chunk {gone} is gone" if gone else ""
    return record if record and not why else Odd(shard.index, file, why)


def _disagreement(run: Run, shard: Shard, record: Commit) -> str:
    if record.job != run.fingerprint:
        return "the record is another job's"
    bounds = (record.shard, record.start, record.stop)
    if bounds != (shard.index, shard.start, shard.stop) or set(record.chunks) != set(chunk_keys(run, shard)):
        return "the record is another shard's"
    return ""


def _sealed(record: Commit) -> bytes:
    """A commit record as JSON, with a checksum of its own."""
    content = asdict(record)
    return json.dumps({**content, SEAL: seal(content)}, indent=1).encode()


def _opened(content: bytes) -> Commit | None:
    """The record, or None where it is torn, changed or of another kind."""
    try:
        fields = json.loads(content)
        is_whole = fields[SEAL] == seal(fields)
        return _COMMIT.validate_json(content, strict=True) if is_whole else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # ValidationError is a ValueError
        return None


def _read_failure(run: Run, index: int) -> Failure | None:
    try:
        return _FAILURE.validate_json(run.place.read(_name(FAILURES, index)) or b"", strict=True)
    except ValidationError:
        return None


def record_name(index: int) -> str:
    """What a shard's record is called in its folder."""
    return f"{index:08d}.json"


def _name(folder: str, index: int) -> str:
    return f"{folder}/{record_name(index)}"


def _listed(run: Run, folder: str) -> list[int]:
    return listed_shards(run.place.names(folder), run.layout.shard_count)


def listed_shards(names: Iterable[str], count: int) -> list[int]:
    """The shards of names such as 00000012.json, in order; others are none of ours."""
    indices = (int(name[:-5]) for name in names if _NAME.fullmatch(name))
    return sorted(index for index in indices if index < count)
