"""Who works: workers hired where nodes have room, and what follows from those who are lost."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from sensitivity import patience
from sensitivity.errors import Refused
from sensitivity.placement import Node, described, fit, memory_on
from sensitivity.plan import Workers
from sensitivity.setting import Choice
from sensitivity.store import Run

from .actors import CONTROL, ShardWorker
from .deaths import Origin, died_by_itself, was_for_memory
from .ledger import Attempt, WorkersLost
from .resources import MEMORY_SHARE

LOST_WHILE_STARTING = 3  # answers in a row that a worker cannot be set up
DIED_WHILE_STARTING = 6  # workers in a row that die of it, each but the first with calls of half the size


in_actor: Any = ray.remote(concurrency_groups={CONTROL: 4})  # type: ignore[call-overload]


@dataclass(frozen=True)
class Demand:
    """What workers to have: of that size and so many.

    nodes: those that are there, by Ray's id. joined: they are a cluster's, and a worker takes what memory there is for
    it on its own. least: workers are as many as nodes have room for at any time, with at least so many bytes each.
    comes_later: nodes are added for workers that wait.
    """

    workers: Workers
    nodes: Callable[[], Mapping[str, Node]]
    joined: bool = False
    least: int | None = None
    comes_later: bool = False

    @property
    def size(self) -> Workers:
        """What a worker asks a node for."""
        return self.workers if self.least is None else replace(self.workers, memory=self.least)


@dataclass(eq=False)
class Seat:
    """One worker's place. calls: not answered yet, in order; None: to finish. hand: shards that it was given and that
    are not settled, by call, in order. since: when what it does now was begun. ended: by us; guilty: of what it
    computes, if it is lost.
    """

    name: str
    actor: ActorHandle
    halvings: int = 0
    origin: Origin | None = None
    ready: bool = False
    ended: bool = False
    guilty: bool = True
    calls: deque[int | None] = field(default_factory=deque)
    hand: dict[int, Attempt] = field(default_factory=dict)
    since: float = 0.0

    @property
    def current(self) -> int | None:
        """The call that it computes, or where nothing is left to compute, writes."""
        return next((call for call in self.calls if call is not None), next(iter(self.hand), None))

    @property
    def is_idle(self) -> bool:
        return self.ready and not self.calls and not self.hand


class Roster:
    def __init__(self, run: Run, choice: Choice, demand: Demand) -> None:
        self._run, self._choice, self._demand = run, choice, demand
        self.seats: list[Seat] = []
        self.count = demand.workers.count
        self.replaced = 0
        self.halvings = 0
        self._nodes = demand.nodes()
        self._actor: Any = None
        self._hired = self._died = self._lost_while_starting = self._died_while_starting = 0

    def room(self, shards: int) -> int:
        """How many more to hire for so many shards that are left. The first of an unknown kind finds its setting and
        keeps it; the others then start at once.
        """
        scout = self._choice.by == "rule" and not any(seat.ready for seat in self.seats)
        return max(0, min(1 if scout else self.count, shards) - len(self.seats))

    def hire(self) -> tuple[Seat, ray.ObjectRef]:
        """A new worker, and its answer where it is."""
        if self._actor is None:
            self._actor, self._at_hand = in_actor(ShardWorker), (ray.put(self._run), ray.put(self._choice))
        size = self._demand.size
        options: dict[str, Any] = {"num_cpus": size.cpus, "num_gpus": size.gpus}
        if self._demand.joined:
            options["memory"] = math.ceil(size.memory / MEMORY_SHARE)  # Ray counts all that a node has
        elif self._run.job.run.memory_bytes or self._places() >= self._demand.workers.count:
            options["memory"] = size.memory  # where Ray counts as much
        remote = self._actor.options(scheduling_strategy="SPREAD", max_restarts=0, max_task_retries=0, **options)
        actor = remote.remote(*self._at_hand, self.halvings, patience.seconds())
        seat = Seat(f"worker {self._hired}", actor, self.halvings)
        self.seats.append(seat)
        self._hired += 1
        return seat, actor.origin.remote()

    def _places(self) -> int:
        return sum(fit(node, self._demand.size) for node in self._nodes.values())

    def set_up(self, seat: Seat, origin: Origin) -> ray.ObjectRef:
        """Have a worker get ready, with what memory there is for it on its node."""
        seat.origin = origin
        here = self._demand.workers
        if origin.node not in self._nodes:
            self._nodes = self._demand.nodes()
        node = self._nodes.get(origin.node) if self._demand.joined else None
        if node is not None:
            here = replace(here, memory=memory_on(node, self._demand.size))
        return seat.actor.set_up.remote(here)

    def is_ready(self, seat: Seat) -> None:
        seat.ready, self._lost_while_starting, self._died_while_starting = True, 0, 0

    def count_anew(self) -> list[Seat]:
        """Have as many workers as nodes have room for now; those that wait for more."""
        self._nodes = self._demand.nodes()
        if self._demand.least is not None:
            self.count = max(1, self._places())
        waiting = [seat for seat in self.seats if seat.origin is None]
        return waiting[: max(0, len(self.seats) - self.count)]

    def leave(self, seat: Seat) -> None:
        self.seats.remove(seat)
        ray.kill(seat.actor)  # it may be unreachable and yet hold its cores

    def lose(self, seat: Seat, error: RayError) -> None:
        """A worker is gone. Raises `WorkersLost`, or what is refused, where others would fare no better."""
        self.replaced += 1
        self.leave(seat)
        died = died_by_itself(error) and not seat.ended
        if died:
            counts = seat.halvings == self.halvings  # to ask takes time
            self.halve_calls(seat, was_for_memory(error, seat.origin) if counts else None)
        if not seat.ready:
            self._lost_while_starting += not died
            self._require_hope(error)

    def halve_calls(self, seat: Seat, for_memory: bool | None) -> None:
        """Where a worker died for want of memory, or, where that is not known, from the second death on with no shard
        done in between. Those hired together count as one.
        """
        if seat.halvings == self.halvings:
            self._died_while_starting += not seat.ready
            self.halvings += self._died > 0 if for_memory is None else for_memory
        self._died += 1

    def is_done_with_a_shard(self) -> None:
        self._died = 0

    def _require_hope(self, error: RayError) -> None:
        """Raise where workers have been lost before their first shard once too often."""
        if self._lost_while_starting < LOST_WHILE_STARTING and self._died_while_starting < DIED_WHILE_STARTING:
            return
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, Refused):
            raise cause from error
        lost = self._lost_while_starting + self._died_while_starting
        raise WorkersLost(f"{lost} workers in a row could not be set up: {cause}") from error

    def look(self) -> None:
        """After a long silence. Raises `WorkersLost` where there is no node to wait for."""
        if not self._demand.nodes() and not self._demand.comes_later:
            raise WorkersLost("Ray has lost its last node")
        if not any(seat.ready for seat in self.seats):
            what = ", the first of which times kernels" if self._choice.by == "rule" else ""
            size = described(self._demand.workers)
            print(f"waiting for {len(self.seats)} of Ray's workers to start ({size} each){what}", file=sys.stderr)
