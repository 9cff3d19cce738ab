"""One driver a run: who holds it, who takes it over, who finds out that it is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sensitivity import lease as leases
from sensitivity import machine
from sensitivity.addresses import place_at
from sensitivity.errors import Refused
from sensitivity.lease import LeaseLost, Owner, newest_token, owned, owner, require_owner

PATIENCE = 60.0  # seconds, with a busy machine


@pytest.fixture
def hasty_hearts(monkeypatch):
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(leases, "EXPIRY_SECONDS", 0.5)


def leave(home, **changes) -> Owner:
    """A lease as another driver would have left it."""
    other = replace(Owner.me(newest_token(home) + 1), **changes)
    home.write(f"lease/{other.token:08d}.json", leases._OWNER.dump_json(other))
    return other


def remove(home) -> None:
    home.discard(home.names())
    home.leave()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_is_owned_once_and_given_back(home):
    with owned(home) as mine:
        assert mine.token == 1
        with pytest.raises(Refused, match=f"process {os.getpid()} on .*, since 20"), owned(home):
            pass
        assert owner(home).pid == os.getpid()
    assert owner(home) is None
    with owned(home) as mine:
        assert mine.token == 2


def test_a_driver_known_to_be_dead_is_followed_at_once(home, caplog, monkeypatch):
    leave(home, pid=2**22 + 1, started="1")
    monkeypatch.setattr(leases, "_outwait", None)  # nobody waits
    with owned(home) as mine:
        assert mine.token == 2
    assert "taken over" in caplog.text


def test_a_number_that_is_given_out_again_is_not_the_driver(home):
    leave(home, started="the process of that number before")
    with owned(home) as mine:
        assert mine.token == 2


def test_a_driver_elsewhere_is_followed_when_its_heart_stands_still(home, hasty_hearts):
    leave(home, machine="another", host="node7", at=time.time() + 3600)  # whatever its clock says
    began = time.monotonic()
    with owned(home) as mine:
        assert mine.token == 2
    assert time.monotonic() - began >= leases.EXPIRY_SECONDS


def test_a_driver_elsewhere_is_left_alone_while_its_heart_beats(home):
    other = leave(home, machine="another", host="node7")
    code = (
        "import itertools, sys, time\nfrom sensitivity.addresses import place_at\n"
        "home, name = place_at(sys.argv[1]), sys.argv[2]\ncontent = home.read(name)\n"
        "for i in itertools.count():\n    home.write(name, content.replace(b'node7', b'node%d' % i)); time.sleep(0.1)\n"
    )
    beating = subprocess.Popen([sys.executable, "-c", code, str(home), f"lease/{other.token:08d}.json"])
    try:
        while b"node7" in home.read(f"lease/{other.token:08d}.json"):
            time.sleep(0.01)
        with pytest.raises(Refused, match="on node"), owned(home):
            pass
    finally:
        beating.kill()
        beating.wait()


def test_a_torn_lease_is_watched_and_followed(home, hasty_hearts):
    home.write("lease/00000004.json", b'{"token":')
    assert owner(home) is None
    with owned(home) as mine:
        assert mine.token == 5


def test_a_lease_that_was_lost_is_known_to_be(home, hasty_hearts):
    with owned(home) as mine:
        mine.require()
        other = leave(home, machine="another")
        assert mine.lost.wait(PATIENCE)
        with pytest.raises(LeaseLost, match="token 2, ours was 1"):
            mine.require()
        with pytest.raises(LeaseLost):
            require_owner(home, mine.owner)
    assert not leases._newest(home).owner.released  # it is not ours to give back
    assert leases._newest(home).owner == other


def test_a_run_that_was_removed_is_not_made_again_by_its_heart(tmp_path, hasty_hearts):
    home = place_at(tmp_path / "home")
    with owned(home) as mine:
        remove(home)
        assert mine.lost.wait(PATIENCE)
        with pytest.raises(LeaseLost, match="has been removed"):
            mine.require()
    assert home.names() == []


def test_a_run_made_anew_at_the_same_place_is_another_drivers(home, hasty_hearts):
    """Tokens begin again there."""
    with owned(home) as mine:
        remove(home)
        other = leave(home, machine="another")
        assert other.token == mine.token
        with pytest.raises(LeaseLost, match="another driver's"):
            mine.require()
        assert mine.lost.wait(PATIENCE)
    assert leases._newest(home).owner == other


def test_the_heart_beats_on_while_the_store_fails(s3, hasty_hearts):
    home = place_at(s3.home)
    with owned(home) as mine:
        began = len(s3.requests)
        with s3.failing(lambda method, path: "500"):
            wait_until(lambda: len(s3.requests) > began + 3)
        before = leases._newest(home).owner.at
        wait_until(lambda: leases._newest(home).owner.at > before)
        assert not mine.lost.is_set()


def test_a_heartbeat_that_is_stored_in_part_loses_nothing(s3, hasty_hearts):
    home = place_at(s3.home)
    with owned(home) as mine:
        with s3.failing(lambda method, path: "torn" if method == "PUT" else None):
            wait_until(lambda: leases._newest(home).owner is None)
            began = len(s3.requests)
            wait_until(lambda: len(s3.requests) > began + 10)
            mine.require()
        wait_until(lambda: leases._newest(home).owner is not None)
        assert not mine.lost.is_set()
        assert home.names("lease") == ["00000001.json"]


def test_a_store_that_lets_two_create_a_file_is_refused(s3, monkeypatch):
    monkeypatch.setattr(s3, "deaf", True)
    with pytest.raises(Refused, match="If-None-Match"), owned(place_at(s3.home)):
        pass
    assert place_at(s3.home).files() == []


def test_a_process_that_is_hidden_is_not_taken_for_dead(home, monkeypatch):
    leave(home)
    monkeypatch.setattr(machine, "started", lambda pid: machine.UNKNOWN)
    with pytest.raises(Refused, match="one driver a run"), owned(home):
        pass


CONTENDER = """
import sys
from sensitivity.addresses import place_at
from sensitivity.errors import Refused
from sensitivity.lease import owned
print("ready", flush=True)
input()
try:
    with owned(place_at(sys.argv[1])) as mine:
        print("owns", mine.token, flush=True)
        input()
