"""One driver a run: a lease with its owner, a heartbeat and a fencing token.

Each owner creates `lease/<token>.json`, of which a place lets one exist: the highest token owns the run. The owner
rewrites its file as a heartbeat. An owner that gave the run back, whose process is known to be dead, or whose
heartbeat has stood still for `EXPIRY_SECONDS` of the watcher's own clock, is followed by the next token; whoever
writes looks for a higher token first (Kleppmann 2016, "How to do distributed locking"; Gray & Cheriton 1989).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property

from pydantic import TypeAdapter, ValidationError

from . import machine
from .errors import Refused
from .places import Place

LEASE = "lease"
_NAME = re.compile(r"[0-9]{8}\.json")
BEAT_SECONDS, EXPIRY_SECONDS = 5.0, 30.0

_log = logging.getLogger(__package__)


class LeaseLost(RuntimeError):
    """Another driver has taken the run over: this one writes no more."""


_ended: set[str] = set()  # leases of this process that are over, though the store could not be told


@dataclass(frozen=True)
class Owner:
    """Who holds a run. since, at: seconds since 1970 when it took the run and when its heart last beat.

    machine, started: with `pid` they name a process, to those on the same machine.
    """

    token: int
    host: str
    pid: int
    machine: str
    started: str
    since: float
    at: float
    nonce: str
    released: bool = False

    @classmethod
    def me(cls, token: int) -> Owner:
        pid, now = os.getpid(), time.time()
        started = machine.started(pid) or ""
        return cls(token, socket.gethostname(), pid, machine.this_machine(), started, now, now, uuid.uuid4().hex)

    @property
    def is_here(self) -> bool:
        return self.machine == machine.this_machine()

    @property
    def is_over(self) -> bool:
        """Whether it is known to own the run no more."""
        return self.released or self.nonce in _ended or (self.is_here and self._has_ended)

    @property
    def _has_ended(self) -> bool:
        """Its number names no process, or another one; where processes of others are hidden, that is not known."""
        now = machine.started(self.pid)
        return now is None or (machine.UNKNOWN not in (now, self.started) and now != self.started)

    @property
    def is_fresh(self) -> bool:
        """Whether it beat just now, by this machine's clock."""
        return abs(time.time() - self.at) < EXPIRY_SECONDS

    def __str__(self) -> str:
        try:
            since = f"{datetime.fromtimestamp(self.since, UTC).astimezone():%Y-%m-%d %H:%M:%S %z}"
        except (OverflowError, ValueError, OSError):
            since = "a time that is none"
        return f"process {self.pid} on {self.host}, since {since}"


_OWNER = TypeAdapter(Owner)


@dataclass(frozen=True)
class _Held:
    """The newest lease as it stands: owner is None where its file is torn."""

    token: int
    content: bytes
    owner: Owner | None

    @property
    def is_over(self) -> bool:
        return self.owner is not None and self.owner.is_over

    def __str__(self) -> str:
        return str(self.owner) if self.owner else "a process that cannot be read"


def _newest(place: Place) -> _Held | None:
    token = newest_token(place)
    if not token:
        return None
    content = place.read(_name(token)) or b""
    return _Held(token, content, _opened(content))


def _opened(content: bytes) -> Owner | None:
    """The owner that a lease file names; None where it is torn."""
    try:
        return _OWNER.validate_json(content, strict=True)
    except ValidationError:
        return None


def is_lease(name: str) -> bool:
    """Whether a file of that name belongs in the folder of leases."""
    return _NAME.fullmatch(name) is not None


def newest_token(place: Place) -> int:
    """The token of the run's owner, of now or the last one; 0 where it never had one."""
    return max((int(name[:8]) for name in place.names(LEASE) if _NAME.fullmatch(name)), default=0)


def _name(token: int) -> str:
    return f"{LEASE}/{token:08d}.json"


def owner(place: Place) -> Owner | None:
    """Who works at a run at this moment, as far as can be told without waiting."""
    held = _newest(place)
    known = held.owner if held else None
    return known if known is not None and not known.is_over and known.is_fresh else None


def require_owner(place: Place, ours: Owner) -> None:
    """Raise `LeaseLost` if the run has been taken over since, given back or removed; a new run at the same place is
    another's.

    Our own file is read by its name: a listing may miss one that a heartbeat is just replacing. One that is torn is
    ours: the next heartbeat mends it.
    """
    newest, content = newest_token(place), place.read(_name(ours.token))
    known = _opened(content or b"")
    if newest > ours.token or (known is not None and known.nonce != ours.nonce):
        raise LeaseLost(f"{place} is another driver's now (token {newest}, ours was {ours.token})")
    if content is None:
        raise LeaseLost(f"{place} has been removed")
    if known is not None and known.released:
        raise LeaseLost(f"{place} has been given back by the driver of token {ours.token}")


