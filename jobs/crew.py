"""The workers of a run on Ray: hired, fed, heard, rescued from and replaced.

Each has at most `DEPTH` calls pending, so the next shard is there when one is done and the driver holds little, however
many shards there are. It looks at all workers once for all answers that are there, so that many cost little more.

Ray restarts and retries nothing here: a lost worker is replaced, the shard it was computing counts one attempt, and
those that only waited on it, or were being written, count none.
"""

from __future__ import annotations

import functools
import itertools
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

DEPTH = 2
FEW = 8  # calls: of more, it pays to ask again which others are answered by now
PATIENCE_SECONDS, LOOK_SECONDS, GROW_SECONDS = 30.0, 1.0, 5.0
LATE, LATE_SECONDS = 3.0, 10.0  # times the usual, and at least so long, before a shard is begun a second time
GIVE_UP_SECONDS = 10.0  # a worker that does not even answer is ended
STUCK, STUCK_SECONDS = 20.0, 600.0  # the same, before one of those is ended of whom none has been heard
Outcome = Commit | Failure


@dataclass(eq=False)
class _Copy:
    """A shard that was begun a second time: `of` is its owner's call, `call` that `at` another worker. asked: when the
    owner was to give up.
    """

    owner: Seat
    of: int
    at: Seat
    call: int
    asked: float | None = None


