"""Whatever happens to the files of a run is found, named, and mended where it can be."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from sensitivity import folders
from sensitivity.addresses import place_at
from sensitivity.commits import forget, read_commits
from sensitivity.errors import Refused
from sensitivity.folders import Folder
from sensitivity.integrity import Damage, inspect, repair
from sensitivity.lease import LeaseLost, owned
from sensitivity.patience import PATIENCE, StoreFailed
from sensitivity.store import Run
from sensitivity.worker import Worker
from tests.conftest import frame, missing
from tests.sensitivity.test_store import started


@pytest.fixture(scope="module")
def finished(tmp_path_factory, request) -> Path:
    """A run of 7 shards, of which every test gets a copy."""
    from tests.conftest import job_writer

    folder = tmp_path_factory.mktemp("finished")
    run = started(job_writer(folder)(series=frame(60), run={"shard_windows": 8}))
    worker = Worker(run.place)
    for shard in run.layout.shards():
        worker.compute(shard)
    return folder


@pytest.fixture
def run(finished, tmp_path) -> Run:
    import shutil

    return Run.open(shutil.copytree(finished / "run", tmp_path / "run"))


def damages(run: Run) -> list[Damage]:
    return [damage for part in inspect(Run.open(run.place, to_mend=True)) for damage in part.damages]


def every_file(run: Run) -> list[str]:
    return sorted(name for name in run.place.files() if name not in ("tuning.json",) and "lease/" not in name)


def flip(path: Path, at: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def swap(path: Path) -> None:
    other = path.with_name("c.1.0.0.0.0")
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)


def test_a_run_as_it_was_written_has_no_damage(run):
    assert damages(run) == []
    parts = list(inspect(run))
    assert sum(part.files for part in parts) == len(every_file(run))
    assert [part.shard for part in parts] == [None, *range(7)]


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (flip, "CRC-32C"),
        (lambda path: flip(path, 0.0), "CRC-32C"),
        (lambda path: flip(path, 1.0), "CRC-32C"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "CRC-32C"),
        (lambda path: path.write_bytes(b""), "CRC-32C"),
        (lambda path: path.unlink(), "missing"),
        (swap, "another chunk"),
    ],
    ids=["flipped", "first byte", "last byte", "truncated", "emptied", "deleted", "swapped"],
)
def test_a_damaged_chunk_is_found_and_its_shard_is_made_missing(run, damage, what):
    damage(run.place.path / "results.zarr" / "jacobian" / "c.0.0.0.0.0")
    found = damages(run)
    shards = [0, 1] if damage is swap else [0]
    assert [(one.shard, one.file) for one in found] == [
        (shard, f"results.zarr/jacobian/c.{shard}.0.0.0.0") for shard in shards
    ]
    assert all(what in one.what for one in found)
    assert repair(run, found) == []
    assert [shard.index for shard in missing(run)] == shards
    worker = Worker(run.place)
    for shard in shards:
        worker.compute(run.layout.shard(shard))
    assert damages(run) == []


def test_a_chunk_that_changed_is_never_read(run):
    for name in every_file(run):
        if "/c" in name and name.startswith("results.zarr"):
            path = run.place.path / name
            before = path.read_bytes()
            flip(path)
            with pytest.raises((ValueError, RuntimeError)):
                xr.open_zarr(run.results).load()
            path.write_bytes(before)


@pytest.mark.parametrize(
    "damage",
    [flip, lambda path: path.write_bytes(path.read_bytes()[:-2]), lambda path: path.unlink()],
    ids=["flipped", "truncated", "deleted"],
)
def test_every_file_is_watched_and_what_was_made_of_something_is_made_again(run, finished, damage):
    """A file of the run's beginning comes back from job.json, or from the job's model and series."""
    for name in every_file(run):
        if name in ("job.json", "results.zarr/zarr.json") or (damage is not flip and name.startswith("commits/")):
            continue
        before = (run.place.path / name).read_bytes()
        damage(run.place.path / name)
        found = damages(run)
        assert [one.file for one in found] == [name]
        if found[0].shard is None:
            assert repair(run, found) == []
            assert (run.place.path / name).read_bytes() == before
        (run.place.path / name).write_bytes(before)
        assert damages(run) == []


def test_a_run_whose_job_was_changed_is_not_worked_at(run):
    """A digit of a fingerprint, or the scaling: nothing is computed with it, and no shard is called another job's."""
    job = run.place.path / "job.json"
    content = json.loads(job.read_text())
    for change in ({"skipped": 1}, {"fingerprints": {**content["fingerprints"], "job": "0" * 32}}):
        job.write_text(json.dumps({**content, **change}))
        with pytest.raises(Refused, match="job.json has been changed"):
            Run.open(run.place)
    job.write_text(json.dumps(content))
    assert damages(run) == []


def test_what_cannot_be_made_again_is_left_and_named(run, finished):
    flip(run.place.path / "model.keras")
    content = json.loads((run.place.path / "job.json").read_text())
    content["job"]["model"]["path"] = str(finished / "gone.keras")
    found = damages(run)
    assert repair(Run(run.place, content), found) == found


