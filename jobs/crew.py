"""The workers of a run on Ray: hired, fed, heard, rescued from and replaced.

Each has at most `DEPTH` calls pending, so the next shard is there when one is done and the driver holds little, however
many shards there are; what the driver does for one does not grow with the number of either.

Ray restarts and retries nothing here: a lost worker is replaced, the shard it was computing counts one attempt, and
those that only waited on it, or were being written, count none.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError

from sensitivity.commits import Commit, Failure, read_commit, record_failure
from sensitivity.lease import Lease
from sensitivity.store import Run

from .actors import Settled
from .deaths import Origin
from .ledger import Attempt, Ledger, Trouble
from .roster import Roster, Seat
from .stopping import Stop

DEPTH, FEW = 2, 8
PATIENCE_SECONDS, LOOK_SECONDS, GROW_SECONDS = 30.0, 1.0, 5.0
LATE, LATE_SECONDS = 3.0, 10.0  # times the usual, and at least so long, before a shard is begun a second time
GIVE_UP_SECONDS = 10.0  # a worker that does not even answer is ended
Outcome = Commit | Failure


@dataclass(eq=False)
class _Copy:
    """A shard that was begun a second time, `at` another worker than its `owner`'s; asked: when that was to give up."""

    owner: Seat
    at: Seat
    asked: float | None = None