class Crew:
    def __init__(
        self,
        run: Run,
        roster: Roster,
        ledger: Ledger,
        lease: Lease | None,
        stop: Stop,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """tick: is called at least once a second."""
        self._run, self._roster, self._ledger, self._lease, self._stop = run, roster, ledger, lease, stop
        self._tick, self._numbers = tick, itertools.count()
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
        for call, outcome in answer:
            yield from self._settle(seat, call, outcome)
        self._attend(seat)

    def _settle(self, seat: Seat, call: int, outcome: Commit | Trouble | None) -> Iterator[Outcome]:
        """Take what has become of a shard at one worker."""
        attempt = seat.hand.pop(call, None)
        if attempt is None:  # another has it by now
            return
        copy = self._copies.get(attempt.shard.index)
        if copy is not None and copy.at is seat:
            yield from self._settle_copy(copy, outcome)
        elif isinstance(outcome, Commit):
            yield from self._done(outcome)
        elif outcome is not None:
            yield from self._failed(seat, attempt, outcome)
        elif not self._promote(attempt):
            self._give_back(attempt)

    def _done(self, record: Commit) -> Iterator[Outcome]:
        self._recent.append(record.seconds)
        self._roster.is_done_with_a_shard()
        self._store_failed.clear()
        self._refuse(record.shard)
        yield record

    def _settle_copy(self, copy: _Copy, outcome: Commit | Trouble | None) -> Iterator[Outcome]:
        """What was not let write found its shard committed, or failed: its owner is still at it, and will be heard."""
        attempt = copy.owner.hand[copy.of]
        del self._copies[attempt.shard.index]
        if isinstance(outcome, Commit):
            del copy.owner.hand[copy.of]
            yield from self._done(outcome)
        elif outcome is not None:
            copy.owner.hand[copy.of] = replace(attempt, failed_at=attempt.failed_at | {copy.at.name})

    def _failed(self, seat: Seat, attempt: Attempt, trouble: Trouble) -> Iterator[Outcome]:
        record = read_commit(self._run, attempt.shard)  # it may have died between its commit and its answer
        if record is not None:
            yield from self._done(record)
            return
        if trouble.blames in ("store", "lease"):
            if not self._promote(attempt):
                self._give_back(attempt, seat.name)
            self._store_failed.add(seat.name)
            if trouble.blames == "lease" or self._store_failed >= {one.name for one in self._roster.seats if one.ready}:
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
        if not seat.calls and any(not self._is_held(seat, attempt) for attempt in seat.hand.values()):
            seat.calls.append(None)
            self._await(seat, seat.actor.finish.remote(), self._hear_settled)

    def _is_held(self, seat: Seat, attempt: Attempt) -> bool:
        copy = self._copies.get(attempt.shard.index)
        return copy is not None and copy.at is seat

    def _give(self, seat: Seat, attempt: Attempt, *, held: bool = False) -> int:
        if not seat.calls:
            seat.since = time.monotonic()
        call = next(self._numbers)
        seat.calls.append(call)
        seat.hand[call] = attempt
        self._await(seat, seat.actor.compute.remote(call, attempt.shard, attempt.number, held), self._hear_settled)
        return call

    def _attend_all(self, *, patient: bool = True) -> None:
        """A shard that failed at every worker at hand waits, while we are patient, for one that is being started."""
        ready = [seat for seat in self._roster.seats if seat.ready]
        for seat in ready:
            self._attend(seat)
        if self._stop.draining or any(seat.hand for seat in ready):
            return
        if patient and len(ready) < len(self._roster.seats):
            return
        idle = next((seat for seat in ready if seat.is_idle), None)
        attempt = self._ledger.take() if idle else None
        if idle and attempt:
            self._give(idle, attempt)

    def _look_around(self, *, heard: bool) -> None:
        """What no answer tells of: who is idle, late, gone or new."""
        now = time.monotonic()
        if heard:
            self._heard = now
        if self._returned or not heard:
            self._returned = False
            self._attend_all()
        if not self._stop.draining:
            self._rescue(now)
        self._tick()
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
                copy.asked = None
                self._end(copy.owner, guilty=False)
        if not self._recent:
            return
        usual = statistics.median(self._recent)
        busy = [seat for seat in self._roster.seats if seat.calls and not seat.ended]
        late = [seat for seat in busy if seat.since < now - max(LATE * usual, LATE_SECONDS)]
        idle = [seat for seat in self._roster.seats if seat.is_idle]
        self._end_the_stuck(late, now - max(STUCK * usual, STUCK_SECONDS))
        for owner in sorted(late, key=lambda seat: seat.since) if idle else ():
            for call, attempt in list(owner.hand.items()):
                fit = next((seat for seat in idle if seat.name not in attempt.failed_at), None)
                if fit is not None and attempt.shard.index not in self._copies:
                    idle.remove(fit)
                    self._begin_copy(owner, call, attempt, fit)

    def _end_the_stuck(self, late: list[Seat], limit: float) -> None:
        """Those that gave up what they had make room for others; where nobody gets on, the first of them has to."""
        for seat in late:
            if not seat.hand and len(self._ledger):
                self._end(seat, guilty=False)
        at_work = [seat for seat in self._roster.seats if seat.calls]
        if at_work and all(seat.since < limit and not seat.ended for seat in at_work):
            self._end(min(at_work, key=lambda seat: seat.since), guilty=True)

    def _end(self, seat: Seat, *, guilty: bool) -> None:
        seat.ended, seat.guilty = True, guilty
        ray.kill(seat.actor)

    def _begin_copy(self, owner: Seat, of: int, attempt: Attempt, seat: Seat) -> None:
        copy = _Copy(owner, of, seat, self._give(seat, attempt, held=True))
        self._copies[attempt.shard.index] = copy
        self._ask_whether_ready(copy)

    def _ask_whether_ready(self, copy: _Copy) -> None:
        self._await(copy.at, copy.at.actor.ready.remote(copy.call), functools.partial(self._hear_ready, copy))

    def _hear_ready(self, copy: _Copy, _: Seat, is_ready: bool) -> Iterator[Outcome]:
        """A second worker has results; the first is asked to write no more."""
        if copy in self._copies.values():
            self._ask_to_give_up(copy) if is_ready else self._ask_whether_ready(copy)
        yield from ()

    def _ask_to_give_up(self, copy: _Copy) -> None:
        copy.asked = time.monotonic()
        handle = functools.partial(self._hear_given_up, copy)
        self._await(copy.owner, copy.owner.actor.give_up.remote(copy.of), handle)

    def _hear_given_up(self, copy: _Copy, owner: Seat, gave_up: bool | None) -> Iterator[Outcome]:
        attempt = owner.hand.get(copy.of)
        if attempt is None:  # it was heard of meanwhile
            return
        if gave_up:
            del owner.hand[copy.of]
            yield from self._recovered(attempt)
        elif copy in self._copies.values():
            if gave_up is None:  # it writes, and may be about to end
                self._ask_to_give_up(copy)
            else:
                self._refuse(attempt.shard.index)

    def _promote(self, attempt: Attempt | None) -> bool:
        """Let the second worker write, as the only one; False where there is none."""
        copy = self._copies.pop(attempt.shard.index, None) if attempt else None
        if attempt is None or copy is None:
            return False
        copy.at.hand[copy.call], copy.at.since = attempt, time.monotonic()
        copy.at.actor.let.remote(copy.call, attempt.number)
        self._attend(copy.at)
        return True

    def _refuse(self, index: int) -> None:
        """Have the second worker write nothing, if there is one."""
        copy = self._copies.pop(index, None)
        if copy is not None:
            copy.at.hand.pop(copy.call, None)
            copy.at.actor.give_up.remote(copy.call)

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
        current = seat.current if seat.guilty else None
        for call, attempt in reversed(list(seat.hand.items())):
            if self._is_held(seat, attempt):
                del self._copies[attempt.shard.index]
            elif call == current:
                yield from self._failed(seat, attempt, trouble)
            else:
                yield from self._recovered(attempt)
        self._grow()

    def _recovered(self, attempt: Attempt) -> Iterator[Outcome]:
        """A shard that a worker gave up, or did not come to: it may be committed."""
        record = read_commit(self._run, attempt.shard)
        if record is not None:
            yield from self._done(record)
        elif not self._promote(attempt):
            self._give_back(attempt)
