"""A run directory held against what was written there: every chunk, every record, every file of its beginning."""

from __future__ import annotations

import contextlib
import functools
import shlex
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .addresses import copy_files, place_at, place_of
from .checksums import checksum
from .commits import Commit, Odd, chunk_checksum, each_record, forget, read_record
from .errors import Refused
from .folders import Folder
from .patience import is_damage, reason
from .places import Place
from .series import ingest, is_sliceable, series_changed
from .store import JOB, MODEL, RESULTS, SAVED, SERIES, Run
from .survey import survey
from .template import write_template


@dataclass(frozen=True)
class Damage:
    """A file that is not what was written. shard: whose it is; None: it belongs to the whole run."""

    shard: int | None
    file: str
    what: str

    def __str__(self) -> str:
        whose = "run" if self.shard is None else f"shard {self.shard}"
        return f"{whose}: {self.file}: {self.what}"


@dataclass(frozen=True)
class Inspected:
    """So many files of a shard, or of the run's beginning, and those of them that are damaged."""

    shard: int | None
    files: int
    damages: list[Damage]


def inspect(run: Run) -> Iterator[Inspected]:
    """Re-read every file that was promised: those of the run's beginning, then each shard's record and chunks.

    job.json itself was looked at when the run was opened. Raises `StoreFailed` where the store is away.
    """
    yield _inspect_beginning(run)
    for record in each_record(run):
        yield _inspect_shard(run, record)


def _inspect_beginning(run: Run) -> Inspected:
    files = run.content["files"]
    found = list(run.place.each(lambda name: _of_the_run(run, name), files))
    return Inspected(None, 1 + len(files), [damage for damage in found if damage is not None])


def _inspect_shard(run: Run, record: Commit | Odd) -> Inspected:
    if isinstance(record, Odd):
        return Inspected(record.shard, 1, [Damage(record.shard, record.file, record.why)])
    found = list(run.place.each(functools.partial(_of_a_shard, run, record), record.chunks))
    return Inspected(record.shard, 1 + len(found), [damage for damage in found if damage is not None])


def require_series(run: Run) -> None:
    """Refuse to go on with a series that is not the one this run began with: the copy, or the source where none is."""
    if not run.content["ingested"]:
        found = survey(run.series)
        if found.fingerprint != run.survey.fingerprint or not is_sliceable(run.series, found):
            raise series_changed(run.series.path, "since the run began")
        return
    names = [name for name in run.content["files"] if name.startswith(f"{SERIES}/")]
    damage = next(filter(None, run.place.each(lambda name: _of_the_run(run, name), names)), None)
    if damage is not None:
        raise Refused(
            "run directory",
            given=f"{run.place}, whose copy of the series is damaged ({damage})",
            allowed="a run directory as it was written",
            remedy=f"sensitivity verify --repair {shlex.quote(str(run.place))} restores it from {run.job.series.path}",
        )


def _of_the_run(run: Run, name: str) -> Damage | None:
    content, what = _read(run.place, name)
    if content is not None and checksum(content) != run.content["files"][name]:
        what = f"CRC-32C is {checksum(content)}, not {run.content['files'][name]}"
    return Damage(None, name, what) if what else None


def _of_a_shard(run: Run, record: Commit, key: str) -> Damage | None:
    content, what = _read(run.place, f"{RESULTS}/{key}")
    if content is not None:
        found = chunk_checksum(content)
        if found is None:
            what = "the chunk is not what its CRC-32C says"
        elif found != record.chunks[key]:
            what = f"another chunk is in its place: CRC-32C {found}, not {record.chunks[key]}"
    return Damage(record.shard, f"{RESULTS}/{key}", what) if what else None


def _read(place: Place, name: str) -> tuple[bytes | None, str]:
    try:
        content = place.read(name)
    except OSError as error:
        if not is_damage(error) or not _is_readable(place):
            raise
        return None, f"it cannot be read: {reason(error.__cause__ or error)}"
    return content, "" if content is not None else "it is missing"


def _is_readable(place: Place) -> bool:
    """Whether a store gives other files that has failed to give one: a network's disk that is away fails like one that
    is spoiled.
    """
    try:
        return place.once().read(JOB) is not None
    except OSError:
        return False


def repair(run: Run, damages: Iterable[Damage]) -> list[Damage]:
    """Make shards missing that are damaged still, for the next run to compute, and restore what belongs to the whole
    run from what it was made of; what could not be restored. Raises `LeaseLost` where the run is another driver's.
    """
    found = list(damages)
    for index in sorted({damage.shard for damage in found if damage.shard is not None}):
        record = read_record(run, run.layout.shard(index), with_chunks=False)
        if record is not None and _inspect_shard(run, record).damages:
            forget(run, index)
    if all(damage.shard is not None for damage in found):
        return []
    left = _inspect_beginning(run).damages
    with tempfile.TemporaryDirectory() as folder:
        anew = Folder(Path(folder))
        _make_anew(run, anew, {damage.file for damage in left})
        return [damage for damage in left if not _restored(run, anew, damage.file)]


def _make_anew(run: Run, anew: Place, names: set[str]) -> None:
    """What the damaged files were made of: labels from job.json, series and model from where the job found them."""
    if any(name.startswith(f"{RESULTS}/") for name in names):
        write_template(anew.zarr(RESULTS), run.survey, run.windows, run.facts, run.layout, run.product)
    if any(name.startswith(f"{SERIES}/") for name in names):
        with _source_may_be_gone():
            ingest(run.job.series, run.survey, anew.zarr(SERIES))
    if any(name.startswith(f"{SAVED}/") for name in names):
        with _source_may_be_gone():
            copy_files(place_at(run.job.model.path), anew, f"{SAVED}/")
    if MODEL in names and not run.job.model.is_function:
        with _source_may_be_gone():
            source, name = place_of(run.job.model.path)
            anew.write(MODEL, source.read(name) or b"")


@contextlib.contextmanager
def _source_may_be_gone() -> Iterator[None]:
    """Or be another one now; `Refused` is a ValueError."""
    with contextlib.suppress(OSError, ValueError):
        yield


def _restored(run: Run, anew: Place, name: str) -> bool:
    content = anew.read(name)
    if content is None or checksum(content) != run.content["files"].get(name):
        return False
    run.place.write(name, content)
    return True