except Refused as refusal:
    print("refused", flush=True)
"""


def test_of_many_that_start_at_the_same_moment_one_owns_the_run(home):
    """Five at a time, twice: the second time after an owner that was killed."""
    for token in (1, 3):
        contenders = [piped(CONTENDER, str(home)) for _ in range(5)]
        assert {contender.stdout.readline() for contender in contenders} == {"ready\n"}
        for contender in contenders:
            contender.stdin.write("go\n")
            contender.stdin.flush()
        answers = sorted(contender.stdout.readline().strip() for contender in contenders)
        assert answers == [f"owns {token}", *["refused"] * 4]
        for contender in contenders:
            contender.communicate("\n")
        leave(home, pid=2**22 + 1, started="1")


def piped(code: str, *arguments: str) -> subprocess.Popen:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=pipe, stdout=pipe, text=True)


def test_a_driver_that_is_stopped_for_long_finds_its_run_taken(tmp_path, hasty_hearts):
    home = place_at(tmp_path / "home")
    code = (
        "import sys, time\nfrom sensitivity import lease\nlease.BEAT_SECONDS = 0.05\n"
        "from sensitivity.addresses import place_at\n"
        "with lease.owned(place_at(sys.argv[1])) as mine:\n"
        "    print('owns', flush=True)\n    print(mine.lost.wait(60), flush=True)\n"
    )
    stopped = piped(code, str(home))
    try:
        assert stopped.stdout.readline() == "owns\n"
        stopped.send_signal(signal.SIGSTOP)
        wait_until(lambda: ") T " in Path(f"/proc/{stopped.pid}/stat").read_text())
        held = json.loads(home.read("lease/00000001.json"))
        home.write("lease/00000001.json", json.dumps({**held, "at": held["at"] - 3600}).encode())
        with owned(home) as mine:
            assert mine.token == 2
            stopped.send_signal(signal.SIGCONT)
            assert stopped.communicate(timeout=PATIENCE)[0] == "True\n"
    finally:
        stopped.kill()
        stopped.communicate()


def test_a_process_is_known_by_its_start():
    with piped("input()") as child:
        started = machine.started(child.pid)
        assert started == machine.started(child.pid) is not None
        child.kill()
    assert machine.started(child.pid) is None
    assert machine.started(os.getpid()) != started


def test_what_was_given_back_is_ours_no_more(home):
    """A worker that nobody hears of any more may live on."""
    with owned(home) as mine:
        guarded = mine.guarded
        guarded.write("x", b"ours")
    with pytest.raises(LeaseLost, match="given back"):
        guarded.write("x", b"late")
    assert home.read("x") == b"ours"


def test_a_listing_that_misses_our_own_file_takes_nothing_from_us(home, monkeypatch):
    """As some file systems' may, while a heartbeat replaces it."""
    with owned(home) as mine:
        monkeypatch.setattr(type(home), "names", lambda *_: [])
        assert newest_token(home) == 0
        mine.require()
        mine.beat()
        assert not mine.lost.is_set()


def test_whoever_fails_to_own_a_run_may_try_again(home, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(leases, "_require_exclusive", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), owned(home):
            pass
    with owned(home) as mine:
        assert mine.token == 2


def test_a_watcher_that_could_not_see_does_not_take_the_owner_for_dead(home, hasty_hearts, monkeypatch):
    """The owner could not beat either while the store was away for both."""
    other = leave(home, machine="another", host="node7", at=0.0)
    look, looks, clock = leases._newest, [], [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(leases, "time", SimpleNamespace(time=time.time, monotonic=lambda: clock[0], sleep=sleep))

    def slow(place):
        looks.append(place)
        if len(looks) == 2:
            sleep(2 * leases.EXPIRY_SECONDS)
        if len(looks) == 4:
            home.write(f"lease/{other.token:08d}.json", leases._OWNER.dump_json(replace(other, at=1.0)))
        return look(place)

    monkeypatch.setattr(leases, "_newest", slow)
    with pytest.raises(Refused, match="on node7"), owned(home):
        pass