def test_a_series_that_lost_a_part_is_not_taken_for_one_with_gaps(run, monkeypatch):
    """A Zarr chunk that is gone reads as NaN; such windows are not skipped, they are not computed."""
    for chunk in (run.place.path / "series.zarr" / "series" / "c").rglob("0"):
        if chunk.is_file():
            chunk.unlink()
    (run.place.path / "commits" / "00000003.json").unlink()
    monkeypatch.setenv("SENSITIVITY_PATIENCE", "0")
    with pytest.raises(StoreFailed, match="other gaps than when the run began"):
        Worker(run.place).compute(run.layout.shard(3))
    assert 3 not in read_commits(run)


def test_random_damage_is_found_every_time_and_nowhere_else(run):
    """Bit flips, truncations, deletions and swaps in chunks and records."""
    random = np.random.default_rng(5)
    names = [name for name in every_file(run) if name.startswith("commits/") or "/c." in name]
    kinds: list[Callable[[Path, Path], object]] = [
        lambda path, _: flip(path, random.random()),
        lambda path, _: path.write_bytes(path.read_bytes()[: int(random.integers(path.stat().st_size))]),
        lambda path, _: path.unlink(),
        lambda path, other: path.write_bytes(other.read_bytes()),
    ]
    for _ in range(100):
        name, other = random.choice([n for n in names if n.startswith("results.zarr/jacobian")], 2, replace=False)
        kind = kinds[random.integers(len(kinds))]
        if random.random() < 0.3:
            name, kind = random.choice([n for n in names if n.startswith("commits/")]), kinds[random.integers(2)]
        path = run.place.path / str(name)
        before = path.read_bytes()
        kind(path, run.place.path / str(other))
        assert [one.file for one in damages(run)] == [name], (name, kinds.index(kind))
        path.write_bytes(before)
    assert damages(run) == []


def test_a_store_that_is_away_is_no_damage(run, monkeypatch):
    """Neither for those who look nor for those who mend; a single file that cannot be read is."""
    read, size = Folder._read, Folder._size
    away = {"results.zarr/jacobian/c.2.0.0.0.0"}

    def failing(act):
        def acting(place, name):
            if name in away or "all" in away:
                raise OSError(errno.EIO, "Input/output error")
            return act(place, name)

        return acting

    monkeypatch.setattr(Folder, "_read", failing(read))
    monkeypatch.setattr(Folder, "_size", failing(size))
    monkeypatch.setenv(PATIENCE, "0")
    found = list(damage for part in inspect(run) for damage in part.damages)
    assert [(damage.shard, damage.what) for damage in found] == [(2, "it cannot be read: Input/output error")]
    away.add("all")
    with pytest.raises(StoreFailed):
        list(inspect(run))
    away.clear()
    assert repair(run, found) == []
    assert len(read_commits(run)) == 7  # it was away, and is as it was


def test_what_is_mended_is_fenced_file_by_file(run):
    with owned(run.place) as lease:
        held = run.held(lease)
        flip(run.place.path / "results.zarr" / "jacobian" / "c.2.0.0.0.0")
        found = damages(run)
        run.place.write("lease/00000002.json", b"{}")
        with pytest.raises(LeaseLost):
            repair(held, found)
    assert len(read_commits(run)) == 7


def test_a_series_that_is_gone_keeps_nothing_else_from_being_restored(run, finished):
    flip(run.place.path / "model.keras")
    flip(run.place.path / "series.zarr" / "series" / "c" / "0" / "0")
    source = finished / "series.csv"
    source.rename(finished / "moved.csv")
    try:
        left = repair(run, damages(run))
    finally:
        (finished / "moved.csv").rename(source)
    assert [damage.file.partition("/")[0] for damage in left] == ["series.zarr"]
    assert {damage.file.partition("/")[0] for damage in damages(run)} == {"series.zarr"}


def test_what_a_disk_could_not_keep_is_not_believed_when_it_is_asked_again(run, monkeypatch):
    """Linux tells of a failed write once; the next fsync of the same file succeeds."""
    forget(run, 3)
    told = iter([OSError(errno.EIO, "Input/output error")])

    def sync(path):
        for error in told:
            raise error

    worker = Worker(run.place)
    with monkeypatch.context() as patch:
        patch.setattr(folders, "sync", sync)
        with pytest.raises(StoreFailed, match="could not keep shard 3: Input/output error"):
            worker.compute(run.layout.shard(3))
    assert 3 not in read_commits(run)
    assert worker.compute(run.layout.shard(3)).shard == 3


def test_a_store_that_denies_access_is_no_damage_either(run, s3, monkeypatch):
    """What cannot be read is not known to be bad."""
    monkeypatch.setenv("SENSITIVITY_PATIENCE", "1")  # it never gives in
    far = place_at(s3.home)
    for name in run.place.files():
        far.write(name, run.place.read(name))
    there = Run.open(far)
    for what, said in (("403", "privileges"), ("500", "500")):
        with (
            s3.failing(lambda method, path, what=what: what if "jacobian/c." in path else None),
            pytest.raises(StoreFailed, match=said),
        ):
            list(inspect(there))
    assert damages(there) == []


def test_a_store_without_its_labels_is_restored(run, finished):
    for name in ("results.zarr/zarr.json", "results.zarr/jacobian/zarr.json"):
        (run.place.path / name).unlink()
    with pytest.raises(Refused, match="verify --repair"):
        Run.open(run.place)
    assert repair(Run.open(run.place, to_mend=True), damages(run)) == []
    assert damages(run) == []
    assert len(read_commits(Run.open(run.place))) == 7
