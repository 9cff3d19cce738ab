"""A run directory held against what was written there: every chunk, every record, every file of its beginning."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .addresses import place_of
from .checksums import checksum
from .commits import Commit, Odd, chunk_checksum, each_record, forget
from .folders import Folder
from .places import Place
from .series import ingest, survey
from .store import MODEL, RESULTS, SERIES, Run
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

    job.json itself was looked at when the run was opened.
    """
    files = run.content["files"]
    found = list(run.place.each(lambda name: _of_the_run(run, name), files))
    yield Inspected(None, 1 + len(files), [damage for damage in found if damage is not None])
    for record in each_record(run, with_chunks=False):
        if isinstance(record, Odd):
            yield Inspected(record.shard, 1, [Damage(record.shard, record.file, record.why)])
        else:
            found = list(run.place.each(functools.partial(_of_a_shard, run, record), record.chunks))
            yield Inspected(record.shard, 1 + len(found), [damage for damage in found if damage is not None])


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
        return None, f"it cannot be read: {error}"
    return content, "" if content is not None else "it is missing"


def repair(run: Run, damages: Iterable[Damage]) -> list[Damage]:
    """Make damaged shards missing, for the next run to compute, and restore what belongs to the whole run from what it
    was made of; what could not be restored. Raises `LeaseLost` where the run is another driver's by now.
    """
    found = list(damages)
    run.require_lease()
    for shard in {damage.shard for damage in found if damage.shard is not None}:
        forget(run, shard)
    of_the_run = [damage for damage in found if damage.shard is None]
    if not of_the_run:
        return []
    with tempfile.TemporaryDirectory() as folder:
        anew = Folder(Path(folder))
        _make_anew(run, anew, {damage.file for damage in of_the_run})
        return [damage for damage in of_the_run if not _restored(run, anew, damage.file)]


def _make_anew(run: Run, anew: Place, names: set[str]) -> None:
    """What the damaged files were made of: labels from job.json, series and model from where the job found them."""
    if any(name.startswith(f"{RESULTS}/") for name in names):
        write_template(anew.zarr(RESULTS), run.survey, run.windows, run.facts, run.layout)
    try:
        if any(name.startswith(f"{SERIES}/") for name in names):
            found = survey(run.job.series)
            if found.fingerprint == run.survey.fingerprint:
                ingest(run.job.series, found, anew.zarr(SERIES))
        if MODEL in names and not run.job.model.is_function:
            source, name = place_of(run.job.model.path)
            anew.write(MODEL, source.read(name) or b"")
    except (OSError, ValueError):  # the source is gone, or is another one now: `Refused` is a ValueError
        return


def _restored(run: Run, anew: Place, name: str) -> bool:
    content = anew.read(name)
    if content is None or checksum(content) != run.content["files"].get(name):
        return False
    run.place.write(name, content)
    return True
