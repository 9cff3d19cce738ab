"""Shards written, committed, listed and verified.

A shard is done when, and only when, its commit record exists and agrees with the run. The order is what makes
that true: chunks written, chunks on the disk, record written whole, record on the disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import google_crc32c
import numpy as np
import zarr
from pydantic import TypeAdapter, ValidationError

from .durable import sync, sync_files, write_json
from .plan import Shard
from .store import COMMITS, FAILURES, Run


@dataclass(frozen=True)
class Commit:
    """A shard that is done: windows `[start, stop)`, CRC-32C of every stored chunk, and how it was computed.

    seconds: from reading the series to the chunks being on the disk. started, finished: seconds since 1970.
    peak_memory: the worker's peak resident bytes so far; projected_memory: what was projected. not_finite: Jacobian
    entries that are NaN or infinite in computed windows. why: the setting was chosen; the trials are in tuning.json.
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

    @property
    def seconds(self) -> float:
        return self.finished - self.started


@dataclass(frozen=True)
class Failure:
    """A shard that was given up after `attempts` attempts, with the last one's reason and traceback."""

    shard: int
    start: int
    stop: int
    attempts: int
    reason: str
    traceback: str
    host: str


_COMMIT, _FAILURE = TypeAdapter(Commit), TypeAdapter(Failure)
Record = TypeVar("Record")


class Results:
    """The arrays of a run's store, open for writing shards."""

    def __init__(self, run: Run) -> None:
        self.run = run
        # An all-NaN chunk is written like any other: a committed chunk that is absent is then always damage.
        with zarr.config.set({"array.write_empty_chunks": True}):
            self._jacobian, self._prediction = (
                zarr.open_array(run.results / name, mode="r+") for name in ("jacobian", "prediction")
            )

    def write_jacobian(self, start: int, stop: int, values: np.ndarray) -> None:
        """Write windows `[start, stop)`, `(time, output_step, output, lag, feature)`: whole chunks, no others."""
        layout = self.run.layout
        size = layout.chunk_windows
        if start % size or (stop % size and stop != layout.windows):
            raise ValueError(
                f"windows [{start}, {stop}) are not whole chunks of {size} windows: two writers would share a chunk "
                "and one would lose its part; write from one chunk border to another"
            )
        self._jacobian[start:stop] = values

    def write_prediction(self, shard: Shard, values: np.ndarray) -> None:
        """Write the shard's `prediction`, `(time, output_step, output)`: exactly one chunk."""
        self._prediction[shard.start : shard.stop] = values

    def make_durable(self, shard: Shard) -> dict[str, str]:
        """Wait until the shard's chunks are on the disk; their CRC-32C by chunk key, as hexadecimal."""
        paths = {key: self.run.results / key for key in chunk_keys(self.run, shard)}
        sync_files(paths.values())
        return {key: checksum(path) for key, path in paths.items()}


def chunk_keys(run: Run, shard: Shard) -> Iterator[str]:
    """The keys in `results.zarr` of every chunk that belongs to the shard."""
    layout = run.layout
    step_chunks = -(-run.content["model"]["output_steps"] // layout.chunk_steps)
    for start, _ in layout.chunks(shard):
        for step in range(step_chunks):
            yield f"jacobian/c.{start // layout.chunk_windows}.{step}.0.0.0"
    yield f"prediction/c.{shard.index}.0.0"


def checksum(path: Path) -> str:
    return f"{google_crc32c.value(path.read_bytes()):08x}"


# ---- records ---------------------------------------------------------------------------------------


def commit(run: Run, record: Commit) -> None:
    """Make the shard count as done, and forget its earlier failures."""
    write_json(_path(run, COMMITS, record.shard), asdict(record))
    _path(run, FAILURES, record.shard).unlink(missing_ok=True)


def record_failure(run: Run, failure: Failure) -> None:
    write_json(_path(run, FAILURES, failure.shard), asdict(failure))


def read_commit(run: Run, shard: Shard, *, with_chunks: bool = True) -> Commit | None:
    """The shard's commit record, or None where there is none that agrees with the run.

    with_chunks: nor where one of its chunks is gone; `verify` wants to hear of those.
    """
    record = _read(_COMMIT, _path(run, COMMITS, shard.index))
    if record is None:
        return None
    expected = (shard.index, shard.start, shard.stop, run.fingerprint)
    found = (record.shard, record.start, record.stop, record.job)
    agrees = found == expected and set(record.chunks) == set(chunk_keys(run, shard))
    there = not with_chunks or all((run.results / key).exists() for key in record.chunks)
    return record if agrees and there else None


def each_commit(run: Run, *, with_chunks: bool = True) -> Iterator[Commit]:
    """Every valid commit record, in order. One listing, and one small file read a shard that is done."""
    for index in _listed(run, COMMITS):
        record = read_commit(run, run.layout.shard(index), with_chunks=with_chunks)
        if record is not None:
            yield record


def read_commits(run: Run, *, with_chunks: bool = True) -> dict[int, Commit]:
    """Every valid commit record by shard."""
    return {record.shard: record for record in each_commit(run, with_chunks=with_chunks)}


def read_failures(run: Run) -> dict[int, Failure]:
    """Why shards were given up, by shard; torn records are passed over."""
    failures = {index: _read(_FAILURE, _path(run, FAILURES, index)) for index in _listed(run, FAILURES)}
    return {index: failure for index, failure in failures.items() if failure is not None}


def forget(run: Run, shard: int) -> None:
    """Make a shard missing again, to be computed by the next run."""
    _path(run, COMMITS, shard).unlink(missing_ok=True)
    sync(run.path / COMMITS)


def missing(run: Run, done: Iterable[int]) -> list[Shard]:
    committed = set(done)
    return [shard for shard in run.layout.shards() if shard.index not in committed]


def _read(adapter: TypeAdapter[Record], path: Path) -> Record | None:
    """The record at `path`, or None where it is absent, torn or of another kind."""
    try:
        return adapter.validate_json(path.read_bytes(), strict=True)
    except (OSError, ValidationError):
        return None


def _path(run: Run, folder: str, index: int) -> Path:
    return run.path / folder / f"{index:08d}.json"


def _listed(run: Run, folder: str) -> list[int]:
    try:
        names = [name.removesuffix(".json") for name in os.listdir(run.path / folder) if name.endswith(".json")]
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if name.isdigit() and int(name) < run.layout.shard_count)


# ---- verification ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    """A committed chunk that is not what was committed."""

    shard: int
    chunk: str
    what: str


def verify(run: Run, records: Iterable[Commit]) -> Iterator[tuple[Commit, list[Damage]]]:
    """Re-read every committed chunk against its checksum, shard by shard."""
    for record in records:
        yield record, [damage for key in record.chunks if (damage := _inspect(run, record, key)) is not None]


def _inspect(run: Run, record: Commit, key: str) -> Damage | None:
    try:
        found = checksum(run.results / key)
    except FileNotFoundError:
        return Damage(record.shard, key, "the chunk is missing")
    except OSError as error:
        return Damage(record.shard, key, f"the chunk cannot be read: {error}")
    if found != record.chunks[key]:
        return Damage(record.shard, key, f"CRC-32C is {found}, was committed as {record.chunks[key]}")
    return None
