"""Ray's workers: what they are given, and what follows when they are lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import ray

from jobs import deaths, ray_runner
from jobs.deaths import Origin
from jobs.prepare import prepare
from jobs.resources import Resources
from jobs.stopping import Stop
from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.plan import Workers


@pytest.mark.parametrize(
    ("for_memory", "expected"),
    [(None, [0, 1, 1, 1, 2, 2, 2, 2]), (True, [1, 1, 1, 1, 2, 2, 2, 2]), (False, [0] * 8)],
    ids=["not known", "memory", "something else"],
)
def test_of_workers_that_die_together_one_counts(for_memory, expected):
    crew = ray_runner._Crew(None, None, Workers(4, 1, 0, 10**9), None, Stop())
    first, second = ([ray_runner._Seat("", None, None, None, halvings) for _ in range(4)] for halvings in (0, 1))
    halvings = []
    for seat in [*first, *second]:
        crew._halve_calls(seat, for_memory)
        halvings.append(crew._halvings)
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
    assert deaths.was_for_memory(error, ray.put(origin)) is False
    assert deaths.was_for_memory(error, ray.put(replace(origin, killed=origin.killed - 1))) is True
    assert deaths.was_for_memory(error, ray.put(replace(origin, killed=None))) is None
    assert deaths.was_for_memory(error, ray.put(replace(origin, node="0" * 56))) is None
    assert deaths.was_for_memory(ray.exceptions.OutOfMemoryError("low"), ray.put(origin)) is True


def test_workers_that_no_node_can_hold_are_refused(ray_session):
    ray_runner.require_a_node(Workers(1, 1, 0, 10**9), 10**8)
    for workers in (Workers(1, 1000, 0, 10**9), Workers(1, 1, 1000, 10**9)):
        with pytest.raises(Refused, match="what one node has: [0-9]+ cores"):
            ray_runner.require_a_node(workers, None)
    with pytest.raises(Refused, match="100 TB"):
        ray_runner.require_a_node(Workers(1, 1, 0, 10**14), 10**14)


def test_a_workers_memory_is_no_more_than_a_node_has(write_job):
    even, uneven = (Resources(8, 0, 64 * 10**9, node) for node in (64 * 10**9, 16 * 10**9))
    job = Job.load(write_job(run={"workers": 2, "shard_windows": 10}))
    assert prepare(job, even).plan.workers.memory == 32 * 10**9
    assert prepare(job, uneven).plan.workers.memory == 16 * 10**9
