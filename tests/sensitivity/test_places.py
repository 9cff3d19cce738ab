"""Places: the same contract for folders and buckets, kept when the store fails for a while."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zarr

from sensitivity import buckets, patience
from sensitivity.addresses import place_at, place_of, scheme
from sensitivity.errors import Refused
from sensitivity.patience import StoreFailed, patiently
from sensitivity.readers import open_reader
from sensitivity.sections import SeriesSection


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setenv(patience.PATIENCE, "0.3")
    monkeypatch.setattr(patience, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(patience.Patience, "_told", {})  # what other tests were told is not told again


def test_paths_and_urls_are_told_apart(tmp_path):
    assert scheme("s3://bucket/run") == "s3"
    assert scheme("/data/run") == scheme("C:run") == ""
    folder, name = place_of("s3://bucket/deep/series.zarr/")
    assert (str(folder), name) == ("s3://bucket/deep", "series.zarr")
    folder, name = place_of(str(tmp_path / "x.csv"))
    assert (str(folder), name) == (str(tmp_path), "x.csv")
    with pytest.raises(Refused, match="s3://"):
        place_at("ftp://host/run")


def test_files_are_written_read_listed_and_removed(home):
    assert home.read("a/b.json") is home.size("a/b.json") is home.version("a/b.json") is None
    assert home.names() == home.names("a") == home.files() == []
    home.write("a/b.json", b"first")
    before = home.version("a/b.json")
    home.write("a/b.json", b"other")
    home.write("c", b"")
    assert home.version("a/b.json") != before
    assert (home.read("a/b.json"), home.size("a/b.json"), home.read("c")) == (b"other", 5, b"")
    assert (sorted(home.names()), home.names("a"), sorted(home.files())) == (["a", "c"], ["b.json"], ["a/b.json", "c"])
    with home.local_copy("a/b.json") as copy:
        assert copy.read_bytes() == b"other"
    home.delete("c")
    home.delete("c")
    assert home.files() == ["a/b.json"]


def test_a_file_is_created_once(home):
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda i: home.create("lease/1", f"owner {i}".encode()), range(8)))
    assert sum(won) == 1
    assert home.read("lease/1") == f"owner {won.index(True)}".encode()
    assert home.names("lease") == ["1"]


def test_json_that_is_torn_or_something_else_is_none(home):
    home.write_json("x.json", {"a": 1})
    assert home.read_json("x.json") == {"a": 1}
    for content in (b"", b'{"a": ', b"[1]", b"\xff\xfe"):
        home.write("x.json", content)
        assert home.read_json("x.json") is None


def test_what_is_named_is_discarded_and_nothing_else(home):
    for name in ("a", "b/c", "b/d/e", "bc", "lease/1"):
        home.write(name, b"x")
    home.discard(["a", "b", "none"])
    assert sorted(home.files()) == ["bc", "lease/1"]
    home.discard(["lease", "bc"])
    assert home.files() == home.names() == []


def test_a_guard_is_asked_before_each_change_and_for_nothing_else(home, hurried):
    """Each time that a change is tried, too: the store may fail for longer than a run is ours."""

    def forbid() -> None:
        raise PermissionError if next(asked) == 0 else RuntimeError("not ours")

    home.write("there", b"x")
    zarr.create_array(home.zarr("x.zarr"), shape=(4,), chunks=(2,), dtype="f4")[:] = 1
    guarded, before = pickle.loads(pickle.dumps(home)).guarded(forbid), sorted(home.files())
    changes = [
        lambda: guarded.write("there", b"y"),
        lambda: guarded.create("new", b"y"),
        lambda: guarded.delete("there"),
        lambda: guarded.discard(["there"]),
        lambda: patiently(home, zarr.open_array(guarded.zarr("x.zarr"), mode="r+").__setitem__, 0, 2.0),
    ]
    for change in changes:
        asked = itertools.count()
        with pytest.raises(RuntimeError, match="not ours"):
            change()
        assert next(asked) == 2
    assert (guarded.read("there"), sorted(guarded.files())) == (b"x", before)
    assert zarr.open_array(guarded.zarr("x.zarr"), mode="r")[:].tolist() == [1, 1, 1, 1]


def test_a_folder_removes_the_folders_it_made_and_no_others(tmp_path):
    (tmp_path / "there").mkdir()
    for path, gone in (("there/deep/run", "there/deep"), ("there", "nothing")):
        home = place_at(tmp_path / path)
        home.write("lease/1", b"x")
        home.discard(["lease"])
        home.leave()
        assert not (tmp_path / gone).exists()
    assert list(tmp_path.iterdir()) == [tmp_path / "there"]
    assert not list((tmp_path / "there").iterdir())


def test_a_place_travels_and_holds_zarr_stores(home):
    home = pickle.loads(pickle.dumps(home))
    array = zarr.create_array(home.zarr("x.zarr"), shape=(4,), chunks=(2,), dtype="f4")
    array[:] = np.arange(4)
    assert zarr.open_array(home.zarr("x.zarr"), mode="r")[:].tolist() == [0, 1, 2, 3]
    home.make_durable(home.files())
    assert "x.zarr/c/0" in home.files()


def test_what_killed_writers_left_is_swept(tmp_path):
    home = place_at(tmp_path)
    home.write("results.zarr/c.0", b"x")
    unfinished = (f"results.zarr/c.{'0' * 32}.partial", "commits/.00000001.json.host.1.89abcdef.tmp")
    for name in (*unfinished, "download.tmp", "notes.partial", ".mine.tmp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    home.sweep()
    assert sorted(home.files()) == [".mine.tmp", "download.tmp", "notes.partial", "results.zarr/c.0"]


def test_a_file_system_without_links_creates_too(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    home = place_at(tmp_path)
    assert [home.create("x", b"one"), home.create("x", b"two")] == [True, False]
    assert (home.read("x"), home.names()) == (b"one", ["x"])

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no links"):
        home.once().create("y", b"one")
    assert home.read("y") == b""


def test_a_store_that_fails_for_a_while_is_tried_again(hurried, caplog):
    left = iter([OSError(errno.ENOSPC, "No space left on device")] * 2)

    def act() -> str:
        for error in left:
            raise error
        return "done"

    assert patiently("the store", act) == "done"
    assert "No space left on device" in caplog.text


def test_a_store_that_goes_on_failing_is_given_up_in_words(hurried):
    def act() -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with pytest.raises(StoreFailed, match="the store has failed for .* Read-only file system"):
        patiently("the store", act)


def test_what_cannot_change_is_not_tried_again(hurried):
    calls = itertools.count()

    def act() -> None:
        next(calls)
        raise FileNotFoundError("gone")

    with pytest.raises(FileNotFoundError):
        patiently("the store", act)
    assert next(calls) == 1


@pytest.mark.parametrize("what", ["500", "torn", "lost"])
def test_an_object_store_with_faults_keeps_the_contract(s3, what):
    """Of the first three puts every one fails: the answer, the body, or the answer to what was done."""
    home = place_at(s3.home)
    left = iter([what] * 3)
    with s3.failing(lambda method, path: next(left, None) if method == "PUT" else None):
        home.write("a", b"content")
    assert home.read("a") == b"content"
    left = iter([what] * 3)
    with s3.failing(lambda method, path: next(left, None) if method == "PUT" else None):
        assert home.create("b", b"content")
    assert home.read("b") == b"content"
    assert not home.create("b", b"another")


def test_an_object_store_that_does_not_answer_in_time_is_asked_again(s3, monkeypatch):
    monkeypatch.setattr(buckets, "_CLIENT", {**buckets._CLIENT, "timeout": "1s", "read_timeout": "1s"})
    home = place_at(s3.home)
    for method, act in (("PUT", lambda: home.write("a", b"content")), ("GET", lambda: home.read("a"))):
        left = iter(["hang"])
        with s3.failing(lambda verb, path, method=method, left=left: next(left, None) if verb == method else None):
            act()
        assert next(left, None) is None
    assert home.read("a") == b"content"


def test_an_object_store_that_denies_access_is_not_asked_again(s3):
    home, before = place_at(s3.home), s3.asked
    with s3.failing(lambda method, path: "403"), pytest.raises(StoreFailed, match="403"):
        home.read("a")
    assert s3.asked == before + 1


def test_who_we_are_is_taken_from_the_environment_or_from_a_profile(s3, monkeypatch, tmp_path):
    assert place_at(s3.home).read("a") is None
    assert "Credential=key/" in s3.asker
    (tmp_path / "credentials").write_text("[ours]\naws_access_key_id = profiled\naws_secret_access_key = secret\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text("[profile ours]\nregion = eu-central-1\n")
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "ours")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    assert place_at(s3.home).read("a") is None
    assert "Credential=profiled/" in s3.asker
    assert "/eu-central-1/s3/" in s3.asker


def test_an_object_store_that_is_down_is_said_so(s3, hurried):
    with s3.failing(lambda method, path: "500"), pytest.raises(StoreFailed, match="500"):
        place_at(s3.home).read("a")


def test_patience_begins_with_the_first_failure(hurried):
    """However long a call takes that fails once."""
    calls = itertools.count()

    def act() -> str:
        if next(calls) == 0:
            time.sleep(2 * patience.seconds())
            raise OSError("for a moment")
        return "done"

    assert patiently("the store", act) == "done"


@pytest.mark.parametrize("failing", [3, 10_000])
def test_what_zarr_reads_of_an_object_store_is_asked_for_again(s3, hurried, failing):
    home = place_at(s3.home)
    zarr.create_array(home.zarr("x.zarr"), shape=(4,), chunks=(2,), dtype="f4")[:] = np.arange(4)
    left = iter(["500"] * failing)
    with s3.failing(lambda method, path: next(left, None)):
        if failing == 3:
            assert zarr.open_array(home.zarr("x.zarr"), mode="r")[:].tolist() == [0, 1, 2, 3]
            return
        with pytest.raises(StoreFailed, match="500"):
            zarr.open_array(home.zarr("x.zarr"), mode="r")
        with pytest.raises(StoreFailed, match="500"):  # nothing is said against the file
            open_reader(SeriesSection(path=f"{s3.home}/x.zarr"))


def test_a_large_object_is_fetched_part_by_part(s3, monkeypatch):
    monkeypatch.setattr(buckets, "_PART", 1000)
    home, content = place_at(s3.home), bytes(range(256)) * 10
    home.write("large", content)
    left, before = iter([None, None, "500"]), s3.asked
    with s3.failing(lambda method, path: next(left, None)), home.local_copy("large") as copy:
        assert copy.read_bytes() == content
    assert s3.asked == before + 1 + 3 + 1
    with pytest.raises(FileNotFoundError), home.local_copy("none"):
        pass


def test_a_place_tried_once_is_the_same_client(s3):
    home = place_at(s3.home)
    assert home.read("a") is None
    assert home.once()._store is home._store


def test_json_without_end_is_none(home):
    home.write("x.json", b"[" * 100_000)
    assert home.read_json("x.json") is None
