"""A crew whose workers are slow, hang, fail and die in any order: every shard comes to one end, and has one writer.

Real threads in place of Ray: the crew, its ledger, the actors' class and the gates are the product's own.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from jobs import actors, crew, roster
from jobs.actors import ShardWorker
from jobs.crew import Crew
from jobs.deaths import Origin
from jobs.ledger import Ledger
from jobs.roster import Demand, Roster
from jobs.stopping import Stop
from sensitivity.commits import Commit, Failure
from sensitivity.patience import StoreFailed
from sensitivity.placement import Node
from sensitivity.plan import Layout, Shard, Workers
from sensitivity.writing import Gate, InBackground

SHARDS = 16
LIMIT = 180.0  # seconds, after which a run hangs
HASTE = {"LOOK_SECONDS": 0.02, "GROW_SECONDS": 0.05, "PATIENCE_SECONDS": 0.3, "LATE": 1.5, "LATE_SECONDS": 0.03}
HASTE |= {"GIVE_UP_SECONDS": 0.2, "STUCK": 10.0, "STUCK_SECONDS": 0.5}


class Killed(BaseException):
    """A worker's process is gone."""


class Store:
    """Who wrote each chunk last, and which shards are committed by whom; says what must never happen."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.chunks: dict[tuple[int, int], object] = {}
        self.commits: dict[int, Commit] = {}
        self.wrong: list[str] = []

    def write(self, shard: int, chunk: int, who: object) -> None:
        with self.lock:
            if shard in self.commits:
                self.wrong.append(f"chunk {chunk} of shard {shard} was written after its commit")
            self.chunks[shard, chunk] = who

    def commit(self, shard: Shard, chunks: int, who: object, attempt: int) -> Commit:
        with self.lock:
            if {self.chunks.get((shard.index, chunk)) for chunk in range(chunks)} != {who}:
                self.wrong.append(f"shard {shard.index} has chunks of several workers")
            now = time.time()
            record = Commit(
                shard.index, shard.start, shard.stop, "", {}, 1, 0, 0, attempt, "", 0, now - 0.01, now, 0, {}
            )
            return self.commits.setdefault(shard.index, record)

    def read(self, _: object, shard: Shard) -> Commit | None:
        with self.lock:
            return self.commits.get(shard.index)


class Computer:
    """In place of `Worker`: a shard has up to three chunks, and anything may happen at any of them."""

    def __init__(self, store: Store, actor: FakeActor, chance: random.Random, odds: dict[str, float]) -> None:
        self._store, self._actor, self._chance, self._odds = store, actor, chance, odds
        self._writer = InBackground()

    def begin(self, shard: Shard, attempt: int, gate: Gate) -> Future[Commit]:
        record = self._store.read(None, shard)
        if record is not None:
            done: Future[Commit] = Future()
            done.set_result(record)
            return done
        who, chunks = object(), 1 + shard.index % 3
        written = []
        for chunk in range(chunks):
            self._meet(shard, ("fail", "die", "hang", "slow"))
            written.append(self._writer.hand_over(self._write, gate, shard, chunk, who))
        return self._writer.hand_after(self._finish, gate, shard, chunks, who, attempt, written)

    def _meet(self, shard: Shard, fates: tuple[str, ...]) -> None:
        self._actor.require_life()
        time.sleep(0.001)
        for fate in fates:
            if self._chance.random() < self._odds.get(fate, 0.0):
                getattr(self, f"_{fate}")()
        self._actor.require_life()

    def _fail(self) -> None:
        raise RuntimeError("a shard of no luck")

    def _die(self) -> None:
        self._actor.die()

    def _hang(self) -> None:
        self._actor.dead.wait(LIMIT)

    def _slow(self) -> None:
        time.sleep(self._chance.uniform(0.03, 0.12))

    def _away(self) -> None:
        raise StoreFailed("the store is away")

    def _write(self, gate: Gate, shard: Shard, chunk: int, who: object) -> None:
        with gate.passed():
            self._meet(shard, ("slow", "away"))
            self._store.write(shard.index, chunk, who)

    def _finish(
        self, gate: Gate, shard: Shard, chunks: int, who: object, attempt: int, written: list[Future[None]]
    ) -> Commit:
        for chunk in written:
            chunk.result()
        with gate.passed(last=True):
            self._meet(shard, ("slow", "die"))
            return self._store.commit(shard, chunks, who, gate.attempt or attempt)


class FakeActor:
    """A process with a thread for shards and some for control, which may end at any time."""

    def __init__(self, computer: Callable[[FakeActor], Computer]) -> None:
        self.dead = threading.Event()
        self._inner: Any = ShardWorker(None, None, 0, 3.0)
        self._inner._worker = computer(self)
        self._main, self._control = ThreadPoolExecutor(1), ThreadPoolExecutor(4)
        self._asked: list[Future[Any]] = []
        self._lock = threading.Lock()

    def require_life(self) -> None:
        if self.dead.is_set():
            raise Killed

    def die(self) -> None:
        with self._lock:
            self.dead.set()
            for asked in self._asked:
                with suppress(InvalidStateError):
                    asked.set_exception(ActorDiedError())

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *arguments: self._ask(name, arguments))

    def _ask(self, name: str, arguments: tuple[Any, ...]) -> Future[Any]:
        asked: Future[Any] = Future()
        with self._lock:
            self._asked.append(asked)
            if self.dead.is_set():
                asked.set_exception(ActorDiedError())
                return asked
        control = name in ("ready", "let", "give_up", "drain")
        (self._control if control else self._main).submit(self._answer, asked, name, arguments)
        return asked

    def _answer(self, asked: Future[Any], name: str, arguments: tuple[Any, ...]) -> None:
        known = {"origin": lambda: Origin("node", None), "set_up": lambda _: None}
        try:
            answer = known[name](*arguments) if name in known else getattr(self._inner, name)(*arguments)
        except Killed:
            return
        with suppress(InvalidStateError):
            asked.set_result(answer)


class FakeRay:
    """What the crew asks of Ray."""

    ObjectRef = Future
    put = staticmethod(lambda what: what)
    get = staticmethod(lambda ref: ref.result(LIMIT))
    kill = staticmethod(lambda actor: actor.die())

    @staticmethod
    def wait(refs: list[Future[Any]], num_returns: int, timeout: float) -> tuple[list[Future[Any]], list[Future[Any]]]:
        done, _ = wait(refs, timeout, FIRST_COMPLETED)
        found = [ref for ref in refs if ref in done]
        return found[:num_returns], []


@contextmanager
def simulated(monkeypatch, chance: random.Random, odds: dict[str, float], stop: Stop) -> Iterator[tuple[Crew, Store]]:
    store, hired = Store(), []

    def hire(*_: object) -> FakeActor:
        hired.append(FakeActor(lambda actor: Computer(store, actor, random.Random(chance.random()), odds)))
        return hired[-1]

    for module in (crew, roster):
        monkeypatch.setattr(module, "ray", FakeRay)
    for name, value in HASTE.items():
        monkeypatch.setattr(crew, name, value)
    monkeypatch.setattr(actors, "ANSWER_SECONDS", 0.02)
    monkeypatch.setattr(crew, "read_commit", store.read)
    monkeypatch.setattr(crew, "record_failure", lambda *_: None)
    monkeypatch.setattr(roster, "was_for_memory", lambda *_: False)
    monkeypatch.setattr(roster, "in_actor", lambda _: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=hire)))
    run: Any = SimpleNamespace(job=SimpleNamespace(run=SimpleNamespace(memory_bytes=None)))
    demand = Demand(Workers(4, 1, 0, 10**9), lambda: {"node": Node(4, 0, 10**10)})
    deadline = time.monotonic() + LIMIT

    def tick() -> None:
        assert time.monotonic() < deadline, "the run does not end"

    choice: Any = SimpleNamespace(by="given")
    ledger = Ledger(Layout(SHARDS, 1, 1, 1).shards())
    try:
        yield Crew(run, Roster(run, choice, demand), ledger, None, stop, tick), store
    finally:
        for actor in hired:
            actor.die()


def ends(outcomes: list[Commit | Failure]) -> Counter[int]:
    return Counter(one.shard for one in outcomes if isinstance(one, Commit) or one.given_up)


def heard(work: Crew) -> tuple[list[Commit | Failure], bool]:
    """What a run says until it ends, and whether it ends for want of a store."""
    outcomes = []
    try:
        for outcome in work.work():
            outcomes.append(outcome)
    except StoreFailed:
        return outcomes, True
    return outcomes, False


ODDS = {
    "slow": {"slow": 0.25},
    "dying": {"slow": 0.1, "die": 0.05},
    "hanging": {"slow": 0.1, "hang": 0.04},
    "failing": {"slow": 0.2, "fail": 0.1},
    "everything": {"slow": 0.1, "fail": 0.05, "die": 0.03, "hang": 0.03, "away": 0.03},
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("odds", ODDS)
def test_every_shard_comes_to_one_end_and_has_one_writer(monkeypatch, odds, seed):
    chance = random.Random(f"{odds} {seed}")
    with simulated(monkeypatch, chance, ODDS[odds], Stop()) as (work, store):
        outcomes, away = heard(work)
    assert store.wrong == []
    assert set(ends(outcomes).values()) <= {1}
    if away:  # the store failed every worker there was
        assert "away" in ODDS[odds]
        return
    assert set(ends(outcomes)) == set(range(SHARDS))
    committed = {one.shard for one in outcomes if isinstance(one, Commit)}
    assert committed == set(store.commits)
    assert work._copies == {}


@pytest.mark.parametrize("seed", range(6))
def test_what_is_begun_is_finished_when_asked_to_end(monkeypatch, seed):
    stop = Stop()
    with simulated(monkeypatch, random.Random(seed), {"slow": 0.3, "die": 0.02}, stop) as (work, store):
        outcomes = []
        for outcome in work.work():
            outcomes.append(outcome)
            stop.draining = len(outcomes) >= 4
        assert store.wrong == []
        assert {one.shard for one in outcomes if isinstance(one, Commit)} == set(store.commits)
        assert set(ends(outcomes).values()) == {1}
        assert 4 <= len(outcomes) < SHARDS