class Crew:
    def __init__(self, run: Run, roster: Roster, ledger: Ledger, lease: Lease | None, stop: Stop) -> None:
        self._run, self._roster, self._ledger, self._lease, self._stop = run, roster, ledger, lease, stop
        self._awaited: dict[ray.ObjectRef, tuple[Seat, Callable[[Seat, Any], Iterator[Outcome]]]] = {}
        self._copies: dict[int, _Copy] = {}
        self._recent: deque[float] = deque(maxlen=64)
        self._store_failed: set[str] = set()
        self._returned = False
        self._drained = False
        self._heard = self._grown = time.monotonic()

    def work(self) -> Iterator[Outcome]:
        """Until nothing waits and nothing is computed: a worker that Ray has not started by then is not needed."""
        self._hire()
        while any(seat.hand for seat in self._roster.seats) or (len(self._ledger) and not self._stop.draining):
            answered = self._answered()
            if self._lease is not None and self._lease.lost.is_set():
                self._lease.require()
            for ref in answered:
                yield from self._hear(ref)
            if self._stop.draining and not self._drained:
                self._drain()
            self._look_around(heard=bool(answered))

    def dismiss(self) -> None:
        for seat in self._roster.seats:
            ray.kill(seat.actor)

    # ---- hearing -------------------------------------------------------------------------------

    def _answered(self) -> list[ray.ObjectRef]:
        """All calls that are answered, once one is."""
        refs = list(self._awaited)
        if not refs:
            time.sleep(LOOK_SECONDS / 10)
            return []
        found, _ = ray.wait(refs, num_returns=1, timeout=LOOK_SECONDS)
        if found and len(refs) > FEW:
            found, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        return found

    def _hear(self, ref: ray.ObjectRef) -> Iterator[Outcome]:
        if ref not in self._awaited:  # of a seat that was lost with another of its calls
            return
        seat, handle = self._awaited.pop(ref)
        try:
            answer = ray.get(ref)
        except RayError as error:
            yield from self._lost(seat, error)
            return
        yield from handle(seat, answer)

    def _await(self, seat: Seat, ref: ray.ObjectRef, handle: Callable[[Seat, Any], Iterator[Outcome]]) -> None:
        self._awaited[ref] = seat, handle

    def _hear_settled(self, seat: Seat, answer: Settled) -> Iterator[Outcome]:
        seat.calls.popleft()
        seat.since = time.monotonic()
        for index, outcome in answer:
            yield from self._settle(seat, index, outcome)
        self._attend(seat)

    def _settle(self, seat: Seat, index: int, outcome: Commit | Trouble | None) -> Iterator[Outcome]:
        """Take what has become of a shard at one worker."""
        copy = self._copies.get(index)
        attempt = seat.hand.pop(index, None)
        if attempt is None:  # another has it by now
            return
        if copy is not None and copy.at is seat:
            yield from self._settle_copy(copy, index, outcome)
            return
        if isinstance(outcome, Commit):
            self._recent.append(outcome.seconds)
            self._roster.is_done_with_a_shard()
            self._store_failed.clear()
            self._refuse(index)
            yield outcome
        elif outcome is not None:
            yield from self._failed(seat, attempt, outcome)
        elif not self._promote(attempt):
            self._give_back(attempt)

    def _settle_copy(self, copy: _Copy, index: int, outcome: Commit | Trouble | None) -> Iterator[Outcome]:
        """What was not let write found its shard committed, or failed: its owner is still at it, and will be heard."""
        del self._copies[index]
        attempt = copy.owner.hand[index]
        copy.owner.hand[index] = replace(attempt, failed_at=attempt.failed_at | {copy.at.name})
        if isinstance(outcome, Commit):
            yield from self._settle(copy.owner, index, outcome)

    def _failed(self, seat: Seat, attempt: Attempt, trouble: Trouble) -> Iterator[Outcome]:
        record = read_commit(self._run, attempt.shard)  # it may have died between its commit and its answer
        if record is not None:
            self._refuse(attempt.shard.index)
            yield record
            return
        if trouble.blames in ("store", "lease"):
            if not self._promote(attempt):
                self._give_back(attempt, seat.name)
            self._store_failed.add(seat.name)
            if trouble.blames == "lease" or self._store_failed >= {seat.name for seat in self._roster.seats}:
                trouble.require_shard()
            return
        failure = self._ledger.fail(attempt, trouble, seat.name)
        record_failure(self._run, failure)
        if failure.given_up:
            self._refuse(attempt.shard.index)
        elif attempt.shard.index in self._copies:
            self._promote(self._ledger.take_again(attempt.shard))
        self._returned = True
        yield failure

    def _give_back(self, attempt: Attempt, worker: str | None = None) -> None:
        self._ledger.give_back(attempt, worker)
        self._returned = True

    # ---- feeding -------------------------------------------------------------------------------

    def _attend(self, seat: Seat) -> None:
        """Keep a worker's window of pending calls full; near the end one at a time: nobody waits for another."""
        if seat not in self._roster.seats or not seat.ready:
            return
        depth = DEPTH if len(self._ledger) > self._roster.count else 1
        while not self._stop.draining and len(seat.calls) < depth:
            attempt = self._ledger.take(seat.name)
            if attempt is None:
                break
            self._give(seat, attempt)
        if not seat.calls and any(not self._is_held(seat, index) for index in seat.hand):
            seat.calls.append(None)
            self._await(seat, seat.actor.finish.remote(), self._hear_settled)

    def _is_held(self, seat: Seat, index: int) -> bool:
        copy = self._copies.get(index)
        return copy is not None and copy.at is seat

    def _give(self, seat: Seat, attempt: Attempt, *, held: bool = False) -> None:
        if not seat.calls:
            seat.since = time.monotonic()
        seat.calls.append(attempt)
        seat.hand[attempt.shard.index] = attempt
        self._await(seat, seat.actor.compute.remote(attempt.shard, attempt.number, held), self._hear_settled)

    def _attend_all(self, *, patient: bool = True) -> None:
        """A shard that failed at every worker at hand waits, while we are patient, for one that is being started."""
        ready = [seat for seat in self._roster.seats if seat.ready]
        for seat in ready:
            self._attend(seat)
        if self._stop.draining or not ready or any(seat.calls or seat.hand for seat in ready):
            return
        if patient and len(ready) < len(self._roster.seats):
            return
        attempt = self._ledger.take()
        if attempt is not None:
            self._give(ready[0], attempt)

    def _look_around(self, *, heard: bool) -> None:
        """What no answer tells of: who is idle, late, gone or new."""
        now = time.monotonic()
        if heard:
            self._heard = now
        if self._returned or not heard:
            self._returned = False
            self._attend_all()
        if not len(self._ledger) and not self._stop.draining:
            self._rescue(now)
        if now - self._grown > GROW_SECONDS:
            self._grown = now
            self._grow()
        if now - self._heard > PATIENCE_SECONDS:
            self._heard = now
            self._roster.look()
            self._attend_all(patient=False)

    def _drain(self) -> None:
        """Have shards in hand finished, and no others begun."""
        self._drained = True
        for index in list(self._copies):
            self._refuse(index)
        for seat in self._roster.seats:
            seat.actor.drain.remote()

    # ---- shards that are late ------------------------------------------------------------------

    def _rescue(self, now: float) -> None:
        """Begin shards a second time that take far longer than others, at workers that have nothing else to do."""
        for copy in self._copies.values():
            if copy.asked is not None and now - copy.asked > GIVE_UP_SECONDS:
                copy.asked, copy.owner.ended = None, True
                ray.kill(copy.owner.actor)
        if not self._recent:
            return
        limit = now - max(LATE * statistics.median(self._recent), LATE_SECONDS)
        idle = [seat for seat in self._roster.seats if seat.ready and not seat.calls and not seat.hand]
        late = [seat for seat in self._roster.seats if seat.calls and seat.since < limit]
        for owner in sorted(late, key=lambda seat: seat.since):
            for attempt in [one for one in owner.hand.values() if one.shard.index not in self._copies]:
                fit = next((seat for seat in idle if seat.name not in attempt.failed_at), None)
                if fit is not None:
                    idle.remove(fit)
                    self._begin_copy(owner, fit, attempt)

    def _begin_copy(self, owner: Seat, seat: Seat, attempt: Attempt) -> None:
        self._copies[attempt.shard.index] = _Copy(owner, seat)
        self._give(seat, attempt, held=True)
        self._ask_whether_ready(seat, attempt.shard.index)

    def _ask_whether_ready(self, seat: Seat, index: int) -> None:
        self._await(seat, seat.actor.ready.remote(index), functools.partial(self._hear_ready, index))

    def _hear_ready(self, index: int, seat: Seat, is_ready: bool) -> Iterator[Outcome]:
        """A second worker has results; the first is asked to write no more."""
        copy = self._copies.get(index)
        if copy is None or copy.at is not seat:
            return
        if not is_ready:
            self._ask_whether_ready(seat, index)
            return
        copy.asked = time.monotonic()
        self._await(copy.owner, copy.owner.actor.give_up.remote(index), functools.partial(self._hear_given_up, index))
        yield from ()

    def _hear_given_up(self, index: int, owner: Seat, gave_up: bool) -> Iterator[Outcome]:
        if not gave_up:
            self._refuse(index)
            return
        attempt = owner.hand.pop(index, None)
        if attempt is not None and not self._promote(attempt):
            self._give_back(attempt)
        yield from ()

    def _promote(self, attempt: Attempt | None) -> bool:
        """Let the second worker write, as the only one; False where there is none."""
        copy = self._copies.pop(attempt.shard.index, None) if attempt else None
        if attempt is None or copy is None:
            return False
        copy.at.hand[attempt.shard.index] = attempt
        copy.at.actor.let.remote(attempt.shard.index)
        self._attend(copy.at)
        return True

    def _refuse(self, index: int) -> None:
        """Have the second worker write nothing, if there is one."""
        copy = self._copies.pop(index, None)
        if copy is not None:
            copy.at.hand.pop(index, None)
            copy.at.actor.give_up.remote(index)

    # ---- hiring and losing ---------------------------------------------------------------------

    def _hire(self) -> None:
        """As many as there is work for."""
        in_hand = sum(len(seat.hand) for seat in self._roster.seats)
        for _ in range(0 if self._stop.draining else self._roster.room(len(self._ledger) + in_hand)):
            seat, origin = self._roster.hire()
            self._await(seat, origin, self._hear_origin)

    def _hear_origin(self, seat: Seat, origin: Origin) -> Iterator[Outcome]:
        self._await(seat, self._roster.set_up(seat, origin), self._hear_set_up)
        yield from ()

    def _hear_set_up(self, seat: Seat, _: None) -> Iterator[Outcome]:
        self._roster.is_ready(seat)
        self._attend(seat)
        self._hire()
        yield from ()

    def _grow(self) -> None:
        """Nodes may have come or gone."""
        for seat in self._roster.count_anew():
            self._forget(seat)
            self._roster.leave(seat)
        self._hire()

    def _forget(self, seat: Seat) -> None:
        self._awaited = {ref: awaited for ref, awaited in self._awaited.items() if awaited[0] is not seat}

    def _lost(self, seat: Seat, error: RayError) -> Iterator[Outcome]:
        """Put a new worker in the seat of one that is lost; the shard it was computing counts an attempt."""
        self._forget(seat)
        self._roster.lose(seat, error)
        trouble = replace(Trouble.of(error), blames="worker")
        current = None if seat.ended else seat.current
        for index, attempt in reversed(list(seat.hand.items())):
            copy = self._copies.get(index)
            if copy is not None and copy.at is seat:
                del self._copies[index]
            elif attempt is current:
                yield from self._failed(seat, attempt, trouble)
            else:
                yield from self._recovered(attempt)
        self._hire()

    def _recovered(self, attempt: Attempt) -> Iterator[Outcome]:
        """A shard that only waited on a worker that is lost, or was being written: it may be committed."""
        record = read_commit(self._run, attempt.shard)
        if record is not None:
            self._refuse(attempt.shard.index)
            yield record
        elif not self._promote(attempt):
            self._give_back(attempt)