@dataclass
class Lease:
    """A run that is ours, until `lost`, and whose heart beats until it is `over`. made: a run was made under it."""

    place: Place
    owner: Owner
    made: bool = False
    lost: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    _heart: threading.Thread | None = None

    @property
    def token(self) -> int:
        return self.owner.token

    @cached_property
    def _once(self) -> Place:
        """Nobody waits for a heart: it beats again soon."""
        return self.place.once()

    def require(self) -> None:
        """Raise `LeaseLost` if it is not ours any more."""
        require_owner(self.place, self.owner)

    @property
    def guarded(self) -> Place:
        """The place, to be changed only as long as it is ours."""
        return self.place.guarded(functools.partial(require_owner, self._once, self.owner))

    def start(self) -> None:
        """Begin to beat."""
        self._heart = threading.Thread(target=self._live, name="heartbeat", daemon=True)
        self._heart.start()

    def stop(self) -> None:
        """Beat no more."""
        self.over.set()
        if self._heart is not None:
            self._heart.join(BEAT_SECONDS)  # it may hang with the store

    def beat(self) -> None:
        """Tell others that we live; note whether we own the run still."""
        try:
            require_owner(self._once, self.owner)
            self._write(replace(self.owner, at=time.time()))
        except LeaseLost:
            self.lost.set()
        except OSError:  # those who compute meet it too, and speak of it
            pass

    def _live(self) -> None:
        """Beat until it is over or lost."""
        while not self.over.wait(BEAT_SECONDS) and not self.lost.is_set():
            self.beat()

    def give_back(self) -> None:
        _ended.add(self.owner.nonce)
        with contextlib.suppress(OSError, LeaseLost):
            require_owner(self._once, self.owner)
            self._write(replace(self.owner, at=time.time(), released=True))

    def _write(self, owner: Owner) -> None:
        self._once.write(_name(self.token), _OWNER.dump_json(owner, indent=1))


@contextlib.contextmanager
def owned(place: Place) -> Iterator[Lease]:
    """Own a run for as long as the block lasts. Raises `Refused` where another driver does."""
    lease = _acquire(place)
    lease.start()
    try:
        yield lease
    finally:
        lease.stop()
        lease.give_back()


def _acquire(place: Place) -> Lease:
    while True:
        held = _newest(place)
        if held is not None and not held.is_over:
            _outwait(place, held)
        mine = Owner.me(held.token + 1 if held else 1)
        try:
            created = place.create(_name(mine.token), _OWNER.dump_json(mine, indent=1))
            if created:
                _require_exclusive(place, mine.token)
        except BaseException:  # or this process would be told for ever that it works here itself
            _ended.add(mine.nonce)
            raise
        if created:
            if held is not None and not (held.owner and held.owner.released):
                _log.warning("%s: taken over from %s, which left it", place, held)
            return Lease(place, mine)


def _require_exclusive(place: Place, token: int) -> None:
    """Refuse a store that lets two create the same file."""
    if place.create(_name(token), b"{}"):
        place.delete(_name(token))
        raise Refused(
            "run.path",
            given=f"{place}, a store that puts a file over one that is there, though asked not to",
            allowed="a store with conditional puts (If-None-Match), or a file system",
            remedy="bring the store up to date, or give another run.path",
        )


def _outwait(place: Place, held: _Held) -> None:
    """Come back once an owner's heart has stood still for long enough; refuse as soon as it beats."""
    known = held.owner
    if known is not None and known.is_here and (known.is_fresh or known.pid == os.getpid()):
        raise _owned(place, str(held))
    patience = 2 * BEAT_SECONDS if known is not None and known.is_here else EXPIRY_SECONDS  # one clock, then
    _log.warning("%s belongs to %s: watching for %.0f s whether it lives", place, held, patience)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        time.sleep(patience / 20)
        asked = time.monotonic()
        now = _newest(place)
        if now is None or now.is_over:
            return
        if time.monotonic() - asked > BEAT_SECONDS:  # nor could the owner tell that it lives
            deadline = time.monotonic() + patience
        if (now.token, now.content) != (held.token, held.content):
            raise _owned(place, str(now))


def _owned(place: Place, who: str) -> Refused:
    return Refused(
        "run directory",
        given=f"{place}, which {who} works at",
        allowed="one driver a run",
        remedy="let it go on (`sensitivity status` shows how far it is), or end that process first",
    )
