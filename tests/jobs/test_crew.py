"""Ray's workers: what they are given, and what follows when they are lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import ray

from jobs import deaths
from jobs.deaths import Origin
from jobs.prepare import prepare
from jobs.roster import Demand, Roster, Seat
from sensitivity.job import Job
from sensitivity.placement import Node
from sensitivity.plan import Workers


@pytest.mark.parametrize(
    ("for_memory", "expected"),
    [(None, [0, 1, 1, 1, 2, 2, 2, 2]), (True, [1, 1, 1, 1, 2, 2, 2, 2]), (False, [0] * 8)],
    ids=["not known", "memory", "something else"],
)
def test_of_workers_that_die_together_one_counts(for_memory, expected):
    roster = Roster(None, None, Demand(Workers(4, 1, 0, 10**9), dict))
    first, second = ([Seat("", None, halvings, ready=True) for _ in range(4)] for halvings in (0, 1))
    halvings = []
    for seat in [*first, *second]:
        roster.halve_calls(seat, for_memory)
        halvings.append(roster.halvings)
    assert halvings == expected


@pytest.mark.parametrize(
    ("error", "died"),
    [
        (ray.exceptions.OutOfMemoryError("the node ran low on memory"), True),
        (ray.exceptions.ActorDiedError(), True),
        (ray.exceptions.RayTaskError("set_up", "", ValueError("no")), False),
        (ray.exceptions.ActorUnavailableError("no answer", None), False),
    ],
)
def test_a_death_is_told_from_other_losses(error, died):
    assert deaths.died_by_itself(error) is died


def test_a_death_for_memory_is_told_by_the_kernels_count(ray_session):
    origin = Origin.here()
    error = ray.exceptions.ActorDiedError()
    assert deaths.was_for_memory(error, origin) is False
    assert deaths.was_for_memory(error, replace(origin, killed=origin.killed - 1)) is True
    assert deaths.was_for_memory(error, replace(origin, killed=None)) is None
    assert deaths.was_for_memory(error, replace(origin, node="0" * 56)) is None
    assert deaths.was_for_memory(error, None) is None
    assert deaths.was_for_memory(ray.exceptions.OutOfMemoryError("low"), origin) is True


def test_a_workers_memory_is_no_more_than_a_node_has(write_job):
    even, uneven = [Node(8, 0, 64 * 10**9)], [Node(2, 0, 16 * 10**9)] * 4
    job = Job.load(write_job(run={"workers": 2, "shard_windows": 10}))
    assert prepare(job, even).plan.workers.memory == 32 * 10**9
    assert prepare(job, uneven).plan.workers.memory == 16 * 10**9
