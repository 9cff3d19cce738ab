"""Where workers fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensitivity.errors import Refused
from sensitivity.job import Job
from sensitivity.placement import Node, fit, memory_on, place
from sensitivity.plan import Workers

GB = 10**9
MODEST = GB // 10  # bytes that a worker takes before any window
TWO_KINDS = [Node(8, 2, 64 * GB), Node(4, 0, 16 * GB)]


def job(**run: Any) -> Job:
    content = {"model": {"path": "m.keras"}, "series": {"path": "s.csv"}, "run": {"path": "run", **run}}
    return Job.parse(content, Path("/"))


@pytest.mark.parametrize(
    ("run", "cpus", "gpus", "count", "share"),
    [
        ({}, 8, 0, 8, 0),
        ({"cpus_per_worker": 3}, 8, 0, 2, 0),
        ({}, 8, 2, 2, 1),
        ({"gpus_per_worker": 0.25}, 16, 2, 8, 0.25),
        ({"gpus_per_worker": 2}, 16, 5, 2, 2),
        ({"gpus_per_worker": 0}, 4, 2, 4, 0),
        ({"workers": 3}, 8, 0, 3, 0),
        ({"memory_per_worker": "4GB"}, 8, 0, 5, 0),
    ],
)
def test_workers_are_placed_by_cores_gpus_and_memory(run, cpus, gpus, count, share):
    workers = place(job(**run), [Node(cpus, gpus, 20 * GB)], MODEST, 100)
    assert (workers.count, workers.gpus) == (count, share)


@pytest.mark.parametrize(
    ("run", "key"),
    [
        ({"gpus_per_worker": 1}, "run.gpus_per_worker"),
        ({"cpus_per_worker": 9}, "run.cpus_per_worker"),
        ({"workers": 9}, "run.workers"),
        ({"memory_per_worker": "30GB"}, "run.memory_per_worker"),
    ],
)
def test_workers_that_do_not_fit_are_refused(run, key):
    with pytest.raises(Refused) as refusal:
        place(job(**run), [Node(8, 0, 20 * GB)], MODEST, 100)
    assert refusal.value.key == key


@pytest.mark.parametrize(
    ("run", "count", "memory"),
    [
        ({"gpus_per_worker": 0, "cpus_per_worker": 3}, 3, 16),
        ({"gpus_per_worker": 0, "cpus_per_worker": 8}, 1, 64),
        ({"gpus_per_worker": 0}, 12, 4),
        ({"gpus_per_worker": 0, "workers": 4}, 4, 16),
        ({}, 2, 32),
    ],
)
def test_workers_are_counted_node_by_node(run, count, memory):
    workers = place(job(**run), TWO_KINDS, MODEST, 100)
    assert (workers.count, workers.memory) == (count, memory * GB)


NODES = st.lists(
    st.builds(Node, st.integers(1, 9), st.integers(0, 3), st.integers(GB, 64 * GB)), min_size=1, max_size=4
)


@given(NODES, st.integers(1, 3), st.sampled_from([0, 0.25, 0.6, 1, 2]), st.integers(1, 40))
def test_all_find_room_and_none_could_have_more(nodes, cpus, gpus, count):
    run = {"cpus_per_worker": cpus, "gpus_per_worker": gpus, "workers": count}
    try:
        workers = place(job(**run), nodes, 0, 100)
    except Refused:
        assert sum(fit(node, Workers(1, cpus, gpus, 0)) for node in nodes) < count
        return
    assert sum(fit(node, workers) for node in nodes) >= count
    more = Workers(count, cpus, gpus, workers.memory + 1)
    assert sum(fit(node, more) for node in nodes) < count
    for node in nodes:
        there = fit(node, workers)
        if there:
            assert memory_on(node, workers) >= workers.memory
            assert memory_on(node, workers) * there <= node.memory


def test_shares_of_a_gpu_are_of_one_gpu():
    assert fit(Node(8, 2, GB), Workers(1, 1, 0.6, 0)) == 2
    assert fit(Node(8, 2, GB), Workers(1, 1, 1 / 3, 0)) == 6
    assert fit(Node(8, 5, GB), Workers(1, 1, 2, 0)) == 2


def test_workers_that_each_node_lacks_something_for_are_refused():
    with pytest.raises(Refused, match=r"(?s)run\.cpus_per_worker, run\.gpus_per_worker.*8 cores, 0 GPUs"):
        place(job(cpus_per_worker=8, gpus_per_worker=1), [Node(8, 0, GB), Node(4, 2, GB)], MODEST, 100)


def test_an_autoscaled_cluster_is_asked_for_what_it_has_no_room_for():
    asked = job(workers=8, gpus_per_worker=1, memory_per_worker="12GB")
    assert place(asked, [], MODEST, 100, autoscale=True) == Workers(8, 1, 1.0, 12 * GB)
    here = place(job(workers=8, gpus_per_worker=1), TWO_KINDS, MODEST, 100, autoscale=True)
    assert here == Workers(8, 1, 1.0, 32 * GB)


@pytest.mark.parametrize(
    ("run", "key"),
    [
        ({"memory_per_worker": "1GB"}, "run.workers"),
        ({"workers": 2, "memory_per_worker": "1GB"}, "run.gpus_per_worker"),
        ({"workers": 2, "gpus_per_worker": 1}, "run.memory_per_worker"),
        ({"workers": 2, "gpus_per_worker": 1, "memory_per_worker": "50MB"}, "run.memory_per_worker"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(run, key):
    with pytest.raises(Refused) as refusal:
        place(job(**run), [], MODEST, 100, autoscale=True)
    assert refusal.value.key == key
