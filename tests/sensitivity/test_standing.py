"""What commit records add up to, and pages that stand for them."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensitivity import standing
from sensitivity.checksums import SEAL, seal
from sensitivity.commits import Chunks, Commit, _sealed, chunk_keys, forget, read_commits
from sensitivity.creation import owning
from sensitivity.places import Place
from sensitivity.plan import Layout
from sensitivity.setting import Setting
from sensitivity.standing import Keeper, Standing, stand
from sensitivity.store import Run
from sensitivity.tally import SHOWN, Tally, sum_up
from sensitivity.worker import Worker
from tests.conftest import frame, job_writer
from tests.sensitivity.test_store import started

SETTINGS = (Setting("gradient", 64), Setting("scan", 8, xla=True, lost=("no cuDNN: none here",)))


def record(shard: int, **changes) -> Commit:
    """A record of one of two workers."""
    plain = Commit(
        shard=shard,
        start=8 * shard,
        stop=8 * shard + 8,
        job="a job",
        chunks={},
        computed=7,
        skipped=1,
        not_finite=0,
        attempt=1,
        host="here",
        pid=shard % 2,
        started=100.0 + shard,
        finished=101.5 + shard,
        peak_memory=1000 + shard,
        setting=SETTINGS[shard % 2].to_json(),
        projected_memory=2000,
        why="as given",
        token=1 + shard // 10,
    )
    return replace(plain, **changes)


def test_a_tally_says_what_records_say():
    tally = sum_up(Tally.of(record(shard, not_finite=shard // 4, attempt=1 + shard // 4)) for shard in range(5))
    assert (tally.shards, tally.windows, tally.computed) == (5, 40, 35)
    assert (tally.peak_memory, tally.projected_memory) == (1004, 2000)
    assert tally.attempts == {1: 4, 2: 1}
    gradient, scan = (json.dumps(setting.to_json(), sort_keys=True) for setting in SETTINGS)
    assert tally.settings == {gradient: 3, scan: 2}
    assert tally.reasons == {"as given": 5}
    pace, setting = tally.workers["here", 0]
    assert (pace.shards, pace.windows, pace.started, pace.finished) == (3, 21, 100.0, 105.5)
    assert setting == gradient
    assert pace.rate == 21 / 5.5
    assert tally.sessions[1].shards == 5
    assert tally.not_finite == {4: 1}


@given(st.lists(st.integers(0, 60), unique=True, max_size=40), st.randoms(use_true_random=False))
def test_tallies_of_parts_add_up_to_that_of_the_whole(shards, chance: random.Random):
    tallies = [Tally.of(record(shard, not_finite=shard % 3)) for shard in shards]
    whole = sum_up(tallies)
    while len(tallies) > 1:
        chance.shuffle(tallies)
        tallies.append(tallies.pop() + tallies.pop())
    assert sum_up(tallies) == whole
    assert len(whole.not_finite) == min(SHOWN, whole.not_finite_shards)
    assert Tally.from_json(json.loads(json.dumps(whole.to_json()))) == whole


# ---- pages -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("standing")
    run = started(job_writer(folder)(series=frame(60), run={"shard_windows": 8}))
    worker = Worker(run.place)
    for shard in run.layout.shards():
        worker.compute(shard)
    return folder / "run"


@pytest.fixture
def run(finished, tmp_path, monkeypatch) -> Run:
    """7 shards, all done, in pages of 3; every test has a copy."""
    monkeypatch.setattr(standing, "PAGE", 3)
    return Run.open(shutil.copytree(finished, tmp_path / "run"))


def keep(run: Run, found: Standing) -> None:
    keeper = Keeper(run, found)
    keeper.close()


def records_read(run: Run, monkeypatch) -> tuple[Standing, list[str]]:
    """Where it stands, and which records were read for that."""
    read, names = Place.read, []
    monkeypatch.setattr(Place, "read", lambda self, name: names.append(name) or read(self, name))
    found = stand(run)
    monkeypatch.undo()
    monkeypatch.setattr(standing, "PAGE", 3)
    return found, [name for name in names if name.startswith("commits/")]


def test_pages_stand_for_records_that_are_as_they_were(run, monkeypatch):
    plain = stand(run)
    assert plain.done.all()
    assert [page.number for page in plain.unkept] == [0, 1, 2]
    keep(run, plain)
    assert sorted(run.place.names("pages")) == ["00000000.json", "00000001.json", "00000002.json"]
    again, read = records_read(run, monkeypatch)
    assert read == []
    assert again.tally == plain.tally
    assert again.done.all()
    assert again.unkept == ()


def test_a_record_that_changed_or_went_is_seen_through_its_page(run, monkeypatch):
    keep(run, stand(run))
    os.utime(run.place.path / "commits" / "00000001.json")
    found, read = records_read(run, monkeypatch)
    assert read == [f"commits/0000000{shard}.json" for shard in (0, 1, 2)]
    assert found.done.all()
    forget(run, 4)
    found, read = records_read(run, monkeypatch)
    assert np.flatnonzero(~found.done).tolist() == [4]
    assert found.tally.shards == 6


def test_a_chunk_that_went_is_seen_through_its_page(run):
    keep(run, stand(run))
    (run.place.path / "results.zarr" / next(chunk_keys(run, run.layout.shard(5)))).unlink()
    odd = []
    assert np.flatnonzero(~stand(run, odd.append).done).tolist() == [5]
    assert "is gone" in str(odd[0])


@pytest.mark.parametrize("content", [b"", b"{}", b"torn", b'{"version": "x", "tally": {}, "crc32c": "00000000"}', None])
def test_a_page_that_is_damaged_is_not_believed(run, content):
    plain = stand(run)
    keep(run, plain)
    page = run.place.path / "pages" / "00000001.json"
    if content is None:  # of another version of ours
        fields = {"version": json.loads(page.read_text())["version"], "tally": {"shards": 3}}
        content = json.dumps({**fields, SEAL: seal(fields)}).encode()
    page.write_bytes(content)
    found = stand(run)
    assert found.tally == plain.tally
    assert [page.number for page in found.unkept] == [1]


def test_a_page_is_kept_once_its_last_shard_is_heard_of(run):
    forget(run, 4)
    before = stand(run)
    with owning(run.place) as lease:
        held = run.held(lease)
        keeper = Keeper(held, before)
        Worker(held).compute(run.layout.shard(4))
        keeper.heard(4)
        keeper.close()
    assert len(run.place.names("pages")) == 3
    assert stand(run).unkept == ()


def test_pages_are_not_kept_by_who_lost_the_run(run):
    with owning(run.place) as lease:
        held = run.held(lease)
        run.place.write_json("lease/00000099.json", {"token": 99})
        keep(held, stand(run))
    assert run.place.names("pages") == []


def test_a_run_of_one_page_keeps_none(finished, tmp_path):
    run = Run.open(shutil.copytree(finished, tmp_path / "run"))
    keep(run, stand(run))
    assert run.place.names("pages") == []


def test_pages_on_an_object_store(run, s3):
    from sensitivity.addresses import place_at

    there = place_at(s3.home)
    for name in run.place.files():
        there.write(name, run.place.read(name))
    far = Run.open(there)
    plain = stand(far)
    assert [page.number for page in plain.unkept] == [0, 1, 2]
    keep(far, plain)
    again = stand(far)
    assert again.unkept == ()
    assert again.tally == plain.tally
    there.write("commits/00000003.json", _sealed(replace(read_commits(run)[3], host="elsewhere")))
    assert ("elsewhere", os.getpid()) in stand(far).tally.workers


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 10), st.integers(1, 5), st.data())
def test_chunks_are_known_by_shard(windows, chunk, chunks_a_shard, steps, data):
    layout = Layout(windows, min(windows, chunk * chunks_a_shard), min(windows, chunk), 1)
    run = Run(FakePlace([]), {"model": {"output_steps": steps, "outputs": ["a"], "length": 3, "features": 2}})
    run.__dict__["layout"] = layout
    every = [key for shard in layout.shards() for key in chunk_keys(run, shard)]
    gone = data.draw(st.sampled_from(every))
    whole = replace(run, place=FakePlace(every))
    whole.__dict__["layout"] = layout
    assert Chunks(whole).hold(0, layout.shard_count)
    broken = replace(run, place=FakePlace([key for key in every if key != gone]))
    broken.__dict__["layout"] = layout
    owner = next(shard.index for shard in layout.shards() if gone in chunk_keys(run, shard))
    found = Chunks(broken)
    assert [index for index in range(layout.shard_count) if not found.hold(index, index + 1)] == [owner]


def test_chunks_that_are_none_of_the_runs_are_passed_over(run):
    for name in ("jacobian/c.7.0.0.0.0", "jacobian/c.0.1.0.0.0", "prediction/c.7.0.0", "prediction/c.x.0.0"):
        (run.place.path / "results.zarr" / name).write_bytes(b"")
    assert stand(run).done.all()


class FakePlace:
    def __init__(self, keys: list[str]) -> None:
        self._keys = keys

    def names(self, folder: str) -> list[str]:
        array = folder.rpartition("/")[2]
        return ["zarr.json", *(key.rpartition("/")[2] for key in self._keys if key.startswith(f"{array}/"))]
